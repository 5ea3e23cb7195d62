"""`Pace`: arrival, loading, computing and end of requests, where tiers take time to read."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.bench.replay.latency import RequestTimes
from kvkeep.core.cost import best_prefix
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.calls import Calls
    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost, TransferCost

__all__ = ["LOADINGS", "Pace", "check_loading"]

LOADINGS = ("prefix", "all")
"""What is loaded of stored tokens: the prefix that pays, or all of them."""


class _Found(NamedTuple):
    """A prompt of ``tokens`` tokens, stored up to ``stop``: ``units`` of each level, in order."""

    units: Sequence[int]
    held: int  # tokens of the levels that take no time, at the front
    stop: int
    tokens: int


class _Plan(NamedTuple):
    """``units`` to load of each level, tokens that are computed before them, and the times."""

    units: Sequence[int]
    front: int
    begin: float
    computing: float
    end: float


class Pace:
    """Requests one after the other: tiers are read for some while others are computed.

        arrive ──▶ read from tiers ───────────────▶ ┐
                   one at a time each               ├ ──▶ rest of prefill ──▶ decode ──▶ end
                   wait for the one before ──▶ prefill    beside the next one
                                     one at a time ┘

    ``reads`` are the costs to read each level, fastest first; None: it takes no time. ``loading``
    is one of `LOADINGS`. Blocks of slower levels are taken to be behind those of faster ones.
    Iterate over the requests, in the order in which they are computed, and call `served` for each.
    """

    def __init__(
        self,
        workload: Workload,
        calls: Calls,
        cost: PrefillCost,
        reads: Sequence[TransferCost | None],
        loading: str = "prefix",
    ) -> None:
        if any(reads) and not cost.kv_bytes_per_token:
            raise InvalidValue(
                "the time to read a tier depends on the bytes of a token, which the cost lacks: "
                "set its kv_bytes_per_token"
            )
        check_loading(loading)
        self.now = float(workload.times[0])
        """The time at which the current request is looked up: those before it are computed."""
        self._work = workload
        self._calls = calls
        self._cost = cost
        self._unit = workload.unit_tokens
        self._unit_bytes = workload.unit_tokens * cost.kv_bytes_per_token
        self._reads = list(reads)
        self._loading = loading
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

    def served(self, number: int, found: Sequence[int], hit_tokens: int, outcome: Outcome) -> None:
        """Record the leading units found in each level, and the ``hit_tokens`` they make."""
        times, cost = self._times, self._cost
        came, tokens = float(times.came[number]), int(self._work.tokens[number])
        # The last token is always computed: the answer follows from it.
        stop = min(hit_tokens, tokens - 1)
        held = sum(units for units, read in zip(found, self._reads, strict=True) if read is None)
        prompt = _Found(found, min(held * self._unit, stop), stop, tokens)
        plan = self._plan(prompt, came)
        for level, units in enumerate(plan.units):
            if units:
                begin = max(came, self._free[level])
                self._free[level] = self._read(level, units, came)
                times.loaded[number] += self._free[level] - begin
        times.loaded_tokens += stop - prompt.held - plan.front
        times.computed_stored_tokens += plan.front
        times.computing(
            number, plan.begin, plan.computing, cost.prefill_s(0, tokens) - plan.computing
        )
        self.now = plan.end
        times.first[number] = self.now
        times.last[number] = self.now + cost.decode_s(int(self._work.output_tokens[number]))
        times.seen(plan.begin, outcome.blocks, outcome.hit_blocks)

    def _plan(self, prompt: _Found, came: float) -> _Plan:
        """Return what to load of a prompt that came then, if the engine is free ``now``."""
        slow = [
            0 if read is None else units
            for units, read in zip(prompt.units, self._reads, strict=True)
        ]
        alone = self._compute(prompt.held, prompt.tokens)
        if not any(slow):
            return _Plan(slow, 0, self.now, alone, self.now + alone)
        if self._loading == "all":
            return self._behind(prompt, slow, came)
        runs, ready, end = [], self.now, prompt.held
        for level, units in enumerate(slow):
            if units:
                end = min(end + units * self._unit, prompt.stop)
                later = max(ready, self._read(level, units, came))
                runs.append((end, later - ready))
                ready = later
        prefix = best_prefix(prompt.held, prompt.tokens, runs, self._compute)
        left = -(-(prefix.tokens - prompt.held) // self._unit)
        return self._behind(prompt, _leading(slow, left), came)

    def _behind(self, prompt: _Found, units: Sequence[int], came: float) -> _Plan:
        """Return the plan that loads leading ``units`` and computes what is behind them."""
        begin = max(self.now, self._ready(units, came))
        at = min(prompt.held + sum(units) * self._unit, prompt.stop)
        seconds = self._compute(at, prompt.tokens)
        return _Plan(units, prompt.stop - at, begin, seconds, begin + seconds)

    def _compute(self, start: int, stop: int) -> float:
        return self._cost.prefill_s(start, stop)

    def _ready(self, units: Sequence[int], came: float) -> float:
        """Return when ``units`` of the levels are read."""
        return max([came, *(self._read(at, one, came) for at, one in enumerate(units) if one)])

    def _read(self, level: int, units: int, came: float) -> float:
        """Return when ``units`` of a level are read, after all that it reads already."""
        cost = self._reads[level]
        seconds = 0.0 if cost is None else cost.seconds(units * self._unit_bytes)
        return max(came, self._free[level]) + seconds

    def finish(self, outcome: Outcome) -> None:
        """Set the latency and the timeline of ``outcome``."""
        outcome.latency = self._times.latency(self._work)
        outcome.timeline = self._times.timeline()


def check_loading(loading: str) -> None:
    """Raise `InvalidValue` unless ``loading`` is one of `LOADINGS`."""
    if loading not in LOADINGS:
        raise InvalidValue(f"loading is one of {', '.join(LOADINGS)}; got {told(loading)}")


def _leading(units: Sequence[int], most: int) -> list[int]:
    """Return the first ``most`` of units, which follow each other by level."""
    found = []
    for one in units:
        found.append(min(one, most))
        most -= found[-1]
    return found
