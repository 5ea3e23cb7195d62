"""How far `returns` is from what could be known: warmed, and told each conversation's next request.

    python benchmarks/foresight.py TRACE [--capacity 1000000] [--draws 2] [--hours 4]

The trace is replayed as it is; then with its sessions begun at other times, drawn over ``--hours``;
then half of the sessions, drawn over half of that time, so that as many run at once. Each figure is
the share of the way from LRU to Belady, in percent of blocks reused:

    returns   learns from nothing, as it ships
    warmed    begins with what it has learned from the same requests in a first replay
    told      knows when each conversation sends its next request, and evicts the latest one first;
              of a conversation that is about to return, it keeps all
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.replay.bounds import belady
from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.traces import open_trace
from kvkeep.core.eviction import ReturnAware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.bench.traces import Trace, TraceRequest
    from kvkeep.core.eviction import Entry
    from kvkeep.core.returns import Returns, Wait


class Drawn:
    """Sessions of a trace, begun at times drawn over ``hours``."""

    def __init__(self, trace: Trace, *, sessions: float, hours: float, seed: int) -> None:
        self.name, self.unit_tokens, self.length = f"{trace.name} {seed}", trace.unit_tokens, None
        chance = random.Random(seed)
        found: dict[str | None, list[TraceRequest]] = defaultdict(list)
        for request in trace:
            found[request.session].append(request)
        names = sorted(found, key=str)
        self._requests: list[TraceRequest] = []
        for name in chance.sample(names, round(sessions * len(names))):
            shift = chance.uniform(0, 3600 * hours) - found[name][0].time
            self._requests += (replace(one, time=one.time + shift) for one in found[name])
        self._requests.sort(key=lambda one: one.time)

    def __iter__(self) -> Iterator[TraceRequest]:
        first = self._requests[0].time
        return (replace(one, time=one.time - first) for one in self._requests)


class Warmed(ReturnAware):
    """Begins with the counts of another learner."""

    def __init__(self, before: Returns) -> None:
        super().__init__()
        self.before = before

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        super().attend(returns, clock)
        returns.times, returns._kinds = self.before.times, self.before._kinds
        returns._labels = self.before._labels
        returns.learn(0.0)


class Told(ReturnAware):
    """Evicts the run whose conversation returns last. It looks at all runs for each victim."""

    def __init__(self, returns_at: dict[tuple[float, int], float]) -> None:
        super().__init__()
        self.returns_at = returns_at
        self.entries: dict[Entry, None] = {}

    def _soon(self, wait: Wait) -> float:
        after = self.returns_at.get((wait.since, wait.prompt), float("inf"))
        left = after - self.clock()
        return -1.0 if wait.over or left <= 0 else 1 / left

    def add(self, entry: Entry) -> None:
        entry.wait = entry.wait or self.unknown()
        self.entries[entry] = None

    def discard(self, entry: Entry) -> None:
        del self.entries[entry]

    def pop(self) -> Entry | None:
        if not self.entries:
            return None
        soon = {wait: self._soon(wait) for one in self.entries if (wait := one.wait)}
        found = min(self.entries, key=lambda one: soon[one.wait] if one.wait else -1.0)
        del self.entries[found]
        return found

    def put_back(self, entry: Entry) -> None:
        self.add(entry)

    def __len__(self) -> int:
        return len(self.entries)


def next_requests(workload: Workload) -> dict[tuple[float, int], float]:
    """Return when the conversation of each request goes on, by its time and its tokens.

    The latter are those of the cache, in a replay by units.
    """
    paging = Paging(workload.unit_tokens)
    holders: dict[int, list[int]] = defaultdict(list)
    for number in range(len(workload)):
        for unit in workload.prompt(number).tolist():
            holders[unit].append(number)
    found = {}
    for number in range(len(workload)):
        prompt = workload.prompt(number)
        if len(prompt):  # the last unit may differ in the next prompt
            having = holders[int(prompt[max(0, len(prompt) - 2)])]
            after = bisect_right(having, number)
            if after < len(having):
                tokens = len(paging.prompt(prompt, int(workload.tokens[number])))
                at = float(workload.times[number]), tokens
                found[at] = float(workload.times[having[after]])
    return found


def shares(workload: Workload, capacity: int) -> list[float]:
    """Return the hit rate of LRU, then the shares of the way to Belady, all in percent."""
    least = simulate(workload, capacity, "lru").hit_rate
    most = belady(workload, capacity).hit_rate
    cold, first = ReturnAware(), ReturnAware()
    simulate(workload, capacity, first)
    policies = (cold, Warmed(first.returns), Told(next_requests(workload)))
    rates = [simulate(workload, capacity, policy).hit_rate for policy in policies]
    return [100 * least, *(100 * (rate - least) / (most - least) for rate in rates)]


def main() -> None:
    """Print a row a trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--capacity", type=int, default=1_000_000, metavar="TOKENS")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--hours", type=float, default=4.0)
    args = parser.parse_args()
    trace = open_trace(args.trace)
    print(f"{'':34}{'lru':>8}{'returns':>9}{'warmed':>9}{'told':>9}")
    traces: list[tuple[str, Trace]] = [("as recorded", trace)]
    for seed in range(1, 1 + args.draws):
        other = Drawn(trace, sessions=1, hours=args.hours, seed=seed)
        half = Drawn(trace, sessions=0.5, hours=args.hours / 2, seed=100 + seed)
        traces += [(f"other beginnings, draw {seed}", other), (f"half of it, draw {seed}", half)]
    for name, one in traces:
        found = shares(Workload.read(one), args.capacity)
        print(f"{name:34}" + "".join(f"{value:8.1f}%" for value in found), flush=True)


if __name__ == "__main__":
    main()
