"""``/kv/usage``: what each tenant read, computed and keeps."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from kvkeep.observe.usage.shortened import TenantOrder
from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute, StatusOf
from kvkeep.serve.server.schemas.usage import UsageResponse
from kvkeep.serve.server.tenant_usage import UsagePart

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)


@router.get("/usage", responses=READ_ERRORS, operation_id="kv_usage")
async def usage(
    service: StatusOf,
    *,
    order: Annotated[TenantOrder, Query(description="Those with the most first.")] = (
        "prompt_tokens"
    ),
    search: Annotated[
        str, Query(max_length=256, description="Rows of tenants whose cache_salt contains it.")
    ] = "",
    most: Annotated[
        int | None, Query(ge=1, description="At most so many rows; the others are in the last.")
    ] = None,
) -> UsageResponse:
    """What each tenant used since the start of the server, and what it keeps now."""
    return await asyncio.to_thread(service.usage, UsagePart(order, search, most))
