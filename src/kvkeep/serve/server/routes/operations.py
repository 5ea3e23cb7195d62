"""For those who watch over the process: is it well, and how much does it do."""

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
    """200 while requests are taken; 503 when they no longer are. Needs no API key."""
    service.refuse_if_closed()
    return HealthResponse(status="ok")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **READ_ERRORS},
    operation_id="metrics",
)
async def metrics(service: ServiceOf) -> Response:
    """Prometheus' text format."""
    cache, engine = await service.stats()
    pages = await asyncio.to_thread(_pages, service)
    store = await service.store_stats()
    # In a thread: an explainer first works off what it has been told.
    tell = partial(service.metrics.exposition, cache, engine, store, namespaces=pages)
    text = await asyncio.to_thread(tell)
    return Response(text, headers={"content-type": service.metrics.content_type})


def _pages(service: Service) -> dict[str, int]:
    """Cached pages by tenant. Who asks is told from now on when pages come and go, too."""
    service.metrics.watch(service.engine.cache)
    pages: dict[str, int] = {}
    for space, count in service.engine.cache.namespaces().items():
        pages[space.tenant] = pages.get(space.tenant, 0) + count
    return pages
