"""A listening server of its own, and its orderly end."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn

from kvkeep.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from starlette.applications import Starlette

__all__ = ["Server", "bind", "serve"]

_DRAIN_S = 30


class Server(uvicorn.Server):
    """uvicorn, whose end is no error: running requests have half a minute, then it returns."""

    def __init__(self, app: Starlette, url: str, ready: Callable[[str], None] | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,  # the instance's own is passed on
                proxy_headers=False,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        self._url = url
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready(self._url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the end, the second hurries it."""
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(
    app: Starlette, bound: socket.socket, *, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until a signal; ``ready`` is called with the address."""
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    asyncio.run(Server(app, url, ready).serve([bound]))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` (0: a free one); `InvalidValue` if that cannot be."""
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InvalidValue(f"there is no {host!r} port {port} here: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise InvalidValue(f"cannot listen on {host} port {port}: {error}") from error
    return bound
