"""Runs the router's HTTP server until a signal; `Readiness`: whether it can take requests."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from kvkeep.serve.http import GuardedServer, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvkeep.serve.http import ConnectionLimits
    from kvkeep.serve.router.health import Health

__all__ = ["Readiness", "ReadinessGuard", "Server", "serve"]


# Answered during a shutdown, too, and not waited for.
_WATCHED = frozenset({"/health", "/metrics"})


class Readiness:
    """Whether this router accepts requests, and how many it is answering.

    Thread safety: none; for the event loop. Cost: `reason` looks at each instance until one is up.
    """

    def __init__(self, health: Health) -> None:
        self.draining = False
        """Whether requests are refused because the router shuts down."""
        self._health = health
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def reason(self) -> str | None:
        """Return why no request is accepted or can be answered now; None: one can."""
        if self.draining:
            return "this router is shutting down"
        if not self._health.any_up():
            return "no instance is up"
        return None

    async def drain(self, seconds: float) -> None:
        """Refuse requests from now on; wait up to ``seconds`` until the running ones have ended."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass

    def begin(self) -> None:
        """Count a request until `end`."""
        self._running += 1
        self._idle.clear()

    def end(self) -> None:
        """Count the end of a request."""
        self._running -= 1
        if not self._running:
            self._idle.set()


class ReadinessGuard:
    """Answers ``/livez`` and ``/ready``, and while the router shuts down all requests, with 503.

    Probes are answered under any Host name: an orchestrator names the router by its address.
    """

    def __init__(self, app: ASGIApp, readiness: Readiness) -> None:
        self._app = app
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        path = scope["path"] if scope["type"] == "http" else None
        if path is None or path in _WATCHED:
            await self._app(scope, receive, send)
        elif path == "/livez":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif path == "/ready":
            reason = self._readiness.reason()
            answer = JSONResponse({"status": "ok"}) if reason is None else _refusal(reason)
            await answer(scope, receive, send)
        elif self._readiness.draining:
            answer = _refusal("this router is shutting down")
            # Another router may be behind the same address; a kept connection leads to this one.
            answer.headers.update({"retry-after": "1", "connection": "close"})
            await answer(scope, receive, send)
        else:
            self._readiness.begin()
            try:
                await self._app(scope, receive, send)
            finally:
                self._readiness.end()


def _refusal(message: str) -> Response:
    error = {"message": message, "type": "server_error", "code": 503}
    return JSONResponse({"error": error}, 503)


_LAST_WRITES_S = 3  # once all requests have ended, or had their time


class Server(GuardedServer):
    """The router's HTTP server. On a signal, running requests have ``drain_s`` seconds to finish.

    Meanwhile ``/ready`` and new requests get 503. A second signal ends it at once. ``limits`` apply
    to client connections; each may need a second one, to an instance.
    """

    def __init__(
        self,
        app: Starlette,
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
        app.state.metrics.connections = self.connections
        self._readiness: Readiness = app.state.readiness
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
        await self._readiness.drain(self._drain_s)
        self.should_exit = True


def serve(
    app: Starlette,
    bound: socket.socket,
    *,
    limits: ConnectionLimits | None = None,
    ready: Callable[[str], None] | None = None,
    drain_s: float = 30.0,
) -> None:
    """Serve until a signal; call ``ready`` with the URL once the server listens.

    See `Server` for ``limits`` and ``drain_s``.
    """
    url = url_of(bound)
    announce = None if ready is None else partial(ready, url)
    server = Server(app, limits, ready=announce, drain_s=drain_s)
    asyncio.run(server.serve([bound]))
