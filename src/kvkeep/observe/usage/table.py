"""`UsageTable`: reuse by tier and over time. `PageOwners`: the cached pages of each tenant."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.core.events import Evicted, Stored
from kvkeep.observe.usage.history import WARM, FirstTokenTimes, ReuseCounts, ReuseHistory
from kvkeep.observe.usage.records import (
    PromptComputed,
    RequestAdmitted,
    RequestEnded,
    RequestLoaded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from kvkeep.core.events import Event
    from kvkeep.observe.usage.records import RequestEvent

    PageArray = npt.NDArray[np.int32]

__all__ = [
    "POOL",
    "PageOwners",
    "ReuseSnapshot",
    "ReuseTotals",
    "UsageMoment",
    "UsageTable",
]

_NOBODY = 0


class PageOwners:
    """Counts stored pages by the tenant of their namespace; a hook of a cache of ``num_pages``.

    Memory: 4 bytes a page and a little for each tenant with pages. Cost: a few microseconds an
    event. Thread safety: `see` is called by one thread at a time; ``pages`` may be read by any.
    """

    def __init__(self, num_pages: int) -> None:
        self.pages: Counter[str] = Counter()
        self._owners = np.zeros(num_pages, np.int32)  # by page: the number of a tenant
        self._tenants: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._last = _NOBODY

    def see(self, event: Event) -> None:
        """Count an event of the cache."""
        if isinstance(event, Stored):
            self.stored(event.namespace.tenant, event.pages)
        elif isinstance(event, Evicted):
            self._evicted(event.pages)

    def stored(self, tenant: str, pages: PageArray) -> None:
        """Count ``pages`` for a tenant."""
        number = self._numbers.get(tenant)
        if number is None:
            self._last += 1
            number = self._numbers[tenant] = self._last
            self._tenants[number] = tenant
        self._owners[pages] = number
        self.pages[tenant] += len(pages)

    def _evicted(self, pages: PageArray) -> None:
        numbers, counts = np.unique(self._owners[pages], return_counts=True)
        self._owners[pages] = _NOBODY
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            tenant = self._tenants.get(number)
            if tenant is None:
                continue
            self.pages[tenant] -= count
            if self.pages[tenant] <= 0:
                del self.pages[tenant], self._numbers[tenant], self._tenants[number]


POOL: Final = "pool"
"""The name of the page pool among the tiers."""

_MOST_TIERS = 32  # an operator names a few; this is the bound for any other caller


class ReuseTotals:
    """Counts since the start. Thread safety: none.

    ``hit_tokens`` and ``saved_seconds`` by tier ("pool", or a tier behind it); ``computed_tokens``
    of prompts took ``computed_seconds``. Saved: each reused token counts the average time of a
    computed token at that moment.
    """

    def __init__(self) -> None:
        self.hit_tokens = {POOL: 0}
        self.saved_seconds = {POOL: 0.0}
        self.computed_tokens = 0
        self.computed_seconds = 0.0
        self._unpriced: dict[str, int] = {}  # reused before the first token was computed

    def reused(self, tier: str, tokens: int) -> None:
        """Count tokens reused from a tier."""
        if tier not in self.hit_tokens and len(self.hit_tokens) > _MOST_TIERS:
            tier = "other"
        self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + tokens
        if self.computed_tokens:
            self._save(tier, tokens)
        else:
            self._unpriced[tier] = self._unpriced.get(tier, 0) + tokens

    def computed(self, tokens: int, seconds: float) -> None:
        """Count computed tokens; their average time is the time that a reused token saves."""
        self.computed_tokens += tokens
        self.computed_seconds += seconds
        if self._unpriced and self.computed_tokens:
            for tier, unpriced in self._unpriced.items():
                self._save(tier, unpriced)
            self._unpriced = {}

    def _save(self, tier: str, tokens: int) -> None:
        seconds = tokens * self.computed_seconds / self.computed_tokens
        self.saved_seconds[tier] = self.saved_seconds.get(tier, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class ReuseSnapshot:
    """A `ReuseTotals` at one moment."""

    hit_tokens: Mapping[str, int]
    saved_seconds_by_tier: Mapping[str, float]
    computed_tokens: int

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.hit_tokens.values())


class UsageMoment(NamedTuple):
    """What a `UsageTable` has at one moment: its figures agree with each other."""

    history: list[tuple[int, int, int]]
    cold: FirstTokenTimes
    warm: FirstTokenTimes
    reuse: ReuseSnapshot


class UsageTable:
    """A `RequestObserver` (`see`) that adds up reuse for metrics and the dashboard.

    ``num_pages`` are those of the cache. ``clock`` gives seconds since 1970.

    Thread safety: all methods. Memory: bounded, below 1 MB beside 4 bytes a page. Cost: about 3 µs
    a request.
    """

    def __init__(self, num_pages: int = 1, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # `moment` takes several snapshots at once
        self._history = ReuseHistory(clock())
        self._totals = ReuseTotals()
        self.pages = PageOwners(num_pages)
        """Cached pages by namespace: subscribe ``pages.see`` to the cache."""
        # Running requests by id: the counts of the time at which they were admitted.
        self._running: dict[str, ReuseCounts] = {}

    # --- events ------------------------------------------------------------------------------

    def see(self, event: RequestEvent) -> None:
        """Count an event of a request."""
        with self._lock:
            match event:
                case RequestAdmitted():
                    counts = self._history.bucket(self._clock())
                    counts.add(len(event.request.prompt), event.cached_tokens)
                    self._running[event.request.id] = counts
                    self._totals.reused(POOL, event.cached_tokens)
                case RequestLoaded():
                    for start, stop, tier in event.report.sources:
                        self._totals.reused(tier.partition(", ")[0], stop - start)
                    if event.request.id in self._running:
                        self._running[event.request.id].reused_tokens += event.report.tokens
                case PromptComputed():
                    self._totals.computed(event.tokens, event.seconds)
                case RequestEnded():
                    self._running.pop(event.request.id, None)

    def note_first_token(self, seconds: float, *, prompt_tokens: int, reused_tokens: int) -> None:
        """Note how long a client waited for its first token."""
        with self._lock:
            warm = reused_tokens >= WARM * prompt_tokens
            self._history.first_token(self._clock(), seconds, warm=warm)

    # --- snapshots ---------------------------------------------------------------------------

    def history(self) -> list[tuple[int, int, int]]:
        """See `ReuseHistory.points`."""
        with self._lock:
            return self._history.points(self._clock())

    def times(self) -> tuple[FirstTokenTimes, FirstTokenTimes]:
        """See `ReuseHistory.times`."""
        with self._lock:
            return self._history.times(self._clock())

    def moment(self) -> UsageMoment:
        """Return all snapshots at one moment."""
        with self._lock:
            return UsageMoment(self.history(), *self.times(), self.reuse())

    def reuse(self) -> ReuseSnapshot:
        """Return the totals."""
        with self._lock:
            did = self._totals
            return ReuseSnapshot(
                dict(did.hit_tokens),
                dict(did.saved_seconds),
                did.computed_tokens,
            )
