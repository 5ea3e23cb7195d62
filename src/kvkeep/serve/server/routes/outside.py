"""What is told of an engine that is not kvkeep's: health, counters, metrics; and what cannot be."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute
from kvkeep.serve.server.schemas.kv import HealthResponse, KVStats
from kvkeep.serve.server.status import OutsideSource

__all__ = ["hidden", "router"]

router = APIRouter(tags=["status"], route_class=JSONRoute)
# Says of endpoints of a kvkeep server why they are not here.
hidden = APIRouter(route_class=JSONRoute, include_in_schema=False)


def _source(request: Request) -> OutsideSource:
    source: OutsideSource = request.app.state.service
    return source


SourceOf = Annotated[OutsideSource, Depends(_source)]


@router.get("/health", operation_id="health")
async def health() -> HealthResponse:
    """200 while the engine's process runs. Needs no key."""
    return HealthResponse(status="ok")


@router.get("/kv/stats", responses=READ_ERRORS, operation_id="kv_stats")
async def stats(source: SourceOf) -> KVStats:
    """Counters of the pool, the requests and the tiers."""
    return await asyncio.to_thread(source.stats)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **READ_ERRORS},
    operation_id="metrics",
)
async def metrics(source: SourceOf) -> Response:
    """Metrics in Prometheus' text format."""
    text = await asyncio.to_thread(source.exposition)
    return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_1_0_0})


@hidden.get("/kv/map")
@hidden.get("/kv/map/{rest:path}")
async def no_map(source: SourceOf) -> None:
    """Say that there is no map."""
    message = (
        f"there is no map of cached prefixes here: {source.engine} keeps its pages itself, and "
        "tells kvkeep their requests alone"
    )
    raise ApiError(404, message, code="no_map")


@hidden.post("/kv/explain")
async def no_prompts(source: SourceOf) -> None:
    """Say that only requests are explained."""
    message = (
        f"a prompt that was not sent cannot be explained here: {source.engine} does not tell what "
        "its cache has of it. Give the id of a request; /kv/requests has the last ones"
    )
    raise ApiError(404, message, code="no_prompts")
