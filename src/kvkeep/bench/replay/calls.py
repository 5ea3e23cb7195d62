"""Arrivals of requests: at the times of a trace, or after the answers that users wait for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.replay.workload import Workload

__all__ = ["Calls", "calls_of"]

_FASTEST = 1e6


def calls_of(workload: Workload, users: int | None, speed: float) -> Calls:
    """Return arrivals at the trace's times, ``speed`` times as fast, or of ``users`` in turn.

    Raises `InvalidValue` for invalid ``users`` or ``speed``.
    """
    if not 1 / _FASTEST <= speed <= _FASTEST:
        raise InvalidValue(
            f"speed is {speed!r}; a factor in {1 / _FASTEST:g} … {_FASTEST:g} is needed"
        )
    if users is None:
        return Open(workload, speed)
    return Answered(workload, whole("users", users, 1), speed)


class Open:
    """Arrivals at the times of the trace (an open loop)."""

    def __init__(self, workload: Workload, speed: float) -> None:
        begin = float(workload.times[0])
        self._times = ((workload.times - begin) / speed + begin).tolist()

    def first(self) -> Iterator[tuple[float, int]]:
        """Yield arrivals that depend on no answer, as (seconds, request)."""
        return ((when, number) for number, when in enumerate(self._times))

    def after(self, number: int, now: float) -> None:
        """Return None: no arrival depends on the end of request ``number``."""


class Answered:
    """Arrivals after answers (a closed loop): each user goes through one session at a time."""

    def __init__(self, workload: Workload, users: int, speed: float) -> None:
        self._times = workload.times.tolist()
        self._speed = speed
        self._users = users
        self._next: dict[int, int] = {}  # the next request of a session, by request
        self._sessions: deque[int] = deque()  # first requests of sessions not begun
        latest: dict[int, int] = {}
        for number, session in enumerate(workload.session.tolist()):
            if session >= 0 and session in latest:
                self._next[latest[session]] = number
            else:
                self._sessions.append(number)
            latest[session] = number

    def first(self) -> Iterator[tuple[float, int]]:
        """Yield arrivals that depend on no answer, as (seconds, request)."""
        begin = self._times[0]
        for _ in range(min(self._users, len(self._sessions))):
            yield begin, self._sessions.popleft()

    def after(self, number: int, now: float) -> tuple[float, int] | None:
        """Return the arrival that follows the end of request ``number`` at ``now``, or None."""
        following = self._next.get(number)
        if following is not None:
            pause = (self._times[following] - self._times[number]) / self._speed
            return now + pause, following
        return (now, self._sessions.popleft()) if self._sessions else None


Calls = Open | Answered
"""Arrivals of either kind."""
