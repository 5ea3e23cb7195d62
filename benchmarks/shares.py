"""Fair shares: the generated `tenants` trace with one flooder, with and without `Shares`.

    python benchmarks/shares.py

40 tenants have the sessions of the `tenants` trace; one more, the flooder, sends documents that are
never read again. For each memory the table has the hit rate of all tokens, of all tokens but the
flooder's, and the worst tenant: its hits over those that it has alone in its share of the memory,
among tenants that send 0.2 % of the tokens or more. Everything is seeded.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.bounds import belady
from kvkeep.bench.replay.workload import Workload
from kvkeep.bench.traces.generators import GeneratedTrace, Tenants
from kvkeep.bench.traces.generators.base import PromptSegments, SessionScript, Turn
from kvkeep.core.cache import PagedCache
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces.generators import Chance
    from kvkeep.core.eviction import EvictionPolicy

FLOODER = "flooder"
PADDING = 2**31 - 1
LEAST_SHARE = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Flooded:
    """The `tenants` workload, in which a share ``flood`` of the sessions is the flooder's."""

    kind: str = "tenants with a flooder"
    sessions_per_second: float = 4.0
    flood: float = 0.3
    others: Tenants = field(default_factory=Tenants)

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        """Return a session of a tenant, or a document of 8,000 to 30,000 tokens."""
        if not chance.happens(self.flood):
            return self.others.session(name, chance, unit_tokens)
        return SessionScript(name, FLOODER, _document(name, chance, unit_tokens), FLOODER)


def _document(name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
    prompt = PromptSegments(unit_tokens)
    prompt.add(chance.whole(((0, 8000), (1, 30_000))), FLOODER, name)
    yield Turn(0.0, prompt, 20)


def replay(
    work: Workload, capacity: int, policy: str | EvictionPolicy, only: int | None = None
) -> tuple[Counter[int], Counter[int]]:
    """Return the hit tokens and all tokens of each tenant; ``only`` one tenant's requests."""
    cache = PagedCache(max(2, capacity // work.unit_tokens), 1, eviction=policy)
    hits: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for number in range(len(work)):
        space = int(work.namespace[number])
        if only is not None and space != only:
            continue
        prompt = work.prompt(number)
        tokens[space] += len(prompt)
        prompt = prompt[: cache.num_pages - 1]  # alone, a long one takes all of a small share
        with cache.open(np.append(prompt, PADDING), str(space)) as sequence:
            hits[space] += sequence.num_cached
            sequence.publish(len(prompt))
            sequence.truncate(len(prompt))
            answer = work.answer(number)
            if len(answer) and cache.num_available >= len(answer):
                sequence.append(answer)
                sequence.publish()
    return hits, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[2_000_000, 4_000_000, 8_000_000]
    )
    parser.add_argument("--policy", nargs="+", default=["lru"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", choices=["size", "equal"], default="size")
    parser.add_argument("--guaranteed", type=float, nargs="+", default=[0.8, 0.9, 1.0])
    args = parser.parse_args()
    trace = GeneratedTrace(Flooded(), seed=args.seed, requests=args.requests, unit_tokens=64)
    work = Workload.read(trace)
    tenants = len(work.namespaces)
    flooder = work.namespaces.index(FLOODER)
    weights = dict.fromkeys(range(tenants), 1.0)
    if args.weights == "size":  # the n-th tenant has 1 / n; the flooder has what the median has
        for space, tenant in enumerate(work.namespaces):
            number = 20 if tenant == FLOODER else int(tenant.partition("-")[2]) + 1
            weights[space] = 1 / number
    print(f"{len(work)} requests, {tenants} tenants, {int(work.tokens.sum()) / 1e6:.0f} M tokens")
    print("| memory | policy | all | without the flooder | worst tenant | median | seconds |")
    print("|---|---|---|---|---|---|---|")
    for capacity in args.capacity:
        best = belady(work, capacity)
        print(f"| {capacity:,} | Belady | {best.token_hit_rate:.1%} | | | | |", flush=True)
        for name in args.policy:
            total_weight = sum(weights.values())
            alone = {
                space: replay(work, int(capacity * weight / total_weight), name, space)[0][space]
                for space, weight in weights.items()
            }
            by_name = {str(space): weight for space, weight in weights.items()}
            some = [Shares(POLICIES[name], by_name, guaranteed=one) for one in args.guaranteed]
            for policy in (name, *some):
                began = perf_counter()
                hits, tokens = replay(work, capacity, policy)
                took = perf_counter() - began
                total = sum(tokens.values())
                ratios = [
                    hits[space] / alone[space]
                    for space in range(tenants)
                    if alone[space] and tokens[space] >= LEAST_SHARE * total and space != flooder
                ]
                rest = total - tokens[flooder]
                said = policy
                if isinstance(policy, Shares):
                    said = f"{policy.name}, {policy.guaranteed:.0%} guaranteed"
                print(
                    f"| {capacity:,} | {said} | {sum(hits.values()) / total:.1%} | "
                    f"{(sum(hits.values()) - hits[flooder]) / rest:.1%} | {min(ratios):.0%} | "
                    f"{np.median(ratios):.0%} | {took:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
