"""Hit rates of a model with states on traces, by placement of checkpoints and eviction policy.

Each block of a trace is a page; a state takes as many pages as given. "attention" is the same
model without states, which can resume behind any page: the bound. Placements:

    every block   a checkpoint behind every block
    every 8th     behind every eighth
    ends          where prompts end
    branches      there, and where prompts branched
    planned       those of the cache: also guesses in long new parts, where memory is free

    python benchmarks/groups.py conversation.jsonl.gz agents.jsonl.gz
    python benchmarks/groups.py trace.jsonl.gz --tokens 3M --state 5 --eviction lru returns
    python benchmarks/groups.py trace.jsonl.gz --placements planned --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.traces import open_trace
from kvkeep.core.geometry import parse_count
from kvkeep.core.groups import GroupLayout, StateSpec

if TYPE_CHECKING:
    from kvkeep import Sequence
    from kvkeep.bench.replay.passes import Stops

NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class HitRate:
    """The hit rate of one trace under one policy, in percent of the full blocks of prompts."""

    trace: str
    eviction: str
    placement: str
    percent: float
    checkpoints: int
    """Checkpoints that were stored."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Every:
    """Stops behind every so many blocks."""

    blocks: int

    def __call__(self, sequence: Sequence) -> list[int]:
        """Return the next one: a token of the cache stands for a block."""
        assert sequence.groups is not None
        return [(sequence.groups.position // self.blocks + 1) * self.blocks]


def ends(sequence: Sequence) -> list[int]:
    """Return the end of a prompt: its last token is always computed again."""
    return [sequence.num_tokens - 1]


PLACEMENTS: dict[str, Stops | None] = {
    "every block": Every(1), "every 8th": Every(8), "ends": ends, "branches": None, "planned": None,
}  # fmt: skip


def hit_rate(work: Workload, tokens: int, state: int, eviction: str, placement: str) -> HitRate:
    """Replay with one placement; "attention" is without states."""
    unit = work.unit_tokens
    layout = GroupLayout(unit, (), StateSpec(state), answer_tokens=NEVER)
    if placement == "attention":
        found = simulate(work, tokens, eviction, page_tokens=unit)
    else:
        if placement != "planned":
            layout = replace(layout, guess_tokens=NEVER)
        found = simulate(work, tokens, eviction, groups=layout, stops=PLACEMENTS[placement])
    percent = 100 * found.hit_blocks / max(1, int((work.tokens // unit).sum(dtype="int64")))
    stored = found.groups.get("checkpoints_stored", 0)
    return HitRate(work.name, eviction, placement, percent, stored, found.seconds)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="files of `kvkeep trace`")
    parser.add_argument("--tokens", type=parse_count, default=3_000_000, help="of the budget")
    parser.add_argument("--state", type=int, default=5, help="blocks that a state takes")
    parser.add_argument("--eviction", nargs="+", default=["lru", "returns"])
    parser.add_argument("--placements", nargs="+", default=[*PLACEMENTS], choices=PLACEMENTS)
    parser.add_argument("--json", action="store_true", help="one JSON list")
    options = parser.parse_args()
    columns = ["attention", *options.placements]
    if not options.json:
        print(f"{options.tokens:,} tokens, a state of {options.state} blocks; % of full blocks")
        print(f"{'trace':24}{'eviction':10}" + "".join(f"{name:>12}" for name in columns))
    rates = []
    for path in options.traces:
        work = Workload.read(open_trace(path))
        for eviction in options.eviction:
            if not options.json:
                print(f"{work.name[:23]:24}{eviction:10}", end="", flush=True)
            for name in columns:
                rate = hit_rate(work, options.tokens, options.state, eviction, name)
                rates.append(rate)
                if not options.json:
                    print(f"{rate.percent:12.2f}", end="", flush=True)
            if not options.json:
                print()
    if options.json:
        print(json.dumps([asdict(rate) for rate in rates]))


if __name__ == "__main__":
    main()
