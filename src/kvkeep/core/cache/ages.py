"""`Ages`: converts a policy's count of events into seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["Ages", "Notes"]

_EVERY_S = 1.0
_MOST = 4096


class Ages:
    """Bounded samples of (event count, time) of a policy, at most one a second.

    A policy numbers its events (`EvictionPolicy`), at the cost of an addition each; reading a clock
    for each would double that work. Opening a request notes count and time instead: an event is
    as old as the last sample before it. When the list is full, every second sample of the older
    half is dropped, so old events are known less exactly.

    Thread safety: none; under the cache's lock. Cost of a note: reading the clock.
    """

    __slots__ = ("_moments", "_times", "clock", "due")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.due = float("-inf")
        """The time of the next `note`."""
        self._moments: list[int] = []
        self._times: list[float] = []

    def note(self, moment: int) -> None:
        """Record that the policy has counted ``moment`` events until now."""
        now = self.clock()
        self._moments.append(moment)
        self._times.append(now)
        self.due = now + _EVERY_S
        if len(self._moments) > _MOST:
            older = slice(1, _MOST // 2, 2)
            del self._moments[older], self._times[older]

    def notes(self) -> Notes:
        """Return a copy of the samples, to be read without the lock."""
        return Notes(np.array(self._moments, np.int64), np.array(self._times), self.clock())


class Notes(NamedTuple):
    """The samples of `Ages` at the time ``now``."""

    moments: npt.NDArray[np.int64]
    times: npt.NDArray[np.float64]
    now: float

    def seconds(self, moments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the ages of events, given by their numbers."""
        if not len(self.moments):
            return np.zeros(len(moments))
        last = np.searchsorted(self.moments, moments) - 1  # the last sample before each
        ages = self.now - self.times[np.maximum(last, 0)]
        return np.maximum(ages, 0.0)
