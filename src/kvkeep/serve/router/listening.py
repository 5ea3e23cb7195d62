"""Runs the router's HTTP server until a signal."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.serve.http import GuardedServer, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from starlette.applications import Starlette

    from kvkeep.serve.http import ConnectionLimits
    from kvkeep.serve.router.readiness import Readiness

__all__ = ["Server", "serve"]

_DRAIN_S = 30.0
_LAST_WRITES_S = 3  # once all requests have ended, or had their time


class Server(GuardedServer):
    """The router's HTTP server. On a signal, running requests have 30 seconds to finish.

    Meanwhile ``/ready`` and new requests get 503. A second signal ends it at once. ``limits`` apply
    to client connections; each may need a second one, to an instance.
    """

    def __init__(
        self,
        app: Starlette,
        limits: ConnectionLimits | None = None,
        *,
        ready: Callable[[], None] | None = None,
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
        await self._readiness.drain(_DRAIN_S)
        self.should_exit = True


def serve(
    app: Starlette,
    bound: socket.socket,
    *,
    limits: ConnectionLimits | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal; call ``ready`` with the URL once the server listens."""
    url = url_of(bound)
    server = Server(app, limits, ready=None if ready is None else partial(ready, url))
    asyncio.run(server.serve([bound]))
