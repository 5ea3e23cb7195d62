"""`usage_report`: what each tenant used, for ``/kv/usage``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvkeep.serve.server.schemas.usage import TenantRow, UsageResponse

if TYPE_CHECKING:
    from kvkeep.observe.usage import TenantLedger
    from kvkeep.serve.server.retention import Retention
    from kvkeep.serve.server.tenant_usage import TenantUsage
    from kvkeep.serve.server.tier_retention import TierRetention

__all__ = ["usage_of", "usage_report"]


def usage_report(
    meter: TenantUsage, pool: Retention, tiers: TierRetention | None, *, model: str
) -> UsageResponse:
    """Return what each tenant of a server used since ``meter`` began, and what it keeps now."""
    meter.sample()
    retained = {} if tiers is None else tiers.tokens_of()
    return usage_of(meter.ledger, pool.tokens_of(), retained, model=model, since=meter.since)


def usage_of(
    ledger: TenantLedger,
    pinned: dict[str, int],
    retained: dict[str, int],
    *,
    model: str,
    since: float,
) -> UsageResponse:
    """Return the rows of a ledger; ``pinned`` and ``retained`` tokens, by tenant, are taken out."""
    rows = [
        TenantRow(
            cache_salt=line.tenant,
            **asdict(line.counts),
            pool_tokens=line.pool_tokens,
            tier_tokens=round(line.tier_tokens),
            pinned_tokens=_taken(pinned, line.tenant),
            retained_tokens=_taken(retained, line.tenant),
        )
        for line in ledger.report()
    ]
    return UsageResponse(model=model, since=since, until=time.time(), tenants=rows)


def _taken(tokens: dict[str, int], tenant: str | None) -> int:
    """Take the tokens of a tenant out of ``tokens``; for None, the last line, all that are left."""
    return sum(tokens.values()) if tenant is None else tokens.pop(tenant, 0)
