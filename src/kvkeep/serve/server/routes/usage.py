"""``/kv/usage``: what each tenant read, computed and kept."""

import asyncio
import time
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvkeep.observe.usage.sheet import as_csv, wants_csv
from kvkeep.observe.usage.shortened import TenantOrder, shortened
from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute, ServiceOf
from kvkeep.serve.server.schemas.usage import TenantRow, UsageResponse
from kvkeep.serve.server.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

_CSV = {"text/csv": {"schema": {"type": "string"}}}
_CSV_TYPE = "text/csv; charset=utf-8"


@router.get(
    "/usage",
    response_model=UsageResponse,
    responses={200: {"content": _CSV}, **READ_ERRORS},
    operation_id="kv_usage",
)
async def usage(
    request: Request,
    service: ServiceOf,
    *,
    format: Annotated[
        Literal["json", "csv"] | None,
        Query(description="Default: csv if the header Accept is text/csv, else json."),
    ] = None,
    order: Annotated[TenantOrder, Query(description="Those with the most first.")] = (
        "prompt_tokens"
    ),
    search: Annotated[
        str, Query(max_length=256, description="Rows of tenants whose cache_salt contains it.")
    ] = "",
    most: Annotated[
        int | None, Query(ge=1, description="At most so many rows; the others are in the last.")
    ] = None,
) -> Response:
    """What each tenant used since the start of the server, and what it keeps now."""
    answer = await asyncio.to_thread(_usage, service, order, search, most)
    if wants_csv(format, request.headers.get("accept", "")):
        return Response(as_csv(_cells(answer)), headers={"content-type": _CSV_TYPE})
    return Response(answer.model_dump_json(), media_type="application/json")


def _usage(service: Service, order: TenantOrder, search: str, most: int | None) -> UsageResponse:
    meter = service.watching.tenants
    meter.sample()
    pinned = service.retention.tokens_of()
    tiers = service.tier_retention
    retained = {} if tiers is None else tiers.tokens_of()
    lines, count = shortened(meter.ledger.report(), order=order, search=search, most=most)
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
    return UsageResponse(
        model=service.settings.name,
        since=meter.since,
        until=time.time(),
        count=count,
        tenants=rows,
    )


def _taken(tokens: dict[str, int], tenant: str | None) -> int:
    """Take the tokens of a tenant out of ``tokens``; for None, the last line, all that are left."""
    return sum(tokens.values()) if tenant is None else tokens.pop(tenant, 0)


def _cells(answer: UsageResponse) -> list[dict[str, object]]:
    """Return the rows of the sheet: each has the model and both times."""
    head = {"model": answer.model, "since": answer.since, "until": answer.until}
    rows = []
    for row in answer.tenants:
        others = {"others": row.cache_salt is None}
        rows.append({**head, **others, **row.model_dump()})
    return rows
