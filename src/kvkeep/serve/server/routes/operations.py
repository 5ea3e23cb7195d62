"""``/health`` and ``/metrics``."""

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from kvkeep.serve.server.routes.base import READ_ERRORS, JSONRoute, ServiceOf, errors
from kvkeep.serve.server.schemas.kv import HealthResponse
from kvkeep.serve.server.service import Service

__all__ = ["router"]

router = APIRouter(tags=["operations"], route_class=JSONRoute)


@router.get("/health", responses=errors(503), operation_id="health")
async def health(service: ServiceOf) -> HealthResponse:
    """200 while requests are accepted, else 503. Needs no API key."""
    service.refuse_if_closed()
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
    pages = await asyncio.to_thread(_pages, service)
    store = await service.store_stats()
    # In a thread: an explainer first processes the events queued for it.
    tell = partial(service.metrics.exposition, cache, engine, store, namespaces=pages)
    text = await asyncio.to_thread(tell)
    return Response(text, headers={"content-type": service.metrics.content_type})


def _pages(service: Service) -> dict[str, int]:
    """Return cached pages by tenant; from the first call on, the cache's events are counted."""
    service.metrics.watch(service.engine.cache)
    pages: dict[str, int] = {}
    for space, count in service.engine.cache.namespaces().items():
        pages[space.tenant] = pages.get(space.tenant, 0) + count
    return pages
