"""Hit rates of a hybrid model on traces: states beside KV in one budget, by eviction policy.

Each block of a trace is a page; a state takes as many pages as given. "attention" is the same
model without states, which can resume behind any page: the bound. Placements of checkpoints are
those of the cache: where prompts branch and end, and guesses where memory is free.

    python benchmarks/groups.py conversation.jsonl.gz agents.jsonl.gz
    python benchmarks/groups.py trace.jsonl.gz --tokens 3M --state 5 --eviction lru adaptive
    python benchmarks/groups.py trace.jsonl.gz --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from kvkeep import PagedCache
from kvkeep.bench.traces import open_trace
from kvkeep.core.errors import OutOfPages
from kvkeep.core.geometry import parse_count
from kvkeep.core.groups import GroupLayout, StateSpec

if TYPE_CHECKING:
    from kvkeep import Sequence
    from kvkeep.bench.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class HitRate:
    """The hit rate of one trace under one policy, in percent of the full blocks of prompts."""

    trace: str
    eviction: str
    attention: float
    states: float
    seconds: float

    @property
    def difference(self) -> float:
        """Points that the states cost."""
        return self.states - self.attention


class Blocks:
    """Numbers the blocks of a trace, so that each can be a token."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, int], int] = {}

    def prompt(self, request: TraceRequest, unit: int) -> list[int]:
        """Return the full blocks of a prompt, and a block of its own for the rest."""
        numbers = self._numbers
        full = request.units[: request.tokens // unit].tolist()
        found = [numbers.setdefault((request.namespace, block), len(numbers)) for block in full]
        own = numbers.setdefault((None, len(numbers)), len(numbers))
        return [*found, own]


def compute(sequence: Sequence, blocks: int) -> None:
    """Do what an engine does, but for the computing."""
    sequence.copies()
    groups = sequence.groups
    if groups is None:
        sequence.publish(blocks)
        return
    while groups.position < blocks:
        stops = groups.stops
        stop = min([blocks, *stops])
        groups.copies()
        groups.reach(stop)
        groups.copies()
        if stop in stops:
            groups.checkpoint(stop)
        sequence.publish(stop)


def hit_rate(trace: Trace, pages: int, state: int, eviction: str) -> float:
    """Return the percentage of blocks found; ``state`` pages are a state, 0: none."""
    # A page is a token here, so lengths in tokens are shorter by the size of a block.
    layout: int | GroupLayout = 1
    if state:
        layout = GroupLayout(1, (), StateSpec(state), guess_tokens=2, answer_tokens=1 << 30)
    cache = PagedCache(pages, layout, eviction=eviction, block_pages=1)
    blocks, found, queried = Blocks(), 0, 0
    for request in trace:
        prompt = blocks.prompt(request, trace.unit_tokens)
        queried += len(prompt) - 1
        try:
            sequence = cache.open(prompt)
        except OutOfPages:
            continue
        found += sequence.num_cached
        with sequence:
            compute(sequence, len(prompt) - 1)
    return 100 * found / max(1, queried)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="files of `kvkeep trace`")
    parser.add_argument("--tokens", type=parse_count, default=3_000_000, help="of the budget")
    parser.add_argument("--state", type=int, default=5, help="blocks that a state takes")
    parser.add_argument("--eviction", nargs="+", default=["lru", "reuse", "adaptive"])
    parser.add_argument("--json", action="store_true", help="one JSON list")
    options = parser.parse_args()
    rates = []
    for path in options.traces:
        trace = open_trace(path)
        for eviction in options.eviction:
            started = perf_counter()
            pages = options.tokens // trace.unit_tokens
            attention, states = (
                hit_rate(trace, pages, state, eviction) for state in (0, options.state)
            )
            took = perf_counter() - started
            rates.append(HitRate(trace.name, eviction, attention, states, took))
    if options.json:
        print(json.dumps([asdict(rate) for rate in rates]))
        return
    print(f"{options.tokens:,} tokens, a state of {options.state} blocks; % of full blocks found")
    print(f"{'trace':32}{'eviction':10}{'attention':>10}{'states':>10}{'difference':>12}")
    for rate in rates:
        print(
            f"{rate.trace[:31]:32}{rate.eviction:10}{rate.attention:10.2f}{rate.states:10.2f}"
            f"{rate.difference:+12.2f}"
        )


if __name__ == "__main__":
    main()
