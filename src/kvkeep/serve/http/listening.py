"""`GuardedServer`: uvicorn with a connection limit and deadlines; `bind`: sockets to listen on."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from kvkeep.core.errors import InvalidValue, reason
from kvkeep.serve.http.accepting import BACKLOG, Acceptor
from kvkeep.serve.http.connections import ConnectionLimits, Connections, GuardedProtocol
from kvkeep.serve.http.files import connections_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

__all__ = ["GuardedServer", "bind", "url_of"]


class GuardedServer(uvicorn.Server):
    """A uvicorn server for ``app`` that enforces ``limits``; ``options`` go to `uvicorn.Config`.

    By default the limits are those of `ConnectionLimits`, with as many connections as the limit on
    open files allows. Call `serve` with sockets from `bind`; ``ready`` is called once it listens.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits | None = None,
        *,
        ready: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        limits = limits or ConnectionLimits(most=connections_for())
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # client addresses are not used
                # Longer than GuardedProtocol's own limit, which also checks that the client reads.
                timeout_keep_alive=round(limits.keep_alive_s) + 60,
                **options,
            )
        )
        self.connections = Connections(limits)
        self._ready = ready
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with an accept loop of our own."""
        assert sockets, "a guarded server needs sockets to listen on"
        for bound in sockets:  # before `started` is set: clients may connect as soon as they see it
            bound.listen(BACKLOG)
        await super().startup([])  # runs the application's startup; opens no accept loop
        if not self.started:
            return
        make = partial(
            GuardedProtocol,
            self.connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for bound in sockets:
            acceptor = Acceptor(bound, self.connections, make)
            acceptor.start()
            self._acceptors.append(acceptor)
        if self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting and wait for running requests."""
        for acceptor in self._acceptors:
            await acceptor.close()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host`` and ``port`` (0: any free port); else `InvalidValue`."""
    if not 0 <= port <= 65_535:
        raise InvalidValue(f"port must be in 0 … 65535, got {port}")
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"cannot resolve the host {host!r}: {reason(error)}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        why = error.strerror or str(error)
        raise InvalidValue(
            f"cannot listen on {host} port {port}: {why}; choose another port with --port"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the URL at which a client reaches this socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - any includes loopback
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
