"""From an application to a listening server, and to its orderly end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvkeep.serve.http import GuardedServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from fastapi import FastAPI

    from kvkeep.serve.http import ConnectionLimits
    from kvkeep.serve.server.service import Service

__all__ = ["Listener"]

# What is left to do once all requests are through, or were told that it is over: write it out.
_LAST_WRITES_S = 3


class Listener(GuardedServer):
    """A guarded server, whose end is a drain: running requests finish, new ones are refused (503).

    ``limits`` are about its connections; by default as many as the limit on open files leaves room
    for. The first SIGTERM or SIGINT begins the drain, a second one gives up what still runs;
    elsewhere than in the main thread, `stop` does the same.
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits | None = None,
        *,
        ready: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(app, limits, timeout_graceful_shutdown=_LAST_WRITES_S)
        app.state.service.metrics.connections = self.connections
        self._service: Service = app.state.service
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stops = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, or a signal where this is the main thread."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()

    def stop(self) -> None:
        """Begin the drain; the second time, cut it short. Safe from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn's own would end by it; an orderly end is a success."""
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
