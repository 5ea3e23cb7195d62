"""Fair shares: the generated `tenants` trace with one flooder, with and without `Shares`.

    python benchmarks/shares.py

40 tenants have the sessions of the `tenants` trace, the n-th 1/n of them and that weight; one more,
the flooder, begins four times as many sessions as all others together, each with a prompt that is
never seen again, and has the weight of the 20th. For each seed, memory and policy the table has the
tokens reused with and without shares, and the worst and the median tenant: its hits over those that
it has alone in its share of the memory, among tenants that send 0.2 % of the tokens or more.
Everything is seeded.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from kvkeep.bench.replay import Workload, simulate, simulate_shares
from kvkeep.bench.traces.generators import generate

FLOODER = "flooder"


def weight(tenant: str) -> float:
    """Return 1/n for the n-th tenant, and 1/20 for the flooder."""
    return 1 / 20 if tenant == FLOODER else 1 / (1 + int(tenant.partition("-")[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[500_000, 1_000_000, 2_000_000, 4_000_000]
    )
    parser.add_argument("--policy", nargs="+", default=["lru", "returns"])
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--flood", type=float, default=4.0)
    args = parser.parse_args()
    print("| memory | policy | seed | all hits | without | worst tenant | median | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in args.seed:
        flood = {"flood": args.flood}
        trace = generate(
            "tenants", seed=seed, requests=args.requests, unit_tokens=64, changed=flood
        )
        work = Workload.read(trace)
        shares = {tenant: weight(tenant) for tenant in work.namespaces}
        for capacity in args.capacity:
            for name in args.policy:
                plain = simulate(work, capacity, name)
                began = perf_counter()
                shared = simulate_shares(work, capacity, name, shares=shares)
                took = perf_counter() - began
                kept = [
                    hits / alone
                    for tenant, (_, _, hits, alone) in shared.shares.items()
                    if alone and tenant != FLOODER
                ]
                print(
                    f"| {capacity:,} | `{name}` | {seed} | {shared.token_hit_rate:.1%} | "
                    f"{plain.token_hit_rate:.1%} | {min(kept):.0%} | {np.median(kept):.0%} | "
                    f"{took:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
