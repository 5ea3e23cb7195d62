"""`Pauses`: how long sessions pause, and how many never return, by how their answers ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvkeep.bench.traces.request import TraceRequest

__all__ = ["Pauses", "StopSummary"]


@dataclass(frozen=True, slots=True)
class StopSummary:
    """Figures of the requests whose answers ended in one way.

    ``requests`` is their number. A pause is the time from the end of the answer (or from the
    arrival of the request, if the trace lacks its duration) to the next request of the session, at
    least 0; ``pause_p50_s`` and ``pause_p90_s`` are quantiles of the pauses that ended, None if
    none did. ``never`` is the share of those in a session that have no next request, None without
    sessions. A trace that ends early counts its open sessions in ``never``.
    """

    requests: int
    pause_p50_s: float | None = None
    pause_p90_s: float | None = None
    never: float | None = None


class Pauses:
    """Collects pauses. Memory: 8 bytes per request, and about 200 per session."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._in_sessions: dict[str, int] = {}
        self._pauses: dict[str, array[float]] = {}
        self._latest: dict[tuple[str, str], tuple[float, str]] = {}

    def add(self, request: TraceRequest) -> None:
        """Add the next request, in the order of times."""
        stop = request.stop
        self._requests[stop] = self._requests.get(stop, 0) + 1
        if request.session is None:
            return
        self._in_sessions[stop] = self._in_sessions.get(stop, 0) + 1
        session = request.namespace, request.session
        if session in self._latest:
            ended, before = self._latest[session]
            self._pauses.setdefault(before, array("d")).append(max(0.0, request.time - ended))
        self._latest[session] = request.time + (request.duration_s or 0.0), stop

    def summaries(self) -> dict[str, StopSummary]:
        """Return a summary for each way to end ("": unknown), the most frequent first."""
        names = sorted(self._requests, key=lambda stop: -self._requests[stop])
        return {stop: self._summary(stop) for stop in names}

    def _summary(self, stop: str) -> StopSummary:
        requests, asked = self._requests[stop], self._in_sessions.get(stop, 0)
        pauses = self._pauses.get(stop, ())
        if not asked:
            return StopSummary(requests)
        never = 1 - len(pauses) / asked
        if not pauses:
            return StopSummary(requests, never=never)
        p50, p90 = np.quantile(np.array(pauses), (0.5, 0.9)).tolist()
        return StopSummary(requests, p50, p90, never)
