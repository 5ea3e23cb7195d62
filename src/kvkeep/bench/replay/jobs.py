"""Arrivals: at the times of a trace, or of users who wait for their answers, job by job.

A job is a session with all sub-agents that it calls, or a request without a session.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.errors import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvkeep.bench.replay.workload import Workload

    Floats = npt.NDArray[np.float64]
    Wholes = npt.NDArray[np.int64]
    from kvkeep.core.cost import PrefillCost

__all__ = ["Calls", "Jobs", "RequestTimes", "calls_of"]


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

    def seconds(self, came: Floats, last: Floats) -> Floats:
        """Return the seconds of each job from its first arrival to its last end.

        Given the arrivals and ends of all requests. Jobs of which no request arrived are left out.
        """
        begin, end = np.full((2, len(self.first)), np.nan)
        np.fmin.at(begin, self.of, came)
        np.fmax.at(end, self.of, last)
        spans: Floats = end - begin
        arrived: Floats = spans[~np.isnan(spans)]
        return arrived


class Open:
    """Arrivals at the times of the trace (an open loop)."""

    def __init__(self, workload: Workload) -> None:
        self._times = workload.times.tolist()

    def first(self) -> Iterator[tuple[float, int]]:
        """Yield arrivals that depend on no answer, as (seconds, request)."""
        return ((when, number) for number, when in enumerate(self._times))

    def after(self, number: int, now: float) -> Sequence[tuple[float, int]]:
        """Return no arrival: none depends on the end of request ``number``."""
        return ()


class Users:
    """Sessions of users (a closed loop): each user goes through one session after the other."""

    def __init__(self, workload: Workload, users: int) -> None:
        self._jobs = Jobs(workload)
        self._waits = list(self._jobs.waits)
        self._ready = [0.0] * len(workload)
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
        if not self._left[job]:
            return ((now, self._waiting.popleft()),) if self._waiting else ()
        arrivals = []
        for other in self._jobs.followers.get(number, ()):
            self._waits[other] -= 1
            self._ready[other] = max(self._ready[other], now)
            if not self._waits[other]:
                arrivals.append((self._ready[other] + self._jobs.pauses[other], other))
        return arrivals


Calls = Open | Users
"""Arrivals of any kind."""


def calls_of(workload: Workload, users: int | None) -> Calls:
    """Return arrivals at the trace's times, or after the answers that ``users`` wait for."""
    return Open(workload) if users is None else Users(workload, whole("users", users, 1))


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


class RequestTimes:
    """Times of each request, in seconds of the replay's clock; NaN until they happen.

    Memory: 60 bytes per request.
    """

    def __init__(self, requests: int) -> None:
        self.came, self.began, self.first, self.last = np.full((4, requests), np.nan)
        """Arrival, admission, first token and last token."""
        self.prefill, self.saved, self.loaded = np.zeros((3, requests))
        """Seconds to compute the prompt, seconds saved by hits, seconds to read from tiers."""
        self.loaded_tokens = 0
        """Tokens read from tiers that take time …"""
        self.computed_stored_tokens = 0
        """… and those that were computed though such a tier has them."""

    def begin(self, number: int, now: float, cost: PrefillCost, cached: int, tokens: int) -> float:
        """Record that computing a prompt of ``tokens`` begins; return the seconds it takes."""
        # The last token is always computed: the answer follows from it.
        seconds = cost.prefill_s(min(cached, tokens - 1), tokens)
        self.computing(number, now, seconds, cost.prefill_s(0, tokens) - seconds)
        return seconds

    def computing(self, number: int, now: float, seconds: float, saved: float) -> None:
        """Record when a prompt is admitted, its seconds of computing, and those saved by hits."""
        self.began[number] = now
        self.prefill[number] = seconds
        self.saved[number] = saved

    def latency(self, workload: Workload) -> dict[str, Any]:
        """Return `Outcome.latency`; see `simulate_loop`."""
        served = ~np.isnan(self.first)
        came, first = self.came[served], self.first[served]
        span = float(np.nanmax(self.last) - np.nanmin(self.came))
        prefill = float(self.prefill.sum())
        jobs: dict[str, Any] = {}
        if (workload.session >= 0).any():
            seconds = Jobs(workload).seconds(self.came, self.last)
            jobs = {"jobs": len(seconds), "job_s": _summary(seconds)}
        return {
            "ttft_s": _summary(first - came),
            "queue_s": _summary(self.began[served] - came),
            "total_s": _summary(self.last[served] - came),
            "prefill_s": prefill,
            "saved_s": float(self.saved.sum()),
            "loaded_s": float(self.loaded.sum()),
            "loaded_tokens": self.loaded_tokens,
            "computed_stored_tokens": self.computed_stored_tokens,
            "span_s": span,
            "utilisation": prefill / span if span else 0.0,
            **jobs,
        }


def _summary(seconds: Floats) -> dict[str, float]:
    """Return mean and quantiles; empty for no values."""
    if not len(seconds):
        return {}
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p99": p99}
