"""`Pace`: arrival, loading, computing and end of requests, where tiers take time to read."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvkeep.bench.replay.latency import RequestTimes
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.calls import Calls
    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost

__all__ = ["Pace"]


class Pace:
    """Requests one after the other: tiers are read for some while others are computed.

        arrive ──▶ read from tiers ──▶ wait for the one before ──▶ prefill ──▶ decode ──▶ end
                   one at a time each           one at a time          beside the next one

    ``speeds`` are bytes per second of each level, fastest first; None: reads take no time. Iterate
    over the requests, in the order in which they are computed, and call `served` for each.
    """

    def __init__(
        self, workload: Workload, calls: Calls, cost: PrefillCost, speeds: Sequence[float | None]
    ) -> None:
        if any(speeds) and not cost.kv_bytes_per_token:
            raise InvalidValue(
                "the time to read a tier depends on the bytes of a token, which the cost lacks: "
                "set its kv_bytes_per_token"
            )
        self.now = float(workload.times[0])
        """The time at which the current request is looked up: those before it are computed."""
        self._work = workload
        self._calls = calls
        self._cost = cost
        unit_bytes = workload.unit_tokens * cost.kv_bytes_per_token
        self._seconds = [0.0 if speed is None else unit_bytes / speed for speed in speeds]
        self._free = [self.now for _ in speeds]  # when each level has finished its reads
        self._times = RequestTimes(len(workload))

    def __iter__(self) -> Iterator[int]:
        events = [(when, number) for when, number in self._calls.first()]
        heapq.heapify(events)
        while events:
            came, number = heapq.heappop(events)
            self._times.came[number] = came
            self.now = max(self.now, came)
            yield number
            # A request that this answer causes arrives after all that have arrived so far.
            for following in self._calls.after(number, float(self._times.last[number])):
                heapq.heappush(events, following)

    def served(self, number: int, found: Sequence[int], hit_tokens: int, outcome: Outcome) -> None:
        """Record the leading units found in each level, and the ``hit_tokens`` they make."""
        times, cost = self._times, self._cost
        came = float(times.came[number])
        ready = came
        for level, units in enumerate(found):
            if units and self._seconds[level]:
                begin = max(came, self._free[level])
                self._free[level] = begin + units * self._seconds[level]
                times.loaded[number] += self._free[level] - begin
                ready = max(ready, self._free[level])
        tokens = int(self._work.tokens[number])
        begin = max(self.now, ready)
        self.now = begin + times.begin(number, begin, cost, hit_tokens, tokens)
        times.first[number] = self.now
        times.last[number] = self.now + cost.decode_s(int(self._work.output_tokens[number]))
        times.seen(begin, outcome.blocks, outcome.hit_blocks)

    def finish(self, outcome: Outcome) -> None:
        """Set the latency and the timeline of ``outcome``."""
        outcome.latency = self._times.latency(self._work)
        outcome.timeline = self._times.timeline()
