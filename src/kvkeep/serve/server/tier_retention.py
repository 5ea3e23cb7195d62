"""`TierRetention`: keeps prompts in the tiers of a store for a time, within a budget."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import KVKeepError
from kvkeep.serve.server.pin_budget import PinBudget
from kvkeep.serve.server.retention import ALL_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.server.pin_units import KeptUnit
    from kvkeep.serve.server.retention import Keep
    from kvkeep.store import KVStore

__all__ = ["TierRetention"]

_log = logging.getLogger("kvkeep.server")

_AFTER_S: Final = (1.0, 10.0, 60.0)
"""Seconds after which a pin is set: some tiers have written the blocks by then, some later."""
_CLOSE_S: Final = 2.0


class TierRetention:
    """Pins stored prompts in every tier with a budget of its own, when they are written there.

    The pins of a namespace cover at most ``share`` of the largest tier, those of all at most half;
    see `PinBudget` for what happens beyond. Each tier pins at most half of what it holds. So
    `keep` promises what the budgets allow, and ``lost_tokens`` counts what could not be pinned.

    Thread safety: all methods. A thread of its own sets and ends the pins, since tiers may be slow.
    Memory: 4 bytes a token and about 350 bytes a block.
    """

    def __init__(
        self,
        engine: Engine,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        weights: Mapping[str, float] | None = None,
        after_s: Sequence[float] = _AFTER_S,
    ) -> None:
        assert engine.store is not None, "a server without a store makes none"
        store = engine.store
        self._size = store.block_tokens
        largest = max((tier.capacity or 0 for tier in store.stats().tiers), default=0)
        blocks = largest // max(1, self._size * store.geometry.bytes_per_token)
        most = int(blocks * share)
        self._lock = threading.Lock()
        self._pins = _TierPins(engine, store, self._lock, clock, after_s)
        self._budget = PinBudget(
            self._pins,
            unit=self._size,
            tails=True,
            most_each=most,
            most=max(most, int(blocks * ALL_SHARE)),
            clock=clock,
            weights=weights,
        )
        self.kept_tokens = 0
        """Tokens within the budgets since the start, again for each request."""
        self.unkept_tokens = 0
        """Tokens beyond the budgets since the start."""

    def keep(self, tokens: TokenArray, namespace: Namespace, keep: Keep) -> None:
        """Keep what ``keep`` wants of a prompt that is being stored; set its results.

        A position inside of the prompt counts to the end of the block before it.
        """
        ends = [
            (at if at == len(tokens) else at // self._size * self._size, seconds)
            for at, seconds in keep.wanted
        ]
        last = max((at for at, _ in ends), default=0)
        if not last:
            return
        with self._lock:
            keep.pinned_tokens = self._budget.keep(tokens, namespace, ends)
            keep.unpinned_tokens = last - keep.pinned_tokens
            self.kept_tokens += keep.pinned_tokens
            self.unkept_tokens += keep.unpinned_tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens within the budgets that no tier pinned: not written, or more than its half."""
        return self._pins.lost_tokens

    @property
    def given_tokens(self) -> int:
        """Tokens whose pins ended early since the start, to make room for another tenant."""
        return self._budget.given_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks counted against the budgets now."""
        with self._lock:
            self._budget.expire()
            return self._budget.units

    def tokens_of(self) -> dict[str, int]:
        """Return about how many tokens of each tenant count against its budget now, in blocks."""
        with self._lock:
            self._budget.expire()
            return {name: units * self._size for name, units in self._budget.by_tenant().items()}

    def close(self) -> None:
        """Set the pins that are still to be set, for two seconds at most, and end the thread."""
        self._pins.close()


@dataclass(slots=True, eq=False)
class _Wish:
    """A pin that is to be set in the tiers, and again when more of the prompt is written."""

    kept: KeptUnit
    tenant: str
    end: float
    tries: int = 0
    pinned: int = 0
    cancelled: bool = False
    start: int = 0
    """Once it is cancelled: tokens from here on are under no pin any more."""


@dataclass(order=True, slots=True)
class _Due:
    at: float
    serial: int
    wish: _Wish | None = field(compare=False)
    over: tuple[TokenArray, int, str] | None = field(default=None, compare=False)


class _TierPins:
    """Sets and ends pins in the tiers; the handle is a `_Wish`.

    ``lock`` is the budget's: it is held when `pin` and `unpin` are called.
    """

    def __init__(
        self,
        engine: Engine,
        store: KVStore,
        lock: threading.Lock,
        clock: Callable[[], float],
        after_s: Sequence[float],
    ) -> None:
        self._engine = engine
        self._store = store
        self._lock = lock
        self._clock = clock
        self._after_s = after_s
        self._wake = threading.Condition()
        self._due: list[_Due] = []
        self._serial = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self.lost_tokens = 0

    def pin(self, kept: KeptUnit, tokens: TokenArray, seconds: float) -> int:
        """Promise a pin; it is set soon."""
        tenant = self._engine.store_tenant(kept.namespace)
        if tenant is None:  # the engine is closed
            return 0
        if kept.handle is not None:
            kept.handle.cancelled, kept.handle.start = True, kept.tokens
        kept.handle = wish = _Wish(kept, tenant, self._clock() + seconds)
        self._put(_Due(time.monotonic() + self._after_s[0], 0, wish))
        return len(tokens)

    def unpin(self, kept: KeptUnit, start: int) -> None:
        """End a pin; the tiers are told soon."""
        wish: _Wish | None = kept.handle
        if wish is None:
            return
        wish.cancelled, wish.start, kept.handle = True, start, None
        if start < kept.tokens:  # pinned by this wish, or by an earlier one of a shorter prefix
            over = kept.prefix(), start, wish.tenant
            self._put(_Due(time.monotonic(), 0, None, over))

    def _put(self, due: _Due) -> None:
        with self._wake:
            if self._closing:
                return
            self._serial += 1
            due.serial = self._serial
            heapq.heappush(self._due, due)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvkeep pins", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    # --- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        last = None
        while (due := self._next(last)) is not None:
            if self._closing and last is None:
                last = time.monotonic() + _CLOSE_S
            try:
                self._do(due)
            except KVKeepError as error:  # the store was closed
                _log.warning("a pin could not be set in the tiers: %s", error)

    def _next(self, last: float | None) -> _Due | None:
        """Wait until something is due, or return it at once when this closes; None at the end."""
        with self._wake:
            while not self._closing:
                wait = self._due[0].at - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    break
                self._wake.wait(wait)
            if not self._due or (last is not None and time.monotonic() > last):
                return None
            return heapq.heappop(self._due)

    def _do(self, due: _Due) -> None:
        if due.over is not None:
            tokens, start, tenant = due.over
            self._store.unpin(tokens, start, tenant=tenant)
            return
        wish = due.wish
        assert wish is not None
        with self._lock:
            seconds = wish.end - self._clock()
            if wish.cancelled or seconds <= 0:
                return
            tokens = wish.kept.prefix()
        self._was_set(wish, tokens, self._store.pin(tokens, seconds, tenant=wish.tenant))

    def _was_set(self, wish: _Wish, tokens: TokenArray, pinned: int) -> None:
        start = pinned  # from here on it is to be unpinned: not under the lock, as a store may hang
        with self._lock:
            wish.pinned = max(wish.pinned, pinned)
            wish.tries += 1
            if wish.cancelled:  # meanwhile
                start = wish.start
            elif wish.tries < len(self._after_s):
                self._put(_Due(time.monotonic() + self._after_s[wish.tries], 0, wish))
            else:
                self.lost_tokens += len(tokens) - wish.pinned
        if start < pinned:
            self._store.unpin(tokens, start, tenant=wish.tenant)
