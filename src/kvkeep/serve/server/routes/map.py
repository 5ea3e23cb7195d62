"""The prefix tree as a map."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from kvkeep.core.cache import MapNode
from kvkeep.core.errors import NotCached
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.routes.base import READ_ERRORS, Errors, JSONRoute, SaltQuery, ServiceOf
from kvkeep.serve.server.schemas.kv import MapResponse, NodeResponse, NodeSummary
from kvkeep.serve.server.schemas.responses import ErrorResponse
from kvkeep.serve.server.service import Service
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from kvkeep.core.tokens import TokenArray

__all__ = ["router"]

# The most characters, tokens and page ids that are shown.
_PREVIEW = 80
_LONGEST_TEXT, _LONGEST_TEXT_TOKENS = 2000, 4000
_PAGE_IDS = 100
_CHECKPOINTS = 100
_KEPT_TEXTS = 20_000


class Maps:
    """Answers about the tree of one server's cache.

    Decoded texts are cached. Thread safety: all methods.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cache = service.engine.cache
        self._texts: dict[bytes, str] = {}  # by the tokens

    # --- maps --------------------------------------------------------------------------------

    def map(self, salt: str | None, root: int | None, nodes: int) -> bytes:
        """Return the map as JSON; `ApiError` 404 for an unknown ``root``."""
        space = None if salt is None else self._service.namespace(salt)
        try:
            made = self._cache.map(space, root=root, nodes=nodes)
        except NotCached as error:
            raise _unknown(error) from error
        answer = MapResponse(
            page_size=made.page_size,
            at=time.time(),
            total_nodes=made.runs,
            total_pages=made.pages + made.group_pages,
            nodes=[self._node(node) for node in made.nodes],
        )
        return answer.model_dump_json().encode()

    def _node(self, node: MapNode) -> NodeSummary:
        size = self._cache.page_size
        return NodeSummary(
            id=node.id,
            parent=node.parent,
            tokens=node.pages * size,
            pages=node.pages + node.group_pages,
            group_pages=node.group_pages,
            checkpoints=list(node.checkpoints[-_CHECKPOINTS:]),
            subtree_tokens=node.below_pages * size,
            subtree_nodes=node.below_runs,
            references=node.holders,
            pins=node.pins,
            hits=node.hits,
            text=self._beginning(node),
            hidden=node.hidden,
            count=node.count,
        )

    def _beginning(self, node: MapNode) -> str | None:
        if node.namespace is not None:
            return showable(node.namespace.tenant)
        if node.hidden or not self._service.settings.text:
            return None
        if node.head is None:
            return f"key {node.key.hex()}…"
        return self._text(node.head)

    def _text(self, tokens: "TokenArray") -> str:
        key = tokens.tobytes()
        text = self._texts.get(key)
        if text is None:
            text = showable(self._service.tokenizer.decode(tokens.tolist()))[:_PREVIEW]
            if len(self._texts) >= _KEPT_TEXTS:
                self._texts.clear()
            self._texts[key] = text
        return text

    # --- one node ----------------------------------------------------------------------------

    def node(self, number: int) -> NodeResponse:
        """Return everything known about one node; `ApiError` 404 if it is not cached."""
        try:
            view = self._cache.node(number)
        except NotCached as error:
            raise _unknown(error) from error
        shown = self._node(view.node).model_dump()
        if shown["text"] is not None and view.tokens is not None and number > 0:
            tokens = view.tokens[:_LONGEST_TEXT_TOKENS].tolist()
            shown["text"] = showable(self._service.tokenizer.decode(tokens))[:_LONGEST_TEXT]
        return NodeResponse(
            **shown,
            namespace=showable(view.namespace.tenant),
            path_tokens=view.start * self._cache.page_size,
            page_ids=view.page_ids[:_PAGE_IDS].tolist(),
            policy=view.state,
            children=view.children,
        )


def _unknown(error: NotCached) -> ApiError:
    return ApiError(404, str(error), param="id", code="unknown_node")


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
