"""kvkeep beside vLLM, SGLang and LMCache: the same work, by turns, in one run.

    make bench-peers                               # sets up what it can, and writes the page
    .venv/bin/python benchmarks/beside_peers.py --quick --only 'kvkeep;vLLM'
    .venv/bin/python benchmarks/beside_peers.py --part tiers --json
    .venv/bin/python benchmarks/beside_peers.py --write docs/benchmarks.md

One process a system, in an environment of its own, all bound to one CPU. For each case they take
turns, in one order and in the other: a round is one measurement of each, after one that does not
count. Figures are medians; a ratio is another system's time over kvkeep's in the same round, so
more than 1× is slower than kvkeep. Garbage collection is off. What cannot be imported is left out,
and the page says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from peers.table import Measured, notes, table, write
from peers.work import FULL, OURS, QUICK, SYSTEMS, Part, cases
from peers.workers import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.work import Case

PARTS: tuple[Part, ...] = get_args(Part)


def measure(part: Part, measured: Measured, options: argparse.Namespace, work: Path) -> None:
    """Measure all cases of a part by all its systems."""
    wanted = [one for one in SYSTEMS if one.part == part and one.name in options.only]
    with ExitStack() as stack:
        log = stack.enter_context((work / f"{part}.log").open("w"))
        peers = [
            Peer(one, measured.sizes, options.cpu, work / f"{part} {at}", log)
            for at, one in enumerate(wanted)
        ]
        for peer in peers:
            stack.callback(peer.close)
        for peer in peers:
            peer.begin()
            if peer.missing:
                measured.missing[peer.system.name] = peer.missing
            else:
                measured.versions[peer.system.name] = peer.version
        for case in cases(measured.sizes):
            if case.part == part and options.case in case.name:
                print(f"… {case.title}", file=sys.stderr, flush=True)
                rounds(case, peers, measured, options.rounds)


def rounds(case: Case, peers: Sequence[Peer], measured: Measured, count: int) -> None:
    """Measure a case ``count`` times by each, after once to warm up; who fails is left out."""
    running = [peer for peer in peers if case.name in peer.cases]
    for turn in range(count + 1):
        for peer in list(running)[:: 1 if turn % 2 else -1]:
            took = peer.seconds(case)
            if turn or isinstance(took, str):
                measured.add(case, peer.system.name, took)
            if isinstance(took, str):
                running.remove(peer)
    for name in measured.failed.get(case.name, {}):
        measured.seconds.get(case.name, {}).pop(name, None)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print or write."""
    names = list(dict.fromkeys(one.name for one in SYSTEMS))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds")
    parser.add_argument("--rounds", type=int, help="of each case (default: 7)")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--only", help=f"systems: {', '.join(names)}", metavar="A;B")
    parser.add_argument("--case", default="", help="cases whose name contains this")
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path, help="where files go (default: a temporary directory)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables into a page")
    parser.add_argument("--json", action="store_true", help="seconds of all rounds")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="what --json printed: run nothing"
    )
    options = parser.parse_args(arguments)
    options.only = names if options.only is None else options.only.split(";")
    unknown = [one for one in options.only if one not in names]
    if unknown:
        parser.error(f"no system {unknown[0]!r}; there are: {'; '.join(names)}")
    options.rounds = options.rounds or (2 if options.quick else 7)
    if options.read:
        measured = Measured.read(options.read.read_text(encoding="utf-8"))
    else:
        measured = Measured(QUICK if options.quick else FULL, os.getloadavg()[0])
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvkeep peers ") as work:
            for part in options.part or PARTS:
                measure(part, measured, options, Path(work))
    lines: list[str] = []
    for part in options.part or PARTS:
        lines += [*table(measured, part), ""]
    lines += notes(measured)
    if options.write:
        write(options.write, lines)
    print(json.dumps(asdict(measured), indent=1) if options.json else "\n".join(lines))
    return int(OURS in options.only and OURS not in measured.versions)


if __name__ == "__main__":
    sys.exit(main())
