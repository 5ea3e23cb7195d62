"""``/health``, ``/livez``, ``/ready`` and ``/metrics``."""

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute, ServiceOf, errors
from kvkeep.serve.server.schemas.kv import HealthResponse

__all__ = ["router"]

router = APIRouter(tags=["operations"], route_class=JSONRoute)


@router.get("/health", responses=errors(503), operation_id="health")
async def health(service: ServiceOf) -> HealthResponse:
    """200 while requests are accepted, else 503. Needs no API key."""
    service.refuse_if_closed()
    return HealthResponse(status="ok")


@router.get("/livez", responses=errors(503), operation_id="livez")
async def livez(service: ServiceOf) -> HealthResponse:
    """200 while the engine's thread runs, else 503: restart the process. Needs no API key.

    503 also if a step of the engine takes longer than five minutes.
    """
    service.refuse_if_stuck()
    return HealthResponse(status="ok")


@router.get("/ready", responses=errors(503), operation_id="ready")
async def ready(service: ServiceOf) -> HealthResponse:
    """200 while requests are accepted, else 503 with the reason. Needs no API key.

    503 while the server shuts down and its running requests end. A full queue does not count.
    """
    service.refuse_if_closed()
    service.refuse_if_stuck()
    return HealthResponse(status="ok")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **READ_ERRORS},
    operation_id="metrics",
)
async def metrics(service: ServiceOf) -> Response:
    """Metrics in Prometheus' text format."""
    cache, engine = await service.stats()
    store = await service.store_stats()
    # In a thread: the explainer first handles the events in its queue.
    tell = partial(service.metrics.exposition, cache, engine, store)
    text = await asyncio.to_thread(tell)
    return Response(text, headers={"content-type": service.metrics.content_type})
