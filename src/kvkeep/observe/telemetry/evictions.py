"""`PageTimes`: the residency of pages, the reasons of evictions, and the gaps between uses."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import whole
from kvkeep.core.events import Evicted, Stored
from kvkeep.observe.telemetry.histogram import Buckets, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from kvkeep.core.events import Event

    PageArray = npt.NDArray[np.int32]
    _Note = tuple[float, PageArray, str] | tuple[float, PageArray, int, int]

__all__ = ["REASONS", "PageTimes", "TimesOfPages"]

REASONS: Final = ("pressure", "asked", "dropped", "cleared")
"""Reasons of evictions (`kvkeep.core.events.Evicted`)."""

_SECONDS = (0.1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
_LONGEST_WAY = 256  # runs upwards that count a use; a conversation has fewer turns
_NEVER = float("nan")
_MUCH = 4096  # waiting events, beyond which the hook counts some of them
_A_LITTLE = 16
_MOST_OPEN = 1 << 16  # sequences whose run is known


@dataclass(frozen=True, slots=True)
class TimesOfPages:
    """A `PageTimes` at one moment: evicted pages, residency and reuse gaps.

    ``residency`` has a value for each evicted page whose storing was seen, by reason;
    ``reuse_gap`` one for each sequence that stored pages behind a reused prefix.
    """

    evicted: Mapping[str, int]
    residency: Mapping[str, Buckets]
    reuse_gap: Buckets


class PageTimes:
    """A hook for a cache of ``num_pages`` pages: ``cache.subscribe(times.see)``.

    Residency is the time from `Stored` to `Evicted` of each page. A reuse gap is the time from one
    use of a prefix to the next: the first `Stored` of a sequence names the page, stored by another
    sequence, that it continues; that counts as a use of the page's run and all runs above it. A run
    is the pages that one sequence stored. Reuse by sequences that store nothing is not seen.

    The hook queues events and `snapshot` counts them; once many wait, each call of the hook counts
    a few. ``clock`` gives seconds. Memory: 28 bytes a page, and the queue.

    Thread safety: `see` is called by one thread at a time, `snapshot` by any.
    Cost: see `docs/observability.md`.
    """

    def __init__(self, num_pages: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        num_pages = whole("num_pages", num_pages, 1)
        self._clock = clock
        self._waiting: deque[_Note] = deque()
        self._working = threading.Lock()
        self._stored = np.full(num_pages, _NEVER)
        # A run is named by its first page, which is evicted last.
        self._run = np.full(num_pages, -1, np.int32)
        self._used: list[float] = [_NEVER] * num_pages
        self._parent: list[int] = [-1] * num_pages
        self._own: OrderedDict[int, int] = OrderedDict()  # sequence → the run it adds to
        self._evicted = dict.fromkeys(REASONS, 0)
        self._residency = {reason: Histogram(_SECONDS) for reason in REASONS}
        self._gaps = Histogram(_SECONDS)

    def see(self, event: Event) -> None:
        """Queue an event of the cache, without its tokens, which take most of its memory."""
        if isinstance(event, Stored):
            self._waiting.append((self._clock(), event.pages, event.parent, event.sequence))
            # Not blocking: while a reader counts, the cache does not wait.
            if len(self._waiting) > _MUCH and self._working.acquire(blocking=False):
                try:
                    self._work(_A_LITTLE)
                finally:
                    self._working.release()
        elif isinstance(event, Evicted) and len(event.pages):  # not of groups alone
            self._waiting.append((self._clock(), event.pages, event.reason))

    def snapshot(self) -> TimesOfPages:
        """Return the figures so far. Cost: a few microseconds an event since the last call."""
        with self._working:
            self._work(len(self._waiting))
            return TimesOfPages(
                dict(self._evicted),
                {reason: times.buckets() for reason, times in self._residency.items()},
                self._gaps.buckets(),
            )

    def _work(self, most: int) -> None:
        """Count up to ``most`` queued events, in order; one thread at a time."""
        for _ in range(min(most, len(self._waiting))):
            note = self._waiting.popleft()
            if len(note) == 4:
                self._note_stored(*note)
            else:
                self._note_evicted(*note)

    def _note_stored(self, now: float, pages: PageArray, parent: int, sequence: int) -> None:
        self._stored[pages] = now
        own = self._own.get(sequence)
        if own is None and parent >= 0:
            self._reused(parent, now)
        if own is not None and parent >= 0 and self._run[parent] == own:
            first = own  # it continues its own run: an answer's tokens come page by page
        else:
            first = self._own[sequence] = int(pages[0])
            self._parent[first] = parent
            if len(self._own) > _MOST_OPEN:
                self._own.popitem(last=False)  # closed long ago
        self._run[pages] = first
        self._used[first] = now

    def _reused(self, page: int, now: float) -> None:
        """Count a use of the run of ``page`` and of all runs above it."""
        run = int(self._run[page])
        if run < 0:
            return  # stored before this hook was subscribed
        self._gaps.add(now - self._used[run])
        for _ in range(_LONGEST_WAY):
            self._used[run] = now
            above = self._parent[run]
            if above < 0:
                return
            run = int(self._run[above])
            if run < 0:
                return

    def _note_evicted(self, now: float, pages: PageArray, reason: str) -> None:
        if reason not in self._evicted:  # a reason added later than this table
            self._evicted[reason] = 0
            self._residency[reason] = Histogram(_SECONDS)
        self._evicted[reason] += len(pages)
        ages = now - self._stored[pages]
        known = ages == ages  # noqa: PLR0124 - NaN: stored before this hook was subscribed
        self._residency[reason].add_all(ages if known.all() else ages[known])
