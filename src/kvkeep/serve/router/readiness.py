"""`Readiness`: whether a router can take requests, and the end of its running ones on shutdown."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvkeep.serve.router.health import Health

__all__ = ["Readiness", "ReadinessGuard"]

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
