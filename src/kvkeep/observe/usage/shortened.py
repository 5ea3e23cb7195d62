"""`shortened`: a report on tenants with the largest of them alone, the others in one row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kvkeep.observe.usage.tenants import TenantReport

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TenantOrder", "shortened"]

TenantOrder = Literal["prompt_tokens", "computed_tokens"]


def shortened(
    report: Sequence[TenantReport],
    *,
    order: TenantOrder = "prompt_tokens",
    search: str = "",
    most: int | None = None,
) -> tuple[list[TenantReport], int]:
    """Return rows of a ledger's report, and how many tenants with a row ``search`` finds.

    The rows are those of tenants whose names contain ``search``, in any case; of these the ``most``
    that have the largest ``order``, largest first. The last row, of None, sums up all others,
    found or not, so the sums over all rows stay what they are.
    """
    wanted = search.casefold()
    named = [line for line in report if line.tenant is not None]
    found = [line for line in named if wanted in (line.tenant or "").casefold()]
    found.sort(key=lambda line: -getattr(line.counts, order))
    shown = found[:most]
    listed = {line.tenant for line in shown}
    *others, last = [line for line in report if line.tenant is None or line.tenant not in listed]
    assert last.tenant is None, "a report ends with all others"
    counts = replace(last.counts)
    for line in others:
        counts.add(line.counts)
    pool = last.pool_tokens + sum(line.pool_tokens for line in others)
    tiers = last.tier_tokens + sum(line.tier_tokens for line in others)
    return [*shown, TenantReport(None, counts, pool, tiers)], len(found)
