"""For those who watch over the process: is it well, and how much does it do."""

from fastapi import APIRouter
from starlette.responses import Response

from kvkeep.server.routes.base import READ_ERRORS, JSONRoute, ServiceOf, errors
from kvkeep.server.schemas.kv import HealthAnswer

__all__ = ["router"]

router = APIRouter(tags=["operations"], route_class=JSONRoute)


@router.get("/health", responses=errors(503), operation_id="health")
async def health(service: ServiceOf) -> HealthAnswer:
    """200 while requests are taken; 503 when they no longer are. Needs no API key."""
    service.refuse_if_closed()
    return HealthAnswer(status="ok")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **READ_ERRORS},
    operation_id="metrics",
)
async def metrics(service: ServiceOf) -> Response:
    """Prometheus' text format."""
    cache, engine = await service.stats()
    text = service.metrics.exposition(cache, engine, await service.store_stats())
    return Response(text, headers={"content-type": service.metrics.content_type})
