"""``/kv/cost``: what computing and moving KV take here, and what was decided by it."""

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute, ServiceOf
from kvkeep.serve.server.schemas.cost import CostResponse

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)


@router.get("/cost", response_model=CostResponse, responses=READ_ERRORS, operation_id="kv_cost")
async def cost(service: ServiceOf) -> Response:
    """What prompts and tiers take, and how many tokens were loaded and computed because of that."""
    found = await asyncio.to_thread(service.costs.as_dict)
    text = CostResponse.of(found).model_dump_json(exclude_none=True)
    return Response(text, media_type="application/json")
