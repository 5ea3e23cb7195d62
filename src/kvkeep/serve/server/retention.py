"""`Retention`: pins with an end for prefixes that clients ask to be kept, within a budget."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, NotCached
from kvkeep.core.keys import chain_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.cache import PagedCache, Pin
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["Keep", "Retention"]

_ALL_SHARE = 0.5
"""Share of the pool that the pins of all namespaces cover together, since salts can be made up."""
_ROOT = bytes(32)

Name = tuple["Namespace", bytes]
"""A namespace, and the key of the prefix that ends with a page."""


@dataclass(slots=True, eq=False)
class Keep:
    """What one prompt asks to be kept: (position in tokens, seconds), in order; and the result.

    ``pinned_tokens`` of the prompt are pinned, in whole pages; ``unpinned_tokens`` more would have
    been within a larger budget.
    """

    wanted: Sequence[tuple[int, float]]
    pinned_tokens: int = 0
    unpinned_tokens: int = 0


class Retention:
    """Pins prefixes softly, so that no request ever waits or fails because of a pin.

    The pins of a namespace cover at most ``share`` of the pool's pages, those of all at most half.
    A page under several pins counts once. Beyond the budget a pin is shortened: it covers the
    beginning of its prefix, as far as there is budget. A prefix that is pinned again gets a new
    end.

    Thread safety: `keep` is safe. Memory: about 400 bytes for each pinned page. Cost of `keep`: one
    hash for each page before the last breakpoint, besides that of the pins.
    """

    def __init__(
        self, cache: PagedCache, share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self.most = int(cache.num_pages * share)
        self.most_of_all = max(self.most, int(cache.num_pages * _ALL_SHARE))
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: dict[Name, float] = {}
        self._due: list[tuple[float, int, Name]] = []
        self._serial = 0
        self._pages: Counter[Namespace] = Counter()
        self._pins: dict[Name, Pin] = {}
        self.pinned_tokens = 0
        """Tokens pinned since the start, again for each request."""
        self.unpinned_tokens = 0
        """Tokens not pinned since the start, because their namespace had no budget left."""

    def keep(self, tokens: TokenArray, namespace: Namespace, keep: Keep) -> None:
        """Pin what ``keep`` wants of a prompt whose pages are cached now; set its results."""
        size = self._cache.page_size
        last = max((at for at, _ in keep.wanted), default=0) // size
        if not last or not self._cache.reuse:
            return
        keys = chain_keys(_ROOT, tokens[: last * size].tobytes(), size * tokens.itemsize)
        with self._lock:
            now = self._clock()
            self._expire(now)
            granted = self._grant(keys, namespace, keep.wanted, now)
            pinned = 0
            for at, seconds in keep.wanted:
                pages = min(at // size, granted)
                if pages:
                    name = namespace, keys[pages - 1]
                    pinned = max(pinned, self._pin(tokens[: pages * size], name, seconds))
            keep.pinned_tokens = pinned
            keep.unpinned_tokens = last * size - pinned
            self.pinned_tokens += keep.pinned_tokens
            self.unpinned_tokens += keep.unpinned_tokens

    def _grant(
        self,
        keys: Sequence[bytes],
        namespace: Namespace,
        wanted: Sequence[tuple[int, float]],
        now: float,
    ) -> int:
        """Count the pages of a prompt against the budget; return how many leading ones fit."""
        size = self._cache.page_size
        for number, key in enumerate(keys):
            end = now + max(seconds for at, seconds in wanted if at // size > number)
            name = namespace, key
            known = self._ends.get(name)
            if known is None:
                if self._pages[namespace] >= self.most or len(self._ends) >= self.most_of_all:
                    return number
                self._pages[namespace] += 1
            if known is None or end > known:
                self._ends[name] = end
                self._serial += 1
                heapq.heappush(self._due, (end, self._serial, name))
        return len(keys)

    def _pin(self, tokens: TokenArray, name: Name, seconds: float) -> int:
        """Pin a prefix, in place of an earlier pin of it; return the tokens pinned."""
        earlier = self._pins.get(name)
        if earlier is not None and earlier.active and earlier.expires is not None:
            seconds = max(seconds, earlier.expires - self._clock())
        try:
            pin = self._cache.pin(tokens, name[0], ttl=seconds)
        except (NotCached, InvalidValue):  # the request stored nothing, or too many pins are set
            return 0
        self._pins[name] = pin
        if earlier is not None and earlier.active:
            with suppress(NotCached):  # it may end between the two calls
                self._cache.unpin(earlier)
        return pin.num_tokens

    def _expire(self, now: float) -> None:
        """Give back the budget of pages whose time is over."""
        while self._due and self._due[0][0] <= now:
            end, _, name = heapq.heappop(self._due)
            if self._ends.get(name) != end:
                continue  # it got a later end
            del self._ends[name]
            self._pins.pop(name, None)
            namespace = name[0]
            self._pages[namespace] -= 1
            if not self._pages[namespace]:
                del self._pages[namespace]
        if len(self._due) > 2 * len(self._ends) + 64:  # most entries have a later end by now
            self._due = [item for item in self._due if self._ends.get(item[2]) == item[0]]
            heapq.heapify(self._due)

    @property
    def num_pages(self) -> int:
        """Pages counted against the budgets now."""
        with self._lock:
            self._expire(self._clock())
            return len(self._ends)
