"""From an application to a listening server, and to its orderly end."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn

from kvkeep.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from fastapi import FastAPI

    from kvkeep.server.service import Service

__all__ = ["Listener", "bind", "url_of"]

# What is left to do once all requests are through, or were told that it is over: write it out.
_LAST_WRITES_S = 3


class Listener(uvicorn.Server):
    """uvicorn, whose end is a drain: running requests finish, new ones are refused with 503.

    The first SIGTERM or SIGINT begins it, a second one gives up what still runs; elsewhere than in
    the main thread, `stop` does the same.
    """

    def __init__(self, app: FastAPI, *, ready: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # ours is shorter, and has no query
            server_header=False,
            proxy_headers=False,  # nothing here asks who the client is
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_LAST_WRITES_S,
        )
        super().__init__(config)
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


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` (0: a free one); `InvalidValue` if that cannot be."""
    if not 0 <= port <= 65_535:
        raise InvalidValue(f"a port lies in 0 … 65535, got {port}")
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"there is no host {host!r} here: {error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        why = error.strerror or str(error)
        raise InvalidValue(
            f"cannot listen on {host} port {port}: {why}; choose another with --port"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The address as a client writes it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - any address: ours
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
