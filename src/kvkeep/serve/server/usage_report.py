"""`usage_report`: what each tenant used, for ``/kv/usage``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.observe.usage.shortened import shortened
from kvkeep.serve.server.schemas.usage import TenantRow, UsageResponse

if TYPE_CHECKING:
    from kvkeep.observe.usage import TenantLedger
    from kvkeep.observe.usage.shortened import TenantOrder
    from kvkeep.serve.server.retention import Retention
    from kvkeep.serve.server.tenant_usage import TenantUsage
    from kvkeep.serve.server.tier_retention import TierRetention

__all__ = ["UsagePart", "usage_of", "usage_report"]


class UsagePart(NamedTuple):
    """Which tenants a report has; see `shortened`."""

    order: TenantOrder = "prompt_tokens"
    search: str = ""
    most: int | None = None


def usage_report(
    meter: TenantUsage,
    pool: Retention,
    tiers: TierRetention | None,
    part: UsagePart,
    *,
    model: str,
) -> UsageResponse:
    """Return what tenants of a server used since ``meter`` began, and what they keep now.

    The tiers are read for reports on all tenants; the largest alone are asked for every few
    seconds, so what they keep there is up to ten seconds old.
    """
    if part.most is None:
        meter.sample()
    pins = pool.tokens_of(), {} if tiers is None else tiers.tokens_of()
    return usage_of(meter.ledger, part, pins, model=model, since=meter.since)


def usage_of(
    ledger: TenantLedger,
    part: UsagePart,
    pins: tuple[dict[str, int], dict[str, int]],
    *,
    model: str,
    since: float,
) -> UsageResponse:
    """Return rows of a ledger; ``pins`` are tokens by tenant, in pool and tiers: taken out."""
    lines, count = shortened(ledger.report(), order=part.order, search=part.search, most=part.most)
    pinned, retained = pins
    rows = [
        TenantRow(
            cache_salt=line.tenant,
            **asdict(line.counts),
            pool_tokens=line.pool_tokens,
            tier_tokens=round(line.tier_tokens),
            pinned_tokens=_taken(pinned, line.tenant),
            retained_tokens=_taken(retained, line.tenant),
        )
        for line in lines
    ]
    return UsageResponse(model=model, since=since, until=time.time(), count=count, tenants=rows)


def _taken(tokens: dict[str, int], tenant: str | None) -> int:
    """Take the tokens of a tenant out of ``tokens``; for None, the last line, all that are left."""
    return sum(tokens.values()) if tenant is None else tokens.pop(tenant, 0)
