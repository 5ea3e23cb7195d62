"""`UsageTable`: what requests use, by namespace and over time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, whole
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
    "NamespaceShare",
    "NamespaceUsage",
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


_RESCALE_AFTER = 200  # half-lives; a float overflows at 1,024


@dataclass(slots=True)
class NamespaceUsage(ReuseCounts):
    """Usage of one namespace, which is a tenant (``cache_salt``), since it was first remembered."""

    tenant: str = ""
    recent_prompt: float = field(default=0.0, repr=False)
    """Prompt tokens, each halved with every half-life, times the table's weight."""
    recent_reused: float = field(default=0.0, repr=False)


@dataclass(frozen=True, slots=True)
class NamespaceShare:
    """A namespace's share of all recent prompt tokens, and the reused share of these (0 … 1).

    ``name`` is None for all namespaces that are not listed.
    """

    name: str | None
    prompt: float
    reused: float


@dataclass(frozen=True, slots=True)
class ReuseSnapshot:
    """A `ReuseTotals` at one moment, with the shares of the largest namespaces."""

    hit_tokens: Mapping[str, int]
    saved_seconds_by_tier: Mapping[str, float]
    computed_tokens: int
    shares: tuple[NamespaceShare, ...]

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
    namespaces: list[NamespaceUsage]


