"""`Jobs`: the order in which the requests of a workload wait for each other.

A job is a session with all sub-agents that it calls, or a request without a session.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.bench.replay.workload import Workload

    Floats = npt.NDArray[np.float64]
    Wholes = npt.NDArray[np.int64]

__all__ = ["Jobs"]


class Jobs:
    """The order of a workload's requests within each job.

    A request waits for the request before it in its session. The first request of a sub-agent waits
    for the latest request of its caller; a request of the caller also waits for the sub-agents that
    had ended when it arrived, and that no earlier one waited for. The pause of a request is the
    time from the last end of these to its arrival when the trace was recorded, at least 0; a
    request whose duration the trace lacks ends when it arrives.

    Attributes:
        of: the job of each request, numbered in the order of their first requests.
        first: the first request of each job.
        waits: the number of requests that each request waits for.
        followers: the requests that wait for each request.
        pauses: seconds from the last end of these requests to the arrival.

    Memory: about 300 bytes per request.
    """

    def __init__(self, workload: Workload) -> None:
        sessions = _sessions(workload)
        callers = _callers(workload, sessions)
        self.of, self.first = _numbered(workload, sessions, callers)
        self.waits = [0] * len(workload)
        self.followers: dict[int, list[int]] = {}
        self._times = workload.times.tolist()
        took = np.nan_to_num(workload.took_s)
        self._ends = (workload.times + took).tolist()
        self._ready = [-np.inf] * len(workload)
        for requests in sessions.values():
            for before, number in pairwise(requests):
                self._wait(number, before)
        for session, caller in callers.items():
            own, others = sessions[session], sessions[caller]
            self._wait(own[0], others[bisect_left(others, own[0]) - 1])
            ended = self._ends[own[-1]]
            joined = bisect_left(others, ended, key=self._times.__getitem__)
            joined = max(joined, bisect_left(others, own[-1]))
            if joined < len(others):
                self._wait(others[joined], own[-1])
        pairs = zip(self._times, self._ready, strict=True)
        self.pauses = [max(0.0, time - ready) if ready > -np.inf else 0.0 for time, ready in pairs]

    def _wait(self, number: int, other: int) -> None:
        self.waits[number] += 1
        self.followers.setdefault(other, []).append(number)
        self._ready[number] = max(self._ready[number], self._ends[other])

    def spans(self, came: Floats, last: Floats) -> tuple[Floats, Floats]:
        """Return seconds of each job, given the arrivals and ends of all requests.

        From its first arrival to its last end, and the part of it in which at least one of its
        requests had arrived and not ended. Jobs of which no request arrived are left out.
        """
        there = np.flatnonzero(~np.isnan(came))
        order = there[np.lexsort((came[there], self.of[there]))]
        whole: list[float] = []
        served: list[float] = []
        job, begun, until = -1, 0.0, 0.0
        rows = zip(self.of[order].tolist(), came[order].tolist(), last[order].tolist(), strict=True)
        for one, arrived, ended in rows:
            if one != job:
                job, begun, until = one, arrived, arrived
                whole.append(0.0)
                served.append(0.0)
            served[-1] += max(0.0, ended - max(arrived, until))
            until = max(until, ended)
            whole[-1] = until - begun
        return np.array(whole), np.array(served)


def _sessions(workload: Workload) -> dict[int, list[int]]:
    """Return the requests of each session, in the order of their times."""
    found: dict[int, list[int]] = {}
    for number, session in enumerate(workload.session.tolist()):
        if session >= 0:
            found.setdefault(session, []).append(number)
    return found


def _callers(workload: Workload, sessions: dict[int, list[int]]) -> dict[int, int]:
    """Return the caller of each session that has one, whose first request came earlier."""
    found = {}
    for session, requests in sessions.items():
        caller = int(workload.caller[requests[0]])
        if caller >= 0 and sessions[caller][0] < requests[0]:
            found[session] = caller
    return found


def _numbered(
    workload: Workload, sessions: dict[int, list[int]], callers: dict[int, int]
) -> tuple[Wholes, list[int]]:
    """Return the job of each request, and the first request of each job."""
    of = np.full(len(workload), -1, np.int64)
    first: list[int] = []
    # Sessions are numbered by their first requests: a caller comes before those that it calls.
    for number, session in enumerate(workload.session.tolist()):
        if of[number] >= 0:
            continue
        job = len(first)
        if session < 0:
            of[number] = job
        elif session in callers:
            job = int(of[sessions[callers[session]][0]])
            of[sessions[session]] = job
            continue
        else:
            of[sessions[session]] = job
        first.append(number)
    return of, first
