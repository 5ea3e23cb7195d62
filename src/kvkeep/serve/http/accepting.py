"""`Acceptor`: accepts connections on a listening socket, up to the limit."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.serve.http.connections import Phase

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvkeep.serve.http.connections import Connections, GuardedProtocol

__all__ = ["BACKLOG", "Acceptor"]

BACKLOG = 2048
"""Connections that the kernel queues until they are accepted."""
_BATCH = 16
"""Connections accepted per turn of the event loop. Fewer than the files in reserve: a displaced
connection is closed only a moment later."""
_PAUSE_S = 0.1
_NO_CONNECTION = (
    b'{"error": {"message": "all connections are in use; try again later", '
    b'"type": "server_error", "param": null, "code": "no_connection"}}'
)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_NO_CONNECTION), _NO_CONNECTION)
)


class Acceptor:
    """Accepts connections on a listening socket and makes a ``protocol`` for each.

    asyncio's own loop accepts a whole backlog at once and, when the process has no file left,
    logs a traceback per connection every second. This one makes room first, then pauses.

    Thread safety: none; for the event loop.
    """

    def __init__(
        self,
        bound: socket.socket,
        connections: Connections,
        protocol: Callable[[], GuardedProtocol],
    ) -> None:
        self._bound = bound
        self._connections = connections
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to accept; the socket listens already."""
        self._bound.setblocking(False)
        self._loop.add_reader(self._bound.fileno(), self._accept)

    async def close(self) -> None:
        """Stop accepting and wait for connections that are still being opened.

        A connection that opened later would be in no list, and never be closed. The socket itself
        stays open.
        """
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._bound.fileno())
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if self._connections.settling:
                return  # do not displace a connection whose head may have arrived but is unread
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the process has no file left, or the system no memory
                self._connections.accept_failed(error)
                for _ in range(_BATCH):
                    self._connections.make_room()
                self._pause()
                return
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if self._connections.full and not self._connections.make_room():
            self._connections.count("refused")
            with suppress(OSError):
                accepted.send(_FULL)
            accepted.close()
            return
        protocol = self._protocol()
        self._connections.add(protocol)
        task = self._loop.create_task(self._open(accepted, protocol))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, protocol: GuardedProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted)
        except OSError:  # the client has closed it already
            self._connections.forget(protocol, Phase.HEAD)
            accepted.close()

    def _pause(self) -> None:
        self._loop.remove_reader(self._bound.fileno())
        self._paused = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._bound.fileno(), self._accept)
