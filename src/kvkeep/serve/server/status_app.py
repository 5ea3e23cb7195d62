"""`create_status_app`, `StatusServer`: the status of a cache that is inside another engine."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from fastapi import FastAPI

from kvkeep.serve.http import BodyBudget, BodyGuard, ConnectionLimits, GuardedServer
from kvkeep.serve.server import errors
from kvkeep.serve.server.guards import AccessLog, HostGuard, KeyGuard
from kvkeep.serve.server.routes import outside, see, ui

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from kvkeep.serve.server.status import OutsideSource

__all__ = ["StatusServer", "create_status_app"]

_LOG = logging.getLogger("kvkeep.server")
_CONNECTIONS: Final = 64
_LARGEST_BODY: Final = 64 << 10  # nothing here reads a body
_LAST_WRITES_S: Final = 1
_END_S: Final = 5.0
_ROUTERS: Final = (
    see.router, outside.router, outside.hidden, ui.router,
)  # fmt: skip


def create_status_app(
    source: OutsideSource, *, key: str | None = None, hosts: frozenset[str] | None = None
) -> FastAPI:
    """Return an ASGI application that tells of ``source``; its lifespan closes the source.

    It changes nothing, and has no text of prompts unless the source gives it. With ``key``, it is
    required of every request but /health and the dashboard's files. ``hosts`` are the accepted
    names in the Host header (None: all).
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            source.close()

    app = FastAPI(
        title="kvkeep", version=version("kvkeep"), lifespan=lifespan, docs_url=None,
        redoc_url=None, redirect_slashes=False,
        description=f"The cache that kvkeep keeps for {source.engine}. Nothing here changes it.",
    )  # fmt: skip
    app.state.service = source
    errors.install(app)
    for router in _ROUTERS:
        app.include_router(router)
    # The middleware added last runs first.
    bodies = BodyBudget(largest=_LARGEST_BODY, budget=1 << 20, seconds=10.0)
    app.add_middleware(BodyGuard, bodies=bodies)
    if key is not None:
        app.add_middleware(KeyGuard, key=key)
    app.add_middleware(HostGuard, hosts=hosts, remedy="use its address")
    app.add_middleware(AccessLog)
    return app


class StatusServer:
    """Serves an application in a thread of its own, which ends with `close`.

    ``make`` returns the application, and is called in that thread. ``bound`` is a socket from
    `kvkeep.serve.http.bind`, which is closed at the end. What fails in the thread is logged and
    ends it, and nothing else.

    Thread safety: `close` may be called from any thread, several times.
    """

    def __init__(self, make: Callable[[], FastAPI], bound: socket.socket) -> None:
        self._make = make
        self._bound = bound
        self._lock = threading.Lock()
        self._server: GuardedServer | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvkeep status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            server = GuardedServer(
                self._make(),
                ConnectionLimits(most=_CONNECTIONS),
                timeout_graceful_shutdown=_LAST_WRITES_S,
            )
            with self._lock:
                if self._closed:
                    return
                self._server = server
            asyncio.run(server.serve([self._bound]))
        except Exception:  # noqa: BLE001 - the engine must go on, and the log says why
            _LOG.exception("the status cannot be served; the engine goes on without")
        finally:
            self._bound.close()

    def close(self) -> None:
        """End the server: running answers have a second. Waits for the thread, 5 s at most."""
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.should_exit = True
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
