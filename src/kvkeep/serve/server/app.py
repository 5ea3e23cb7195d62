"""`create_app`: the application around one engine."""

from __future__ import annotations

from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import BodyGuard
from kvkeep.serve.server import errors
from kvkeep.serve.server.guards import AccessLog, HostGuard, KeyGuard
from kvkeep.serve.server.routes import ROUTERS
from kvkeep.serve.server.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from kvkeep.bench.traces import Capture
    from kvkeep.observe.usage import RequestObserver
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.server.settings import ServerSettings

__all__ = ["create_app"]

_DESCRIPTION = (
    "An OpenAI-compatible server on kvkeep's paged KV cache. Fields and endpoints that OpenAI does "
    "not have are marked as ours."
)


def create_app(
    engine: Engine,
    settings: ServerSettings,
    *,
    capture: Capture | None = None,
    observers: Sequence[RequestObserver] = (),
    events: Callable[[], Mapping[str, int]] | None = None,
) -> FastAPI:
    """Return an ASGI application that serves ``engine``; its lifespan runs the engine's thread.

    Only the application may use the engine from then on. ``app.state.service`` is its `Service`.
    ``capture`` records the requests, ``observers`` get their events; the caller closes both.
    ``events`` returns the counters of a publisher of KV events, for /metrics.
    Raises `InvalidValue` for an engine without a tokenizer.
    """
    if engine.tokenizer is None:
        raise InvalidValue("a server needs an engine with a tokenizer; give the engine one")
    service = Service(engine, settings, capture, observers)
    service.metrics.events = events

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    # `KeyGuard` checks the key, before any body is read; this only documents it in OpenAPI.
    documented = [Depends(HTTPBearer(auto_error=False))] if settings.api_key is not None else []
    app = FastAPI(
        title="kvkeep",
        version=version("kvkeep"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        dependencies=documented,
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    # The middleware added last runs first.
    app.add_middleware(BodyGuard, bodies=service.bodies)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, key=settings.api_key)
    app.add_middleware(HostGuard, hosts=settings.hosts)
    app.add_middleware(AccessLog)
    return app
