"""Hit rates of a model with states on traces, by eviction policy.

Each block of a trace is a page; a state takes as many pages as given. "attention" is the same
model without states, which can resume behind any page: the bound.

    python benchmarks/groups.py conversation.jsonl.gz agents.jsonl.gz
    python benchmarks/groups.py trace.jsonl.gz --tokens 3M --state 5 --eviction lru returns
"""

from __future__ import annotations

import argparse

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.traces import open_trace
from kvkeep.core.geometry import parse_count
from kvkeep.core.groups import GroupLayout, StateSpec


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="files of `kvkeep trace`")
    parser.add_argument("--tokens", type=parse_count, default=3_000_000, help="of the budget")
    parser.add_argument("--state", type=int, default=5, help="blocks that a state takes")
    parser.add_argument("--eviction", nargs="+", default=["lru", "returns"])
    options = parser.parse_args()
    print(f"{options.tokens:,} tokens, a state of {options.state} blocks; % of full blocks")
    print(f"{'trace':24}{'eviction':10}{'attention':>12}{'states':>12}")
    for path in options.traces:
        work = Workload.read(open_trace(path))
        unit = work.unit_tokens
        layout = GroupLayout(unit, (), StateSpec(options.state), answer_tokens=1 << 30)
        blocks = max(1, int((work.tokens // unit).sum(dtype="int64")))
        for eviction in options.eviction:
            plain = simulate(work, options.tokens, eviction, page_tokens=unit)
            states = simulate(work, options.tokens, eviction, groups=layout)
            rates = "".join(f"{100 * one.hit_blocks / blocks:12.2f}" for one in (plain, states))
            print(f"{work.name[:23]:24}{eviction:10}{rates}", flush=True)


if __name__ == "__main__":
    main()
