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

__all__ = ["POOL", "PageOwners", "ReuseTotals", "UsageMoment", "UsageTable"]

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


@dataclass(frozen=True, slots=True)
class ReuseTotals:
    """Counts since the start.

    ``hit_tokens`` and ``saved_seconds`` by tier ("pool", or a tier behind it); ``computed_tokens``
    of prompts. Saved: each reused token counts the average time of a computed token at that moment.
    """

    hit_tokens: Mapping[str, int]
    saved_seconds: Mapping[str, float]
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
    reuse: ReuseTotals


class UsageTable:
    """A `RequestObserver` (`see`) that adds up reuse for metrics and the dashboard.

    ``num_pages`` are those of the cache. ``clock`` gives seconds since 1970.

    Thread safety: all methods. Memory: bounded, below 1 MB beside 4 bytes a page. Cost: about 3 µs
    a request.
    """

    def __init__(self, num_pages: int = 1, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all below but `pages`
        self._history = ReuseHistory(clock())
        self._hit_tokens = {POOL: 0}
        self._saved_seconds = {POOL: 0.0}
        self._computed_tokens = 0
        self._computed_seconds = 0.0
        self._unpriced: dict[str, int] = {}  # reused before the first token was computed
        # Running requests by id: the counts of the time at which they were admitted.
        self._running: dict[str, ReuseCounts] = {}
        self.pages = PageOwners(num_pages)
        """Cached pages by namespace: subscribe ``pages.see`` to the cache."""

    def see(self, event: RequestEvent) -> None:
        """Count an event of a request."""
        with self._lock:
            match event:
                case RequestAdmitted():
                    counts = self._history.step(self._clock())
                    counts.prompt_tokens += len(event.request.prompt)
                    counts.reused_tokens += event.cached_tokens
                    self._running[event.request.id] = counts
                    self._reused(POOL, event.cached_tokens)
                case RequestLoaded():
                    for start, stop, tier in event.report.sources:
                        self._reused(tier.partition(", ")[0], stop - start)
                    if event.request.id in self._running:
                        self._running[event.request.id].reused_tokens += event.report.tokens
                case PromptComputed():
                    self._computed_tokens += event.tokens
                    self._computed_seconds += event.seconds
                    if self._unpriced and self._computed_tokens:
                        for tier, tokens in self._unpriced.items():
                            self._save(tier, tokens)
                        self._unpriced = {}
                case RequestEnded():
                    self._running.pop(event.request.id, None)

    def _reused(self, tier: str, tokens: int) -> None:
        if tier not in self._hit_tokens and len(self._hit_tokens) > _MOST_TIERS:
            tier = "other"
        self._hit_tokens[tier] = self._hit_tokens.get(tier, 0) + tokens
        if self._computed_tokens:
            self._save(tier, tokens)
        else:
            self._unpriced[tier] = self._unpriced.get(tier, 0) + tokens

    def _save(self, tier: str, tokens: int) -> None:
        seconds = tokens * self._computed_seconds / self._computed_tokens
        self._saved_seconds[tier] = self._saved_seconds.get(tier, 0.0) + seconds

    def note_first_token(self, seconds: float, *, prompt_tokens: int, reused_tokens: int) -> None:
        """Note how long a client waited for its first token."""
        with self._lock:
            warm = reused_tokens >= WARM * prompt_tokens
            self._history.first_token(self._clock(), seconds, warm=warm)

    def moment(self) -> UsageMoment:
        """Return all figures of this moment."""
        with self._lock:
            now = self._clock()
            totals = ReuseTotals(
                dict(self._hit_tokens), dict(self._saved_seconds), self._computed_tokens
            )
            return UsageMoment(self._history.points(now), *self._history.times(now), totals)
