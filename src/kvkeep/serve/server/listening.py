"""`Listener`: runs an application until a signal, and drains it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
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
