"""The prefix tree as a map: looked at, searched, and changed by those who have the key."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.map import Maps
from kvkeep.serve.server.routes.base import ERRORS, READ_ERRORS, JSONRoute, ServiceOf
from kvkeep.serve.server.schemas.map import (
    MapResponse,
    NodeChangeRequest,
    NodeChangeResponse,
    NodeResponse,
    SearchResponse,
)
from kvkeep.serve.server.schemas.responses import ErrorResponse

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

# Readers of JSON know whole numbers to here.
_LARGEST_ID = 2**53 - 1
_MOST_NODES = 5000
_Answers = dict[int | str, dict[str, Any]]
_UNKNOWN: _Answers = {
    404: {"model": ErrorResponse, "description": "There is no such node (any more)."}
}
_CHANGES: _Answers = {
    403: {"model": ErrorResponse, "description": "This server has no API key, so nobody may."},
    **_UNKNOWN,
    409: {"model": ErrorResponse, "description": "All of it is in use."},
}
_NO_TEXT: _Answers = {403: {"model": ErrorResponse, "description": "This server shows no text."}}


class _NodeRoute(JSONRoute):
    """One of the endpoints of a node: what is refused is told what all of them take."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette's own names the methods of one endpoint alone."""
        if scope["method"] not in (self.methods or ()):
            raise HTTPException(405, headers={"Allow": "GET, POST"})
        await super().handle(scope, receive, send)


_nodes = APIRouter(route_class=_NodeRoute)


def _maps(request: Request, service: ServiceOf) -> Maps:
    state = request.app.state
    if not hasattr(state, "maps"):
        state.maps = Maps(service)
    maps: Maps = state.maps
    return maps


MapsOf = Annotated[Maps, Depends(_maps)]
NodeId = Annotated[int, Path(ge=-_LARGEST_ID, le=_LARGEST_ID, description="As in /kv/map.")]
Salt = Annotated[
    str | None, Query(max_length=256, description="A cache_salt; default: all namespaces.")
]


@router.get(
    "/map", response_model=MapResponse, responses={**READ_ERRORS, **_UNKNOWN}, operation_id="kv_map"
)
async def show(
    maps: MapsOf,
    namespace: Salt = None,
    root: Annotated[
        int | None,
        Query(ge=-_LARGEST_ID, le=_LARGEST_ID, description="Only this node and what follows it."),
    ] = None,
    nodes: Annotated[int, Query(ge=1, le=_MOST_NODES, description="Shown one by one.")] = 400,
    tiers: Annotated[
        bool, Query(description="Say which tiers have what is shown as well.")
    ] = False,
) -> Response:
    """What is cached, for a picture. It is made anew every second, or less often if it is large."""
    data = await asyncio.to_thread(maps.map, namespace, root, nodes, tiers=tiers)
    return Response(data, media_type="application/json")


@_nodes.get("/map/{id}", responses={**READ_ERRORS, **_UNKNOWN}, operation_id="kv_node")
async def node(id: NodeId, maps: MapsOf) -> NodeResponse:
    """One node of the map."""
    return await asyncio.to_thread(maps.node, id)


@_nodes.post("/map/{id}", responses={**ERRORS, **_CHANGES}, operation_id="kv_change_node")
async def change(
    id: NodeId, asked: NodeChangeRequest, maps: MapsOf, service: ServiceOf
) -> NodeChangeResponse:
    """Pin, unpin or evict a node: on servers with an API key alone."""
    if service.settings.api_key is None:
        message = "this server lets nobody pin or evict; start it with --api-key-file"
        raise ApiError(403, message, code="no_api_key")
    return NodeChangeResponse(pages=await asyncio.to_thread(maps.change, id, asked))


@router.get("/search", responses={**READ_ERRORS, **_NO_TEXT}, operation_id="kv_search")
async def search(
    maps: MapsOf,
    service: ServiceOf,
    q: Annotated[
        str | None, Query(min_length=1, max_length=256, description="A text, to the letter.")
    ] = None,
    tokens: Annotated[
        str | None,
        Query(max_length=2048, pattern=r"^[0-9]{1,10}(,[0-9]{1,10})*$", description="Ids: 1,2,3"),
    ] = None,
    namespace: Salt = None,
) -> SearchResponse:
    """Where a text, or a row of tokens, stands in what is cached; give one of the two.

    A text is found where it is tokenized as it is by itself, after a space or on a new line.
    """
    if (q is None) == (tokens is None):
        raise ApiError(400, "q or tokens is needed, one of the two", param="q")
    if tokens is not None:
        ids = [int(one) for one in tokens.split(",")]
        return await asyncio.to_thread(maps.find_tokens, ids, namespace)
    assert q is not None
    if not service.settings.text:
        # Who may guess on and on would read it all.
        message = "this server shows no text, and seeks none; it was started with --no-text"
        raise ApiError(403, message, param="q", code="text_off")
    return await asyncio.to_thread(maps.find_text, q, namespace)


router.include_router(_nodes)
