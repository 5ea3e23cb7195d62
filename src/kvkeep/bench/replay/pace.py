"""`Pace`: arrival, loading, computing and end of requests, where tiers take time to read."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvkeep.bench.replay.latency import RequestTimes
from kvkeep.core.cost import best_prefix
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.jobs import Calls
    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost, TransferCost

__all__ = ["Pace"]


class Pace:
    """Requests one after the other: tiers are read for some while others are computed.

        arrive ──▶ read from tiers ───────────────▶ ┐
                   one at a time each               ├ ──▶ rest of prefill ──▶ decode ──▶ end
                   wait for the one before ──▶ prefill    beside the next one
                                     one at a time ┘

    ``reads`` are the costs to read each level, fastest first; None: it takes no time. The prefix
    that pays is read before the rest is computed. Blocks of slower levels are taken to be behind
    those of faster ones. Iterate over the requests, in the order in which they are computed, and
    call `served` for each.
    """

    def __init__(
        self,
        workload: Workload,
        calls: Calls,
        cost: PrefillCost,
        reads: Sequence[TransferCost | None],
    ) -> None:
        if any(reads) and not cost.kv_bytes_per_token:
            raise InvalidValue(
                "the time to read a tier depends on the bytes of a token, which the cost lacks: "
                "set its kv_bytes_per_token"
            )
        self.now = float(workload.times[0])
        """The time at which the current request is looked up: those before it are computed."""
        self._work = workload
        self._calls = calls
        self._cost = cost
        self._unit = workload.unit_tokens
        self._unit_bytes = workload.unit_tokens * cost.kv_bytes_per_token
        self._reads = list(reads)
        self._free = [self.now for _ in reads]  # when each level has finished its reads
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

    def served(self, number: int, hits: Sequence[int], hit_tokens: int) -> None:
        """Record the leading units found in each level, and the ``hit_tokens`` they make."""
        times, cost = self._times, self._cost
        came, tokens = float(times.came[number]), int(self._work.tokens[number])
        # The last token is always computed: the answer follows from it.
        stop = min(hit_tokens, tokens - 1)
        fast = sum(units for units, read in zip(hits, self._reads, strict=True) if read is None)
        start = min(fast * self._unit, stop)
        units = self._paying(hits, start, stop, tokens, came)
        at = min(start + sum(units) * self._unit, stop)
        begin = max(self.now, self._ready(units, came))
        for level, count in enumerate(units):
            if count:
                idle = max(came, self._free[level])
                self._free[level] = self._read(level, count, came)
                times.loaded[number] += self._free[level] - idle
        times.loaded_tokens += at - start
        times.computed_stored_tokens += stop - at
        seconds = cost.prefill_s(at, tokens)
        times.computing(number, begin, seconds, cost.prefill_s(0, tokens) - seconds)
        self.now = begin + seconds
        times.first[number] = self.now
        times.last[number] = self.now + cost.decode_s(int(self._work.output_tokens[number]))

    def _paying(
        self, hits: Sequence[int], start: int, stop: int, tokens: int, came: float
    ) -> list[int]:
        """Return the units of each level that takes time whose loading pays, from the front."""
        slow = [0 if read is None else units for units, read in zip(hits, self._reads, strict=True)]
        runs, ready, end = [], self.now, start
        for level, units in enumerate(slow):
            if units:
                end = min(end + units * self._unit, stop)
                later = max(ready, self._read(level, units, came))
                runs.append((end, later - ready))
                ready = later
        if not runs:
            return slow
        prefix = best_prefix(start, tokens, runs, self._cost.prefill_s)
        most = -(-(prefix.tokens - start) // self._unit)
        leading = []
        for units in slow:
            leading.append(min(units, most))
            most -= leading[-1]
        return leading

    def _ready(self, units: Sequence[int], came: float) -> float:
        """Return when ``units`` of the levels are read."""
        return max(
            [came, *(self._read(at, count, came) for at, count in enumerate(units) if count)]
        )

    def _read(self, level: int, units: int, came: float) -> float:
        """Return when ``units`` of a level are read, after all that it reads already."""
        cost = self._reads[level]
        seconds = 0.0 if cost is None else cost.seconds(units * self._unit_bytes)
        return max(came, self._free[level]) + seconds

    def finish(self, outcome: Outcome) -> None:
        """Set the latency of ``outcome``."""
        outcome.latency = self._times.latency(self._work)
