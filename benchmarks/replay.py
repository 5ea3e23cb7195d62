"""Hit rates of policies, tiers and hints on a trace; replay speed.

    python benchmarks/replay.py TRACE            # some ten minutes on two cores
    python benchmarks/replay.py TRACE --quick    # two capacities, fewer tiers
    python benchmarks/replay.py TRACE --json

TRACE is Mooncake's conversation trace for the figures in docs/benchmarks.md (12,031 requests,
ids of 512 tokens); any other is replayed the same way, at capacities of as many blocks. Hit rates
are reused blocks / blocks in percent, and the same on every machine. For the conversation trace the
hit rates of simulators of single blocks are printed as well, if there are any.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvkeep import PagedCache
from kvkeep.bench.replay import BELADY, INFINITE, ReplayRun, Workload, replay, simulate
from kvkeep.bench.traces import open_trace
from kvkeep.core.errors import KVKeepError

CAPACITIES = (3_000, 5_859, 10_000, 20_000)
TIERS = ((1_500, 3_000), (1_500, 6_000), (3_000, 20_000))
POLICIES = ("lru", "returns")
ELSEWHERE: dict[str, tuple[float, ...]] = {
    "lru": (6.5, 13.6, 21.2, 28.8),
    BELADY: (29.4, 35.3, 36.6, 36.6),
    INFINITE: (36.6, 36.6, 36.6, 36.6),
}
HINTED = 5_859
RECALL, FALSE_ALARMS = 0.8, 0.1
PAGE = 16


@dataclass(frozen=True, slots=True)
class Rate:
    """A hit rate in percent, another simulator's if there is one, and the replay's seconds."""

    what: str
    blocks: str
    percent: float
    elsewhere: float | None
    seconds: float


def pools(work: Workload, policies: tuple[str, ...], sizes: tuple[int, ...]) -> list[Rate]:
    """Replay one pool with all policies and bounds."""
    unit = work.unit_tokens
    runs = [ReplayRun(name, size * unit) for name in (*policies, BELADY) for size in sizes]
    runs.append(ReplayRun(INFINITE, 0))
    found = dict(replay(work, runs))
    rates = []
    for run in runs:
        blocks = run.capacity_tokens // unit
        known = ELSEWHERE.get(run.policy)
        at = CAPACITIES.index(blocks) if blocks else 0
        outcome = found[run]
        rates.append(
            Rate(
                run.policy,
                f"{blocks:,}" if blocks else "all",
                100 * outcome.hit_rate,
                known[at] if known else None,
                outcome.seconds,
            )
        )
    return rates


def tiers(work: Workload, sizes: tuple[tuple[int, int], ...]) -> list[Rate]:
    """Replay memory and a tier below, with each tiering policy."""
    unit, rates = work.unit_tokens, []
    for tiering in ("inclusive", "inclusive:2", "exclusive", "exclusive:2"):
        for first, below in sizes:
            run = ReplayRun("lru", first * unit, below=(below * unit,), tiering=tiering)
            outcome = run.on(work)
            rates.append(
                Rate(tiering, f"{first:,} + {below:,}", 100 * outcome.hit_rate, None,
                     outcome.seconds)
            )  # fmt: skip
    return rates


def hints(work: Workload) -> list[Rate]:
    """Replay LRU with hints: 80 % of ended conversations are closed, and 10 % of the others."""
    names = conversations(work)
    last = {name: at for at, name in enumerate(names)}
    rates = []
    for what, recall, wrong in (("no hints", 0.0, 0.0), ("poor hints", RECALL, FALSE_ALARMS),
                                ("perfect hints", 1.0, 0.0)):  # fmt: skip
        begun, chance = time.perf_counter(), random.Random(1)
        cache, hits = PagedCache(HINTED, 1), 0
        for at, name in enumerate(names):
            prompt = work.prompt(at)
            told = str(name) if recall else None
            with cache.open(np.append(prompt, np.int32(2**31 - 1)), session=told) as sequence:
                sequence.publish(len(prompt))
                hits += sequence.num_cached
            if told and chance.random() < (recall if last[name] == at else wrong):
                cache.session(told).close()
        percent = 100 * hits / int(work.prompt_units.sum(dtype="int64"))
        rates.append(Rate(what, f"{HINTED:,}", percent, None, time.perf_counter() - begun))
    return rates


def conversations(work: Workload) -> list[int]:
    """Return the conversation of each prompt: the one whose last prompt it continues."""
    latest: dict[int, tuple[int, int]] = {}
    names: list[int] = []
    for at in range(len(work)):
        prompt = work.prompt(at).tolist()
        known = next((n for n, block in enumerate(prompt) if block not in latest), len(prompt))
        name = at
        if known > 1:
            before, blocks = latest[prompt[known - 1]]
            name = before if known >= blocks - 1 else name
        names.append(name)
        latest.update((block, (name, len(prompt))) for block in prompt)
    return names


def speed(work: Workload, size: int) -> dict[str, float]:
    """Time one replay by units, one by tokens, and four alone and in pairs."""
    unit = work.unit_tokens
    runs = [ReplayRun("lru", (size + step) * unit) for step in range(4)]
    found: dict[str, float] = {}
    begun = time.perf_counter()
    simulate(work, size * unit, "lru")
    found["by units"] = time.perf_counter() - begun
    begun = time.perf_counter()
    simulate(work, size * unit, "lru", page_tokens=PAGE)
    found[f"by pages of {PAGE} tokens"] = time.perf_counter() - begun
    for jobs in (1, 2):
        begun = time.perf_counter()
        list(replay(work, runs, jobs=jobs))
        found[f"four replays, {jobs} process{'es' if jobs > 1 else ''}"] = (
            time.perf_counter() - begun
        )
    found["memory, GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--quick", action="store_true", help="two capacities, fewer tiers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        work = Workload.read(open_trace(args.trace))
    except (KVKeepError, OSError) as fault:
        print(f"replay.py: {fault}", file=sys.stderr)
        return 2
    sizes = CAPACITIES[:2] if args.quick else CAPACITIES
    rates = [*pools(work, POLICIES, sizes), *tiers(work, TIERS[:1] if args.quick else TIERS)]
    rates += hints(work)
    seconds = speed(work, HINTED)
    if args.json:
        print(json.dumps({"rates": [asdict(rate) for rate in rates], "speed": seconds}, indent=2))
        return 0
    print(f"{work.name}: {len(work):,} requests, ids of {work.unit_tokens} tokens")
    for rate in rates:
        beside = f"{rate.elsewhere:6.1f} elsewhere" if rate.elsewhere is not None else ""
        print(
            f"  {rate.what:16}{rate.blocks:>16}{rate.percent:8.2f} %{rate.seconds:8.1f} s  {beside}"
        )
    for what, value in seconds.items():
        print(f"  {what:36}{value:8.2f}" + ("" if "GiB" in what else " s"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
