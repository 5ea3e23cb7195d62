"""What each tiering finds and writes: memory above a disk, with restarts and write budgets.

    python benchmarks/admission.py TRACE ... [--cells MEMORY+DISK ...] [--tiering NAME ...]
        [--requests N] [--restart MINUTES] [--writes SHARE ...] [--json]

A TRACE is a file, or a kind of `kvkeep trace generate` (12,000 requests, blocks of 512 tokens).
Cells are in blocks. For each tiering there are the blocks found, over those that `inclusive` finds,
and the blocks written to the disk, over those that it writes. ``floor`` is the least share of
writes with which an oracle finds 95 % as much, on a disk without limit. With ``--restart`` memory
is lost now and then: closed in order, which writes what is worth it, or as in a crash. With
``--writes`` each tiering has a write budget, as shares of what `inclusive` writes without one.
Everything is seeded, and the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.bench.replay import Workload
from kvkeep.bench.replay.tiered import Requests
from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.bench.traces import open_trace
from kvkeep.bench.traces.generators import KINDS, generate
from kvkeep.store.backends import WriteBudget
from kvkeep.store.tiers import tiering
from kvkeep.store.tiers.planner import Demote

if TYPE_CHECKING:
    from collections.abc import Iterator

CELLS = ("1500+3000", "1500+6000", "3000+20000", "6000+20000", "3000+60000")
TIERINGS = ("inclusive", "inclusive:2", "exclusive", "exclusive:2", "adaptive", "valued")


class Found(NamedTuple):
    """Blocks found and written in a replay."""

    hits: int
    writes: int
    over_budget: int
    written_a_day: float


def replayed(
    work: Workload,
    sizes: tuple[int, int],
    name: str,
    *,
    restart_s: float = math.inf,
    crash: bool = False,
    budget: WriteBudget | None = None,
) -> Found:
    """Replay ``work``; all ``restart_s`` seconds memory is lost, after a flush unless ``crash``."""
    now = [float(work.times[0])]
    levels = [Level("memory", sizes[0]), Level("disk", sizes[1], writes=budget)]
    simulator = Restarted(levels, tiering(name, lambda: now[0]), lambda: now[0])
    requests = Requests(work, simulator, whole_answers=False)
    hits, due = 0, now[0] + restart_s
    for number in range(len(work)):
        now[0] = float(work.times[number])
        if now[0] >= due:
            due = now[0] + restart_s
            simulator.restart(crash=crash)
        found = sum(requests.find(number))
        hits += found
        if work.store[number]:
            requests.keep(number, found)
    disk = simulator.stats()[1]
    days = (work.span_s or 1.0) / 86_400
    return Found(hits, disk.writes, disk.over_budget, disk.writes / days)


class Restarted(TierSimulator):
    """A simulator that loses its memory now and then."""

    def restart(self, *, crash: bool) -> None:
        """Lose what memory holds, after a flush unless ``crash``."""
        memory = self._levels[0].catalogue
        for block in memory.blocks():
            move = None if crash else self.planner.save(block)
            if isinstance(move, Demote):
                self._add(move.target, [block])
        memory.victims(len(memory))


def floor(work: Workload, memory: int) -> float:
    """Return the least share of all blocks to write that finds 95 %, if the future is known."""
    here: OrderedDict[int, None] = OrderedDict()
    below: dict[int, None] = {}
    hits: dict[int, int] = defaultdict(int)
    at_once = 0
    for number in range(len(work)):
        ids = work.prompt(number).tolist()
        for block in ids:
            if block in here:
                at_once += 1
            elif block in below:
                hits[block] += 1
            else:
                break
        for block in reversed(ids + work.answer(number).tolist()):
            here[block] = None
            here.move_to_end(block)
        while len(here) > memory:
            below[here.popitem(last=False)[0]] = None
    most = np.cumsum(sorted(hits.values(), reverse=True))
    total = at_once + (int(most[-1]) if len(most) else 0)
    needed = max(0.0, 0.95 * total - at_once)
    return int(np.searchsorted(most, needed)) / max(1, len({*below, *here}))


def rows(work: Workload, cell: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Replay one cell with all tierings, and yield a row for each."""
    memory, disk = (int(part) for part in cell.split("+"))
    sizes = memory, disk
    base = replayed(work, sizes, "inclusive")
    head = {"trace": Path(work.name).name, "cell": cell}
    yield {**head, "tiering": "floor", "hits": 0.95, "writes": floor(work, memory)}
    for name in args.tiering:
        found = base if name == "inclusive" else replayed(work, sizes, name)
        yield {**head, "tiering": name, **_over(found, base)}
        if args.restart:
            for crash in (False, True):
                lost = replayed(work, sizes, name, restart_s=60 * args.restart, crash=crash)
                what = "crash" if crash else "restart"
                yield {**head, "tiering": f"{name}, {what}", **_over(lost, base)}
        for share in args.writes:
            budget = WriteBudget(max(12, int(share * base.written_a_day)))
            short = replayed(work, sizes, name, budget=budget)
            yield {**head, "tiering": f"{name}, writes={share:g}", **_over(short, base)}


def _over(found: Found, base: Found) -> dict[str, float]:
    return {
        "hits": found.hits / max(1, base.hits),
        "writes": found.writes / max(1, base.writes),
        "blocks_a_day": round(found.written_a_day),
        "over_budget": found.over_budget,
    }


def main() -> None:
    """Print a row for each cell and tiering."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="+")
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--tiering", nargs="+", default=TIERINGS)
    parser.add_argument("--requests", type=int, default=12_000, help="of generated traces")
    parser.add_argument("--restart", type=float, help="minutes between two losses of memory")
    parser.add_argument("--writes", type=float, nargs="+", default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for place in args.trace:
        if place in KINDS:
            generated = generate(place, seed=1, requests=args.requests, unit_tokens=512)
            work = Workload.read(generated)
        else:
            work = Workload.read(open_trace(place))
        for cell in args.cells:
            for row in rows(work, cell, args):
                if args.json:
                    print(json.dumps(row))
                else:
                    figures = f"{row['hits']:6.3f} hits  {row['writes']:6.3f} writes"
                    over = row.get("over_budget", 0)
                    more = f"  {over:,} over budget" * bool(over)
                    print(f"{row['trace']:32.32} {cell:>12}  {row['tiering']:22} {figures}{more}")


if __name__ == "__main__":
    main()
