"""Arrivals of requests: at the times of a trace, or after the answers that they wait for."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from kvkeep.bench.replay.jobs import Jobs
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.workload import Workload

__all__ = ["Calls", "calls_of"]

_FASTEST = 1e6


def calls_of(
    workload: Workload, users: int | None, speed: float, *, closed_loop: bool = False
) -> Calls:
    """Return arrivals at the trace's times, ``speed`` times as fast, or after answers.

    With ``closed_loop`` each session begins at its time in the trace, and with ``users`` when a
    user has ended another one. Raises `InvalidValue` for invalid ``users`` or ``speed``, for both,
    and for a closed loop without sessions.
    """
    if not 1 / _FASTEST <= speed <= _FASTEST:
        raise InvalidValue(
            f"speed is {speed!r}; a factor in {1 / _FASTEST:g} … {_FASTEST:g} is needed"
        )
    if closed_loop:
        if users is not None:
            raise InvalidValue("sessions begin at their times or when users are free, not both")
        if not (workload.session >= 0).any():
            raise InvalidValue(f"a closed loop needs sessions; {workload.name} has none")
        return ClosedLoop(workload, speed)
    if users is not None:
        return Users(workload, whole("users", users, 1), speed)
    return Open(workload, speed)


class Open:
    """Arrivals at the times of the trace (an open loop)."""

    def __init__(self, workload: Workload, speed: float) -> None:
        begin = float(workload.times[0])
        self._times = ((workload.times - begin) / speed + begin).tolist()

    def first(self) -> Iterator[tuple[float, int]]:
        """Yield arrivals that depend on no answer, as (seconds, request)."""
        return ((when, number) for number, when in enumerate(self._times))

    def after(self, number: int, now: float) -> Sequence[tuple[float, int]]:
        """Return no arrival: none depends on the end of request ``number``."""
        return ()


class _Answered:
    """Arrivals after the ends of requests: with their pauses, once nothing is waited for."""

    def __init__(self, workload: Workload, speed: float) -> None:
        self._jobs = Jobs(workload)
        self._waits = list(self._jobs.waits)
        self._ready = [0.0] * len(workload)
        self._speed = speed

    def after(self, number: int, now: float) -> Sequence[tuple[float, int]]:
        """Return the arrivals that depended on the end of request ``number`` at ``now``."""
        arrivals = []
        for other in self._jobs.followers.get(number, ()):
            self._waits[other] -= 1
            self._ready[other] = max(self._ready[other], now)
            if not self._waits[other]:
                pause = self._jobs.pauses[other] / self._speed
                arrivals.append((self._ready[other] + pause, other))
        return arrivals


class ClosedLoop(_Answered):
    """Sessions that begin at their times in the trace (a closed loop)."""

    def __init__(self, workload: Workload, speed: float) -> None:
        super().__init__(workload, speed)
        begin, times = float(workload.times[0]), workload.times.tolist()
        self._first = [((times[one] - begin) / speed + begin, one) for one in self._jobs.first]

    def first(self) -> Iterator[tuple[float, int]]:
        """Yield the arrivals that begin sessions."""
        return iter(self._first)


class Users(_Answered):
    """Sessions of users (a closed loop): each user goes through one session after the other."""

    def __init__(self, workload: Workload, users: int, speed: float) -> None:
        super().__init__(workload, speed)
        self._begin = float(workload.times[0])
        self._users = users
        self._waiting = deque(self._jobs.first)
        self._left = Counter(self._jobs.of.tolist())  # requests of each job that did not end

    def first(self) -> Iterator[tuple[float, int]]:
        """Yield the first arrival of each user."""
        for _ in range(min(self._users, len(self._waiting))):
            yield self._begin, self._waiting.popleft()

    def after(self, number: int, now: float) -> Sequence[tuple[float, int]]:
        """Return the arrivals that depended on the end of request ``number`` at ``now``."""
        job = int(self._jobs.of[number])
        self._left[job] -= 1
        if self._left[job] or not self._waiting:
            return super().after(number, now)
        return ((now, self._waiting.popleft()),)


Calls = Open | ClosedLoop | Users
"""Arrivals of any kind."""
