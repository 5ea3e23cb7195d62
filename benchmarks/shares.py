"""Fair shares: the generated `tenants` trace with one flooder, with and without shares.

    python benchmarks/shares.py           # the pool
    python benchmarks/shares.py tiers     # memory, and a tier below it
    python benchmarks/shares.py cost      # of a block in a tier's catalogue

40 tenants have the sessions of the `tenants` trace, the n-th 1/n of them and that weight; one more,
the flooder, begins four times as many sessions as all others together, each with a prompt that is
never seen again, and has the weight of the 20th. For each seed, memory and policy the table has the
tokens reused with and without shares, and the worst and the median tenant: its hits over those that
it has alone in its share of the memory, among tenants that send 0.2 % of the tokens or more.
Everything is seeded. Of costs, in seconds of the processor, there are medians and quartiles.
"""

from __future__ import annotations

import argparse
import hashlib
from statistics import quantiles
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay import (
    Workload,
    simulate,
    simulate_shares,
    simulate_tier_shares,
    simulate_tiers,
)
from kvkeep.bench.traces.generators import generate
from kvkeep.core.eviction import POLICIES
from kvkeep.store.tiers import TenantWeights
from kvkeep.store.tiers.catalogue import Catalogue

if TYPE_CHECKING:
    from kvkeep.bench.replay import Outcome

FLOODER = "flooder"
UNIT = {"pool": 64, "tiers": 256}  # tokens of a page, and of a block


def weight(tenant: str) -> float:
    """Return 1/n for the n-th tenant, and 1/20 for the flooder."""
    return 1 / 20 if tenant == FLOODER else 1 / (1 + int(tenant.partition("-")[2]))


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["pool", "tiers", "cost"], default="pool")
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument(
        "--capacity", type=int, nargs="+", help="of the pool, or of memory; the tier has 3 times it"
    )
    parser.add_argument("--tiering", nargs="+", default=["inclusive", "exclusive"])
    parser.add_argument("--policy", nargs="+")
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--flood", type=float, default=4.0)
    args = parser.parse_args()
    if args.part == "cost":
        cost(args.policy or ["lru", "returns"])
        return
    print("| memory | policy | seed | all hits | without | worst tenant | median | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in args.seed:
        flood = {"flood": args.flood}
        unit = UNIT[args.part]
        trace = generate(
            "tenants", seed=seed, requests=args.requests, unit_tokens=unit, changed=flood
        )
        (pool if args.part == "pool" else tiers)(Workload.read(trace), seed, args)


def pool(work: Workload, seed: int, args: argparse.Namespace) -> None:
    """Print rows of one memory."""
    shares = {tenant: weight(tenant) for tenant in work.namespaces}
    for capacity in args.capacity or [500_000, 1_000_000, 2_000_000, 4_000_000]:
        for name in args.policy or ["lru", "returns"]:
            plain = simulate(work, capacity, name)
            began = thread_time()
            found = simulate_shares(work, capacity, name, shares=shares)
            show(f"{capacity:,} | `{name}`", seed, found, plain, thread_time() - began)


def tiers(work: Workload, seed: int, args: argparse.Namespace) -> None:
    """Print rows of a memory and a tier below it."""
    shares = {tenant: weight(tenant) for tenant in work.namespaces}
    for capacity in args.capacity or [500_000]:
        sizes = capacity, 3 * capacity
        for name in args.policy or ["lru", "returns"]:
            for tiering in args.tiering:
                plain = simulate_tiers(work, sizes, tiering, name)
                began = thread_time()
                found = simulate_tier_shares(work, sizes, tiering, name, shares=shares)
                took = thread_time() - began
                show(f"{sizes[0]:,} + {sizes[1]:,} | `{name}`, {tiering}", seed, found, plain, took)


def show(label: str, seed: int, found: Outcome, plain: Outcome, seconds: float) -> None:
    """Print one row."""
    kept = [
        hits / alone
        for tenant, (_, _, hits, alone) in found.shares.items()
        if alone and tenant != FLOODER
    ]
    print(
        f"| {label} | {seed} | {found.token_hit_rate:.1%} | {plain.token_hit_rate:.1%} | "
        f"{min(kept):.0%} | {np.median(kept):.0%} | {seconds:.0f} |",
        flush=True,
    )


def cost(policies: list[str]) -> None:
    """Print what a block costs: stored and used, and evicted; alone, and 16 in a call."""
    print("| policy | tenants | shares | stored and used, µs | evicted one by one | 16 at once |")
    print("|---|--:|---|--:|--:|--:|")
    for name in policies:
        for tenants in (4, 64, 1024):
            # By turns, so that both see the same machine.
            runs = [
                [times(name, tenants, shared=shared) for shared in (False, True)] for _ in "12345"
            ]
            for shared in (False, True):
                cells = []
                for column in zip(*(run[shared] for run in runs), strict=True):
                    low, middle, high = quantiles(column, n=4)
                    cells.append(f"{middle:.1f} ({low:.1f}–{high:.1f})")
                print(
                    f"| `{name}` | {tenants} | {'yes' if shared else 'no'} | {' | '.join(cells)} |"
                )


def times(name: str, tenants: int, *, shared: bool, blocks: int = 16_384) -> list[float]:
    """Return microseconds a block: to store and use it, and to evict it in two ways."""
    spaces = [hashlib.sha256(b"%d" % tenant).digest()[:16] for tenant in range(tenants)]
    shares = TenantWeights({}, {space: str(at) for at, space in enumerate(spaces)})
    catalogue = Catalogue(
        POLICIES[name], budget=blocks, ordered=1 << 16, shares=shares if shared else None
    )
    runs = [
        [spaces[at % tenants] + hashlib.sha256(b"%d %d" % (at, b)).digest() for b in range(16)]
        for at in range(2 * blocks // 16)
    ]
    for run in runs[: len(runs) // 2]:
        catalogue.add_all(run, 1)
        catalogue.used(run, new=set(run))
    spent = [0.0, 0.0, 0.0]
    for number, run in enumerate(runs[len(runs) // 2 :]):
        began = thread_time()
        if number % 2:
            catalogue.victims(16)
        else:
            for _ in run:
                catalogue.victims(1)
        evicted = thread_time()
        catalogue.add_all(run, 1)
        catalogue.used(run, new=set(run))
        spent[1 + number % 2] += evicted - began
        spent[0] += thread_time() - evicted
    each = 1e6 / blocks
    return [spent[0] * each, 2 * spent[1] * each, 2 * spent[2] * each]


if __name__ == "__main__":
    main()
