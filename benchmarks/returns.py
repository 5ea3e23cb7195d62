"""What it costs to follow conversations, beside LRU, with 10,000 of them.

    python benchmarks/returns.py [--quick] [--json]

Each conversation has 2,048 tokens and is continued in random order. Once everything fits, so each
prompt is a full hit but for its new page; once the pool has room for half of them. LRU and the
policies are measured by turns in one run. Times are the thread's CPU time of `open`, and of
`publish` and `close`, a request.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from statistics import median
from time import thread_time

import numpy as np

from figures import Figure, no_collection, show
from kvkeep import PagedCache
from kvkeep.core.returns import Ended

PAGE, PAGES = 16, 128
STEPS = ("open", "close")
POLICIES = ("lru", "returns")
ENDS = (Ended("tool_use", 100), Ended("end_turn", 400))


class Talks:
    """A cache with conversations that are continued."""

    def __init__(self, policy: str, talks: int, room: float) -> None:
        self.now = 0.0
        self.talks = talks
        self.cache = PagedCache(
            int(talks * (PAGES + 8) * room), PAGE, eviction=policy, clock=lambda: self.now
        )
        for talk in range(talks):
            self.request(talk, 0)

    def request(self, talk: int, turn: int) -> tuple[float, float]:
        """Serve a request; return the seconds to open it, and to publish and close it."""
        prompt = np.full(PAGE * (PAGES + turn), talk, np.int32)
        self.now += 0.01
        begun = thread_time()
        sequence = self.cache.open(prompt)
        opened = thread_time()
        sequence.copies()
        computed = thread_time()
        sequence.publish()
        sequence.close(ended=ENDS[talk % 2])
        return opened - begun, thread_time() - computed


def measure(talks: int, rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Return microseconds a request of each round, by policy, room and step."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for name, room in (("all fit", 1.0), ("half fit", 0.5)):
        caches = {policy: Talks(policy, talks, room) for policy in POLICIES}
        chance = random.Random(0)
        for turn in range(rounds):
            order = [chance.randrange(talks) for _ in range(1000)]
            for policy, cache in caches.items():
                with no_collection():
                    spent = np.array([cache.request(talk, 1 + turn % 4) for talk in order])
                for step, seconds in zip(STEPS, spent.mean(axis=0), strict=True):
                    times.setdefault((policy, name, step), []).append(1e6 * float(seconds))
    return times


def figures(times: dict[tuple[str, str, str], list[float]]) -> list[Figure]:
    """Return the costs, and what a request costs more than with LRU."""
    lines = []
    for (policy, room, step), spent in times.items():
        figure = Figure(f"{step}, {policy}", "µs", median(spent), part=room)
        if policy != "lru":
            ratios = [
                one / other for one, other in zip(spent, times["lru", room, step], strict=True)
            ]
            figure = replace(
                figure, beside="lru", ratio=median(ratios), low=min(ratios), high=max(ratios)
            )
        lines.append(figure)
    for room in dict.fromkeys(room for _, room, _ in times):
        more = [
            sum(times["returns", room, step][at] - times["lru", room, step][at] for step in STEPS)
            for at in range(len(times["lru", room, "open"]))
        ]
        lines.append(
            Figure(
                "a request more than with lru, returns", "µs", median(more), goal=20.0,
                better="less", part=room,
            )
        )  # fmt: skip
    return sorted(lines, key=lambda line: line.part)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,000 conversations, 2 rounds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    talks, rounds = (1000, 2) if given.quick else (10_000, 12)
    title = f"{talks:,} conversations of {PAGE * PAGES:,} tokens, pages of {PAGE}"
    return show(figures(measure(talks, rounds)), title, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
