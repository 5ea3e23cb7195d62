"""Runs the router's HTTP server until a signal; `RouterApp`: whether it can take requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from kvkeep.serve.http import GuardedServer, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvkeep.serve.http import ConnectionLimits
    from kvkeep.serve.router.health import Health
    from kvkeep.serve.router.metrics import RouterMetrics

__all__ = ["RouterApp", "Server", "serve"]


# Answered during a shutdown, too, and not waited for.
_WATCHED = frozenset({"/health", "/metrics"})
_LAST_WRITES_S = 3  # once all requests have ended, or had their time


class RouterApp:
    """The router's ASGI application: ``app``, which it counts the requests of.

    It answers ``/livez`` and ``/ready`` itself, under any Host name: an orchestrator names the
    router by its address. While the router shuts down, all other requests get 503.

    Thread safety: none; for the event loop.
    """

    def __init__(self, app: ASGIApp, health: Health, metrics: RouterMetrics) -> None:
        self.metrics = metrics
        self._app = app
        self._health = health
        self._draining = False
        self._running = 0
        self._idle = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        path = scope["path"] if scope["type"] == "http" else None
        if path is None or path in _WATCHED:
            await self._app(scope, receive, send)
        elif path == "/livez":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif path == "/ready":
            reason = self._reason()
            answer = JSONResponse({"status": "ok"}) if reason is None else _refusal(reason)
            await answer(scope, receive, send)
        elif self._draining:
            answer = _refusal("this router is shutting down")
            # Another router may be behind the same address; a kept connection leads to this one.
            answer.headers.update({"retry-after": "1", "connection": "close"})
            await answer(scope, receive, send)
        else:
            self._running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

    def _reason(self) -> str | None:
        """Return why no request is accepted or can be answered now; None: one can."""
        if self._draining:
            return "this router is shutting down"
        return None if self._health.any_up() else "no instance is up"

    async def drain(self, seconds: float) -> None:
        """Refuse requests from now on; wait up to ``seconds`` until the running ones have ended."""
        self._draining = True
        self._idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if self._running:
                    await self._idle.wait()


def _refusal(message: str) -> Response:
    error = {"message": message, "type": "server_error", "code": 503}
    return JSONResponse({"error": error}, 503)


class Server(GuardedServer):
    """The router's HTTP server. On a signal, running requests have ``drain_s`` seconds to finish.

    Meanwhile ``/ready`` and new requests get 503. A second signal ends it at once. ``limits`` apply
    to client connections; each may need a second one, to an instance.
    """

    def __init__(
        self,
        app: RouterApp,
        limits: ConnectionLimits | None = None,
        *,
        ready: Callable[[], None] | None = None,
        drain_s: float = 30.0,
    ) -> None:
        super().__init__(
            app,
            limits,
            ready=ready,
            date_header=False,  # the instance's own is forwarded
            timeout_graceful_shutdown=_LAST_WRITES_S,
        )
        app.metrics.connections = self.connections
        self._router = app
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown; on the second signal, exit at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is not None:
            self.force_exit = self.should_exit = True
        else:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._router.drain(self._drain_s)
        self.should_exit = True


def serve(
    app: RouterApp,
    bound: socket.socket,
    *,
    limits: ConnectionLimits | None = None,
    ready: Callable[[str], None] | None = None,
    drain_s: float = 30.0,
) -> None:
    """Serve until a signal; call ``ready`` with the URL once the server listens.

    See `Server` for ``limits`` and ``drain_s``.
    """
    announce = None if ready is None else partial(ready, url_of(bound))
    server = Server(app, limits, ready=announce, drain_s=drain_s)
    asyncio.run(server.serve([bound]))
