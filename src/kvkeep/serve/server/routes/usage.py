"""``/kv/usage``: what each tenant read, computed and kept."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvkeep.observe.usage.sheet import as_csv, wants_csv
from kvkeep.observe.usage.shortened import TenantOrder
from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute, StatusOf
from kvkeep.serve.server.schemas.usage import UsageResponse
from kvkeep.serve.server.usage_report import UsagePart

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
    service: StatusOf,
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
    answer = await asyncio.to_thread(service.usage, UsagePart(order, search, most))
    if wants_csv(format, request.headers.get("accept", "")):
        return Response(as_csv(_cells(answer)), headers={"content-type": _CSV_TYPE})
    return Response(answer.model_dump_json(), media_type="application/json")


def _cells(answer: UsageResponse) -> list[dict[str, object]]:
    """Return the rows of the sheet: each has the model and both times."""
    head = {"model": answer.model, "since": answer.since, "until": answer.until}
    rows = []
    for row in answer.tenants:
        others = {"others": row.cache_salt is None}
        rows.append({**head, **others, **row.model_dump()})
    return rows
