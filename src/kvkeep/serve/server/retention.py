"""`Retention`: pins with an end for prefixes that clients ask to be kept, within a budget."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvkeep.core.errors import InvalidValue, NotCached
from kvkeep.serve.server.pin_budget import PinBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.core.cache import PagedCache, Pin
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.server.pin_units import KeptUnit

__all__ = ["ALL_SHARE", "Keep", "Retention", "Unkept"]

Unkept = Literal["over_budget", "no_tiers", "not_stored"]
"""Why tokens are not kept: there is no budget left, no tier, or the request stores nothing."""
ALL_SHARE = 0.5
"""Share of the pool, or of a tier, that the pins of all namespaces cover together."""


@dataclass(slots=True, eq=False)
class Keep:
    """What one prompt asks to be kept: (position in tokens, seconds), in order; and the result.

    ``pinned_tokens`` of the prompt are pinned, in whole pages, or whole blocks of tiers and the
    rest behind them; ``unpinned_tokens`` more are not: ``why`` says why.
    """

    wanted: Sequence[tuple[int, float]]
    pinned_tokens: int = 0
    unpinned_tokens: int = 0
    why: Unkept = "over_budget"

    def refuse(self, why: Unkept) -> None:
        """Pin nothing."""
        self.unpinned_tokens = max((at for at, _ in self.wanted), default=0)
        self.why = why


class Retention:
    """Pins prefixes softly, so that no request ever waits or fails because of a pin.

    The pins of a namespace cover at most ``share`` of the pool's pages, those of all at most half;
    see `PinBudget` for what happens beyond. ``weights`` are those of tenants, by name. A prefix
    that is pinned again gets a new end.

    Thread safety: `keep` is safe. Memory: about 450 bytes for each pinned page of 16 tokens. Cost
    of `keep`: a look at each page before the last breakpoint, besides that of the pins.
    """

    def __init__(
        self,
        cache: PagedCache,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        most = int(cache.num_pages * share)
        self._budget = PinBudget(
            _PoolPins(cache),
            unit=cache.page_size,
            most_each=most,
            most=max(most, int(cache.num_pages * ALL_SHARE)),
            clock=clock,
            weights=weights,
        )
        self.pinned_tokens = 0
        """Tokens pinned since the start, again for each request."""
        self.unpinned_tokens = 0
        """Tokens not pinned since the start, because there was no budget left."""

    def keep(self, tokens: TokenArray, namespace: Namespace, keep: Keep) -> None:
        """Pin what ``keep`` wants of a prompt whose pages are cached now; set its results."""
        size = self._cache.page_size
        last = max((at for at, _ in keep.wanted), default=0) // size * size
        if not last or not self._cache.reuse:
            return
        with self._lock:
            keep.pinned_tokens = self._budget.keep(tokens, namespace, keep.wanted)
            keep.unpinned_tokens = last - keep.pinned_tokens
            self.pinned_tokens += keep.pinned_tokens
            self.unpinned_tokens += keep.unpinned_tokens

    @property
    def num_pages(self) -> int:
        """Pages counted against the budgets now."""
        with self._lock:
            self._budget.expire()
            return self._budget.units

    @property
    def given_tokens(self) -> int:
        """Tokens whose pins ended early since the start, to make room for another tenant."""
        return self._budget.given_tokens

    def tokens_of(self) -> dict[str, int]:
        """Return the tokens of each tenant that count against its budget now, in pages."""
        with self._lock:
            self._budget.expire()
            size = self._cache.page_size
            return {name: pages * size for name, pages in self._budget.by_tenant().items()}


class _PoolPins:
    """Pins in the page pool; the handle is a `Pin`."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def pin(self, kept: KeptUnit, tokens: TokenArray, seconds: float) -> int:
        try:
            pin = self._cache.pin(tokens, kept.namespace, ttl=seconds)
        except (NotCached, InvalidValue):  # the request stored nothing, or too many pins are set
            return 0
        earlier, kept.handle = kept.handle, pin
        self._end(earlier)
        return pin.num_tokens

    def unpin(self, kept: KeptUnit, start: int) -> None:
        earlier, kept.handle = kept.handle, None
        self._end(earlier)

    def _end(self, pin: Pin | None) -> None:
        if pin is not None:
            with suppress(NotCached):  # it has ended by itself
                self._cache.unpin(pin)
