"""The prefix tree as a map."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from kvkeep.serve.server.map import Maps
from kvkeep.serve.server.routes.base import (
    READ_ERRORS,
    Errors,
    JSONRoute,
    SaltQuery,
    ServiceOf,
)  # fmt: skip
from kvkeep.serve.server.schemas.map import (
    MapResponse,
    NodeResponse,
)
from kvkeep.serve.server.schemas.responses import ErrorResponse

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

# The largest integer that every JSON parser reads exactly.
_LARGEST_ID = 2**53 - 1
_MOST_NODES = 5000
_UNKNOWN: Errors = {404: {"model": ErrorResponse, "description": "No such node, or no longer."}}


def _maps(request: Request, service: ServiceOf) -> Maps:
    state = request.app.state
    if not hasattr(state, "maps"):
        state.maps = Maps(service)
    maps: Maps = state.maps
    return maps


MapsOf = Annotated[Maps, Depends(_maps)]
NodeId = Annotated[int, Path(ge=-_LARGEST_ID, le=_LARGEST_ID, description="As in /kv/map.")]


@router.get(
    "/map",
    response_model=MapResponse,
    responses={**READ_ERRORS, **_UNKNOWN},
    operation_id="kv_map",
)
async def show(
    maps: MapsOf,
    *,
    namespace: SaltQuery = None,
    root: Annotated[
        int | None,
        Query(ge=-_LARGEST_ID, le=_LARGEST_ID, description="Only this node and what follows it."),
    ] = None,
    nodes: Annotated[int, Query(ge=1, le=_MOST_NODES, description="Shown one by one.")] = 400,
) -> Response:
    """A map of the cached prefixes: which prompts share which pages, and how prompts begin.

    It is made at each call.
    """
    data = await asyncio.to_thread(maps.map, namespace, root, nodes)
    return Response(data, media_type="application/json")


@router.get("/map/{id}", responses={**READ_ERRORS, **_UNKNOWN}, operation_id="kv_node")
async def node(id: NodeId, maps: MapsOf) -> NodeResponse:
    """One node of the map."""
    return await asyncio.to_thread(maps.node, id)
