"""Reuse in steps of five seconds, times to the first token, and growth of counters lately."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EVERY_S", "FirstTokenTimes", "Growth", "Lately", "ReuseCounts", "ReuseHistory"]

EVERY_S: Final = 5.0
"""Seconds between two samples that are kept."""
_MINUTE_S: Final = 60.0
_LONGEST_S: Final = 600.0
_MOST: Final = int(_LONGEST_S / EVERY_S) + 2

Counts = dict[tuple[str, str], int]


class Growth(NamedTuple):
    """By how much a counter grew in the last minute, in the last ten, and since the start."""

    minute: int
    ten_minutes: int
    total: int


class Lately:
    """Samples of counters, each named by what it counts and where; all begin at 0.

    Give it the counters by `note` every five seconds; samples that come sooner are left out. So the
    last minute is up to five seconds longer.

    Thread safety: all methods. Memory: 122 samples, about 100 bytes a counter each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, Counts]] = deque([(time.monotonic(), {})], maxlen=_MOST)

    @property
    def due(self) -> bool:
        """Whether the latest sample is five seconds old."""
        with self._lock:
            return time.monotonic() - self._samples[-1][0] >= EVERY_S

    def note(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Keep a sample, if it is due."""
        now = time.monotonic()
        with self._lock:
            if now - self._samples[-1][0] >= EVERY_S:
                self._samples.append((now, dict(counts)))

    def growth(self, counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], Growth]:
        """Return the growth of these counters, which are those of this moment."""
        now = time.monotonic()
        minute, longest = self._before(now - _MINUTE_S), self._before(now - _LONGEST_S)
        return {
            name: Growth(count - minute.get(name, 0), count - longest.get(name, 0), count)
            for name, count in counts.items()
        }

    def _before(self, at: float) -> Counts:
        """Return the latest sample that is as old as ``at``; else the oldest."""
        with self._lock:
            for time_of, counts in reversed(self._samples):
                if time_of <= at:
                    return counts
            return self._samples[0][1]


_BUCKET_S = 5
_BUCKETS = 120  # ten minutes
_WINDOW_S = 300.0
_MOST_TIMES = 2000
WARM = 0.5
"""A request is warm if at least this share of its prompt was reused."""


@dataclass(slots=True)
class ReuseCounts:
    """Prompt tokens of the requests of five seconds, and how many of these were reused."""

    number: int  # of such steps since 1970
    prompt_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds to the first token of recent requests; None without any."""

    count: int
    p50_s: float | None
    p95_s: float | None

    @classmethod
    def of(cls, seconds: list[float]) -> FirstTokenTimes:
        """Return the figures of these times."""
        if not seconds:
            return cls(0, None, None)
        seconds.sort()
        last = len(seconds) - 1
        return cls(len(seconds), seconds[round(last * 0.5)], seconds[round(last * 0.95)])


class ReuseHistory:
    """The last ten minutes, and the last 2,000 times to a first token. Thread safety: none.

    Times are seconds since 1970.
    """

    def __init__(self, now: float) -> None:
        self._began = int(now) // _BUCKET_S
        self._steps: deque[ReuseCounts] = deque(maxlen=_BUCKETS)
        self._times: deque[tuple[float, float, bool]] = deque(maxlen=_MOST_TIMES)

    def step(self, now: float) -> ReuseCounts:
        """Return the counts of the present five seconds."""
        number = int(now) // _BUCKET_S
        if not self._steps or self._steps[-1].number < number:  # the clock may be set back
            self._steps.append(ReuseCounts(number))
        return self._steps[-1]

    def first_token(self, now: float, seconds: float, *, warm: bool) -> None:
        """Note a time to the first token."""
        self._times.append((now, seconds, warm))

    def points(self, now: float) -> list[tuple[int, int, int]]:
        """Return ``(seconds since 1970, prompt tokens, reused tokens)`` of each five seconds.

        In order, since ten minutes ago or the start; the last five seconds are not over yet.
        """
        newest = self._steps[-1].number if self._steps else self._began
        newest = max(int(now) // _BUCKET_S, newest)
        first = max(self._began, newest - _BUCKETS + 1)
        noted = {step.number: step for step in self._steps}
        steps = (noted.get(number) or ReuseCounts(number) for number in range(first, newest + 1))
        return [(step.number * _BUCKET_S, step.prompt_tokens, step.reused_tokens) for step in steps]

    def times(self, now: float) -> tuple[FirstTokenTimes, FirstTokenTimes]:
        """Return the times to the first token in the last five minutes: cold, then warm."""
        late = [(seconds, warm) for at, seconds, warm in self._times if at >= now - _WINDOW_S]
        cold, warm = ([s for s, is_warm in late if is_warm == kind] for kind in (False, True))
        return FirstTokenTimes.of(cold), FirstTokenTimes.of(warm)
