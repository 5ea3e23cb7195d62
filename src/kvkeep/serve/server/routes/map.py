"""The prefix tree as a map."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from kvkeep.serve.server import tree
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
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **READ_ERRORS,
        **_UNKNOWN,
    },
    operation_id="kv_map",
)
async def show(
    maps: MapsOf,
    service: ServiceOf,
    *,
    namespace: SaltQuery = None,
    root: Annotated[
        int | None,
        Query(ge=-_LARGEST_ID, le=_LARGEST_ID, description="Only this node and what follows it."),
    ] = None,
    nodes: Annotated[int, Query(ge=1, le=_MOST_NODES, description="Shown one by one.")] = 400,
    tiers: Annotated[bool, Query(description="Add which tiers have each node.")] = False,
    format: Annotated[Literal["json", "text"], Query(description="text: a drawing.")] = "json",
    depth: Annotated[int, Query(ge=1, le=32, description="Drawn: runs below each other.")] = 8,
    branches: Annotated[int, Query(ge=1, le=256, description="Drawn: branches per run.")] = 12,
) -> Response:
    """A map of the cached prefixes: which prompts share which pages, and how prompts begin.

    As JSON it is made anew every second; less often if it is large. A drawing shows whole
    namespaces, so ``root``, ``nodes`` and ``tiers`` do not apply to it.
    """
    if format == "text":
        spaces = tree.spaces(service, namespace)
        return PlainTextResponse(
            await asyncio.to_thread(tree.drawn, service, spaces, depth, branches)
        )
    data = await asyncio.to_thread(maps.map, namespace, root, nodes, tiers=tiers)
    return Response(data, media_type="application/json")


@router.get("/map/{id}", responses={**READ_ERRORS, **_UNKNOWN}, operation_id="kv_node")
async def node(id: NodeId, maps: MapsOf) -> NodeResponse:
    """One node of the map."""
    return await asyncio.to_thread(maps.node, id)
