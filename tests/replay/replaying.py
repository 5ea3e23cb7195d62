"""Small workloads, and what a cache must make of them, by lists alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay import Workload
from kvkeep.bench.traces import GeneratedTrace, TraceRequest
from kvkeep.bench.traces.generators import Chance, Chat, CodingAgents, SessionScript, zipf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


SHORT = CodingAgents(
    sessions_per_second=0.1,
    tools=((0, 1000), (1, 3000)),
    instructions=((0, 500), (1, 2000)),
    tasks=((0, 0.51), (1, 2)),
    steps=((0, 1), (1, 20)),
    result=((0, 15), (0.9, 1500), (1, 4000)),
    tool_s=((0, 0.1), (1, 8)),
)
"""Agents with prompts of some thousand tokens."""


class Tenants:
    """Conversations of eight tenants, the first with most of them."""

    kind = "tenants"
    sessions_per_second = 2.0

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        tenant = chance.pick(range(8), zipf(8))
        made = Chat().session(name, chance, unit_tokens)
        return SessionScript(name, made.kind, made.turns, f"tenant-{tenant}")


def agents(*, seed: int, requests: int, unit_tokens: int) -> Workload:
    """A workload of agents."""
    trace = GeneratedTrace(SHORT, seed=seed, requests=requests, unit_tokens=unit_tokens)
    return Workload.read(trace)


def tenants(*, seed: int, requests: int, unit_tokens: int = 16) -> Workload:
    """A workload of several tenants."""
    trace = GeneratedTrace(Tenants(), seed=seed, requests=requests, unit_tokens=unit_tokens)
    return Workload.read(trace)


@dataclass
class Listed:
    """A trace from a list."""

    requests: Sequence[TraceRequest]
    unit_tokens: int = 4
    name: str = "listed"
    length: int | None = None

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


@dataclass
class Chained:
    """Ids that are chained: the same path has the same id, every other one another."""

    known: dict[tuple[object, ...], int] = field(default_factory=dict)

    def ids(self, path: Sequence[object]) -> list[int]:
        """Of each beginning of ``path``."""
        return [
            self.known.setdefault(tuple(path[:end]), 7 * len(self.known))
            for end in range(1, len(path) + 1)
        ]


def request(
    time: float, units: Sequence[int], *, tokens: int | None = None, unit: int = 4, **more: object
) -> TraceRequest:
    """One that has whole units if nothing else is said."""
    row = np.array(units, np.int64)
    return TraceRequest(time, row, len(row) * unit if tokens is None else tokens, 0, **more)


def workload(paths: Sequence[Sequence[object]], unit: int = 4) -> Workload:
    """A request a second, each with whole units."""
    chained = Chained()
    requests = [
        request(float(second), chained.ids(path), unit=unit) for second, path in enumerate(paths)
    ]
    return Workload.read(Listed(requests, unit))


def best_possible(paths: Sequence[Sequence[object]], room: int) -> int:
    """Blocks that can be reused at most, by trying everything that can be kept."""
    states: dict[frozenset[tuple[object, ...]], int] = {frozenset(): 0}
    for path in paths:
        beginnings = [tuple(path[:end]) for end in range(1, len(path) + 1)]
        after: dict[frozenset[tuple[object, ...]], int] = {}
        for kept, hits in states.items():
            found = next((at for at, one in enumerate(beginnings) if one not in kept), len(path))
            for state in closed(kept | set(beginnings), room):
                after[state] = max(after.get(state, 0), hits + found)
        states = after
    return max(states.values())


def closed(having: frozenset[tuple[object, ...]], room: int) -> set[frozenset[tuple[object, ...]]]:
    """Everything that can be kept of ``having`` in ``room``: with each, all before it."""
    found = {frozenset()}
    for one in sorted(having, key=len):
        found |= {
            state | {one}
            for state in found
            if len(state) < room and (len(one) == 1 or one[:-1] in state)
        }
    return found


def lru_by_list(paths: Sequence[Sequence[object]], room: int) -> int:
    """Blocks an LRU of blocks reuses, the end of a prompt older than its beginning."""
    order: list[tuple[object, ...]] = []
    hits = 0
    for path in paths:
        beginnings = [tuple(path[:end]) for end in range(1, len(path) + 1)]
        if len(beginnings) > room:
            continue  # it is refused
        hits += next((at for at, one in enumerate(beginnings) if one not in order), len(path))
        order = [one for one in order if one not in beginnings] + beginnings[::-1]
        order = order[-room:]
    return hits