class UsageTable:
    """A `RequestObserver` (`see`) that adds up usage for metrics and the dashboard.

    ``num_pages`` are those of the cache. At most ``names`` namespaces are remembered: beyond that
    the half with fewer recent prompt tokens is forgotten, and counts as unlisted. Recent tokens are
    weighted: after ``half_life_s`` seconds a token counts half. ``clock`` gives seconds since 1970,
    ``monotonic`` seconds.

    Thread safety: all methods. Memory: bounded, below 4 MB, names aside. Cost: about 5 µs a
    request; snapshots take one pass over the names.
    """

    def __init__(
        self,
        num_pages: int = 1,
        *,
        half_life_s: float = 600.0,
        names: int = 10_000,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < half_life_s < float("inf"):
            raise InvalidValue(f"half_life_s is a time above zero that ends, got {half_life_s}")
        self._half_life_s = half_life_s
        self._most = whole("names", names, 2)
        self._clock = clock
        self._monotonic = monotonic
        self._weighed_from = monotonic()
        self._lock = threading.RLock()  # `moment` takes several snapshots at once
        self._names: dict[str, NamespaceUsage] = {}
        self._all = NamespaceUsage()
        self._forgot = False
        self._history = ReuseHistory(clock())
        self._totals = ReuseTotals()
        self.pages = PageOwners(num_pages)
        """Cached pages by namespace: subscribe ``pages.see`` to the cache."""
        # Running requests, by id: the namespace row and all other rows they are counted in.
        self._running: dict[str, tuple[NamespaceUsage, tuple[ReuseCounts, ...]]] = {}

    # --- events ------------------------------------------------------------------------------

    def see(self, event: RequestEvent) -> None:
        """Count an event of a request."""
        match event:
            case RequestAdmitted():
                self._admitted(event)
            case RequestLoaded():
                self._loaded(event)
            case PromptComputed():
                with self._lock:
                    self._totals.computed(event.tokens, event.seconds)
            case RequestEnded():
                with self._lock:
                    self._running.pop(event.request.id, None)

    def note_first_token(self, seconds: float, *, prompt_tokens: int, reused_tokens: int) -> None:
        """Note how long a client waited for its first token."""
        with self._lock:
            warm = reused_tokens >= WARM * prompt_tokens
            self._history.first_token(self._clock(), seconds, warm=warm)

    def _admitted(self, event: RequestAdmitted) -> None:
        request, reused = event.request, event.cached_tokens
        tenant, tokens, now = request.namespace.tenant, len(request.prompt), self._clock()
        with self._lock:
            self._totals.reused(POOL, reused)
            row = self._names.get(tenant)
            if row is None:
                row = self._names[tenant] = NamespaceUsage(tenant=tenant)
            counts: tuple[ReuseCounts, ...] = (row, self._history.bucket(now))
            for one in counts:
                one.add(tokens, reused)
            # New tokens weigh more, instead of all earlier ones less: no other row is touched.
            weight = self._weight()
            for one in (row, self._all):
                one.recent_prompt += weight * tokens
                one.recent_reused += weight * reused
            self._running[request.id] = row, counts
            if len(self._names) > self._most:
                self._forget()

    def _loaded(self, event: RequestLoaded) -> None:
        with self._lock:
            for start, stop, tier in event.report.sources:
                self._totals.reused(tier.partition(", ")[0], stop - start)
            row, counts = self._running.get(event.request.id, (None, ()))
            if row is not None:
                tokens = event.report.tokens
                for one in counts:
                    one.reused_tokens += tokens
                weight = self._weight()
                row.recent_reused += weight * tokens
                self._all.recent_reused += weight * tokens

    def _weight(self) -> float:
        """Return the weight of a token now; scale all down before the weight overflows."""
        now = self._monotonic()
        lives = (now - self._weighed_from) / self._half_life_s
        if lives > _RESCALE_AFTER:
            scale = 0.0 if lives > 1000 else 2.0**-lives
            for row in (*self._names.values(), self._all):
                row.recent_prompt *= scale
                row.recent_reused *= scale
            self._weighed_from, lives = now, 0.0
        return float(2.0**lives)

    def _forget(self) -> None:
        rows = self._names.values()
        kept = nlargest(self._most // 2, rows, key=lambda row: row.recent_prompt)
        self._names = {row.tenant: row for row in kept}
        self._forgot = True

    # --- snapshots ---------------------------------------------------------------------------

    def history(self) -> list[tuple[int, int, int]]:
        """See `ReuseHistory.points`."""
        with self._lock:
            return self._history.points(self._clock())

    def times(self) -> tuple[FirstTokenTimes, FirstTokenTimes]:
        """See `ReuseHistory.times`."""
        with self._lock:
            return self._history.times(self._clock())

    def namespaces(self, most: int) -> list[NamespaceUsage]:
        """Return copies of the ``most`` rows with the most prompt tokens, largest first."""
        with self._lock:
            largest = nlargest(most, self._names.values(), key=lambda row: row.prompt_tokens)
            return [replace(row) for row in largest]

    def moment(self, most: int) -> UsageMoment:
        """Return all snapshots at one moment; of namespaces, ``most``."""
        with self._lock:
            return UsageMoment(
                self.history(),
                *self.times(),
                self.reuse(most),
                self.namespaces(most),
            )

    def reuse(self, most: int = 20) -> ReuseSnapshot:
        """Return the totals, with the shares of the ``most`` largest namespaces."""
        with self._lock:
            did = self._totals
            return ReuseSnapshot(
                dict(did.hit_tokens),
                dict(did.saved_seconds),
                did.computed_tokens,
                tuple(self._shares(most)),
            )

    def _shares(self, most: int) -> list[NamespaceShare]:
        """Return the largest, largest first, then the rest as one; their prompt shares sum to 1."""
        whole_prompt, whole_reused = self._all.recent_prompt, self._all.recent_reused
        if not whole_prompt:
            return []
        largest = nlargest(most, self._names.values(), key=lambda row: row.recent_prompt)
        shares = [
            _share(row.tenant, row.recent_prompt, row.recent_reused, whole_prompt)
            for row in largest
        ]
        prompt = whole_prompt - sum(row.recent_prompt for row in largest)
        reused = whole_reused - sum(row.recent_reused for row in largest)
        if len(self._names) > most or (self._forgot and prompt > 0):
            shares.append(_share(None, max(prompt, 0.0), max(reused, 0.0), whole_prompt))
        return shares


def _share(name: str | None, prompt: float, reused: float, whole_prompt: float) -> NamespaceShare:
    own = min(reused / prompt, 1.0) if prompt else 0.0
    return NamespaceShare(name, prompt / whole_prompt, own)
