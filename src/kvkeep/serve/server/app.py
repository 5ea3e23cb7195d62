"""`create_app`: the application around one engine; `Listener` runs it until a signal."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import BodyGuard, GuardedServer
from kvkeep.serve.server import errors
from kvkeep.serve.server.guards import AccessLog, HostGuard, KeyGuard
from kvkeep.serve.server.routes import ROUTERS
from kvkeep.serve.server.service import Service

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from types import FrameType

    from kvkeep.bench.traces import Capture
    from kvkeep.observe.usage import RequestObserver
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.http import ConnectionLimits
    from kvkeep.serve.server.settings import ServerSettings

__all__ = ["Listener", "create_app"]

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


# Seconds to send the last bytes once all requests have ended or been aborted.
_LAST_WRITES_S = 3


class Listener(GuardedServer):
    """A server that drains on shutdown: running requests finish, new ones are refused with 503.

    ``limits`` are by default those of `ConnectionLimits`, with as many connections as the limit on
    open files allows. The first SIGTERM or SIGINT, or `stop`, begins the drain; the second aborts
    the remaining requests.
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits | None = None,
        *,
        ready: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(app, limits, ready=ready, timeout_graceful_shutdown=_LAST_WRITES_S)
        app.state.service.metrics.connections = self.connections
        self._service: Service = app.state.service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stops = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`; in the main thread, also until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def stop(self) -> None:
        """Begin the drain; on the second call, cut it short. Safe from any thread, at any time."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: this server has ended
                self._loop.call_soon_threadsafe(self._stop)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop. uvicorn's own handler would end the process by the signal, not with success."""
        self.stop()

    def _stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            self._service.give_up()  # which ends the drain
        else:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True
