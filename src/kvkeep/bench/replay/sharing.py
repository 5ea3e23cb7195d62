"""`simulate_shares`: memory that tenants share by weight, and each of them alone on its share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.replay.simulate import simulate
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.shares import check_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.groups import GroupLayout

__all__ = ["check_tenants", "simulate_shares", "simulate_tier_shares"]


def check_tenants(workload: Workload, shares: Mapping[str, float]) -> None:
    """Raise `InvalidValue` for a wrong weight, or a tenant that the workload does not have.

    The unnamed tenant always passes.
    """
    for tenant in check_weights(shares):
        if tenant and tenant not in workload.namespaces:
            some = ", ".join(map(repr, workload.namespaces[:3]))
            raise InvalidValue(
                f"there is a share for {tenant!r}, but {workload.name} has no such tenant; it has "
                f"{len(workload.namespaces)}: {some}{' …' * (len(workload.namespaces) > 3)}"
            )


def simulate_shares(
    workload: Workload,
    capacity_tokens: int,
    policy: str = "lru",
    *,
    shares: Mapping[str, float],
    page_tokens: int | None = None,
    prefix: str = "radix",
    groups: GroupLayout | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` as `simulate` does, with `Shares` of these weights; others have weight 1.

    The outcome's ``shares`` compare each tenant that has 0.2 % of the tokens with the tenant alone:
    in a pool as large as its part of all weights, with prompts cut to the size of that pool. Its
    policy is named like "lru+shares". Raises `InvalidValue` as `check_tenants` does.

    Cost: twice that of `simulate`.
    """
    check_tenants(workload, shares)
    begun = time.perf_counter()
    outcome = simulate(
        workload,
        capacity_tokens,
        policy,
        page_tokens=page_tokens,
        prefix=prefix,
        groups=groups,
        shares=shares,
        progress=progress,
    )
    page = Paging(workload.unit_tokens, page_tokens, groups).tokens

    def alone(tenant: str, part: float) -> Outcome:
        capacity = max(page, int(capacity_tokens * part))
        return simulate(
            workload.only(workload.namespaces.index(tenant), capacity),
            capacity,
            policy,
            page_tokens=page_tokens,
            prefix=prefix,
            groups=groups,
        )

    _compare(outcome, workload, shares, alone)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def simulate_tier_shares(
    workload: Workload,
    capacities_tokens: Sequence[int],
    tiering: str = "inclusive",
    policy: str = "lru",
    *,
    shares: Mapping[str, float],
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` as `simulate_tiers` does, with shares of these weights in each tier.

    The outcome compares tenants as that of `simulate_shares`: alone, each has its part of every
    tier, and prompts cut to the size of all of them. Raises `InvalidValue` as `check_tenants` does.

    Cost: twice that of `simulate_tiers`.
    """
    check_tenants(workload, shares)
    begun = time.perf_counter()
    outcome = simulate_tiers(
        workload, capacities_tokens, tiering, policy, shares=shares, progress=progress
    )

    def alone(tenant: str, part: float) -> Outcome:
        parts = [max(workload.unit_tokens, int(one * part)) for one in capacities_tokens]
        mine = workload.only(workload.namespaces.index(tenant), sum(parts))
        return simulate_tiers(mine, parts, tiering, policy)

    _compare(outcome, workload, shares, alone)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _compare(
    outcome: Outcome,
    workload: Workload,
    shares: Mapping[str, float],
    alone: Callable[[str, float], Outcome],
) -> None:
    """Add to ``outcome`` what each tenant hits alone, on its part of all weights."""
    all_weights = sum(shares.get(tenant, 1.0) for tenant in workload.namespaces)
    for tenant, amounts in outcome.shares.items():
        amounts.append(alone(tenant, amounts[0] / all_weights).hit_tokens)
