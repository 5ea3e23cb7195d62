"""`Ages`: seconds for what a policy counts in events."""

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
    """Knows when a policy's count of events was what, to a second, from a bounded list of samples.

    A policy numbers its events (`EvictionPolicy`), which costs an addition each; a clock would cost
    as much as all else that is done for one. So whoever opens a request tells, and at most once a
    second that is noted: an event is as old as the last note before it. When the list is full,
    every second note of its older half goes: what is old is known less exactly.

    Thread safety: none; under the cache's lock. Cost of telling: a look at the clock.
    """

    __slots__ = ("_moments", "_times", "clock", "due")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.due = float("-inf")
        """When it is time to `note` again."""
        self._moments: list[int] = []
        self._times: list[float] = []

    def note(self, moment: int) -> None:
        """The policy has counted so many events; all further ones come now or later."""
        now = self.clock()
        self._moments.append(moment)
        self._times.append(now)
        self.due = now + _EVERY_S
        if len(self._moments) > _MOST:
            older = slice(1, _MOST // 2, 2)
            del self._moments[older], self._times[older]

    def notes(self) -> Notes:
        """What was noted so far, to be asked without the lock."""
        return Notes(np.array(self._moments, np.int64), np.array(self._times), self.clock())


class Notes(NamedTuple):
    """What `Ages` had noted at the time ``now``."""

    moments: npt.NDArray[np.int64]
    times: npt.NDArray[np.float64]
    now: float

    def seconds(self, moments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """How long ago events were, by their numbers."""
        if not len(self.moments):
            return np.zeros(len(moments))
        last = np.searchsorted(self.moments, moments) - 1  # the last note before each
        ages = self.now - self.times[np.maximum(last, 0)]
        return np.maximum(ages, 0.0)
