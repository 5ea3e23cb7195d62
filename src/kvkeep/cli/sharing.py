"""The table of ``kvkeep replay --share``: tenants that share a memory, beside each alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.replay.words import amount
from kvkeep.cli.drawing import visible
from kvkeep.cli.tables import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.bench.replay import Outcome

__all__ = ["part", "print_shares"]


def print_shares(outcomes: Sequence[Outcome]) -> None:
    """Print how tenants fare with shares, beside each alone; nothing without shares."""
    plain = {(one.policy, _sizes(one)): one for one in outcomes if not one.shares}
    rows = []
    for one in outcomes:
        compared = sorted(
            (hits / alone, tenant) for tenant, (_, _, hits, alone) in one.shares.items() if alone
        )
        if not one.shares:
            continue
        name = one.policy.replace("+shares", "")
        least, tenant = compared[0] if compared else (None, "")
        rows.append(
            [
                f"{name}, {_memory(_sizes(one))}",
                part(one.token_hit_rate),
                part(plain[name, _sizes(one)].token_hit_rate),
                part(least),
                visible(tenant),
                part(compared[len(compared) // 2][0] if compared else None),
            ]
        )
    if rows:
        head = ["tokens reused with shares", "all", "without", "worst tenant", "", "median"]
        print_table(head, rows)
        print("tenants: of the tokens that each reuses alone, in a memory as large as its share")


def _memory(sizes: tuple[int, ...]) -> str:
    if len(sizes) == 1:
        return amount(sizes[0])
    return " + ".join(amount(size).removesuffix(" tokens") for size in sizes)


def _sizes(outcome: Outcome) -> tuple[int, ...]:
    """Return the tokens of each tier, or of the only memory."""
    tiers = tuple(tier["capacity_tokens"] for tier in outcome.tiers)
    return tiers or (outcome.capacity_tokens,)


def part(found: float | None) -> str:
    """Format a part of 1; empty if there is none."""
    return "" if found is None else f"{100 * found:.1f} %"
