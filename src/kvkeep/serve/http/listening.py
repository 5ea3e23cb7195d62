"""`GuardedServer`: uvicorn with a connection limit and deadlines; `bind`: sockets to listen on."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from kvkeep.core.errors import InvalidValue, reason
from kvkeep.serve.http.connections import ConnectionLimits, Connections, GuardedProtocol, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

__all__ = ["GuardedServer", "bind", "check_port", "connections_for", "raise_file_limit", "url_of"]


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


_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE_WAIT, LAST_ACK and CLOSING, of Linux's tcp_states.h
_CLOSING: Final = frozenset({"04", "05", "06", "08", "09", "0B"})


class GuardedServer(uvicorn.Server):
    """A uvicorn server for ``app`` that enforces ``limits``; ``options`` go to `uvicorn.Config`.

    By default the limits are those of `ConnectionLimits`, with as many connections as the limit on
    open files allows. Call `serve` with sockets from `bind`; ``ready`` is called once it listens,
    and ends the server if it raises.
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
        if self._ready is None:
            return
        try:
            self._ready()
        except BaseException:
            await self.shutdown()  # uvicorn would leave the application's threads running
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting and wait for running requests."""
        for acceptor in self._acceptors:
            await acceptor.close()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host`` and ``port`` (0: any free port); else `InvalidValue`.

    A port that another process has bound counts as in use before that listens, too: servers bind
    theirs first, and then load a model for minutes.
    """
    check_port(port)
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"cannot resolve the host {host!r}: {reason(error)}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        _bind_alone(bound, address)
    except OSError as error:
        bound.close()
        why = error.strerror or str(error)
        raise InvalidValue(
            f"cannot listen on {host} port {port}: {why}; choose another port with --port"
        ) from error
    return bound


def check_port(port: int) -> None:
    """Raise `InvalidValue` for a number that is no port."""
    if not 0 <= port <= 65_535:
        raise InvalidValue(f"port must be in 0 … 65535, got {port}")


def _bind_alone(bound: socket.socket, address: tuple[Any, ...]) -> None:
    """Bind a socket to an address that no other has, except for closing connections.

    With SO_REUSEADDR from the beginning, Linux binds two sockets to one port as long as neither
    listens, and the first to listen gets all connections. Without it, a server could not start for
    a minute after the last one had ended.
    """
    try:
        bound.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _lingers(address[1]):
            raise
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    # Connections inherit it, so that the next server can bind while they close.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _lingers(port: int) -> bool:
    """Whether connections of an earlier server at ``port`` are closing; True where that is unknown.

    Reads the kernel's table, some milliseconds for 100,000 connections.
    """
    read = False
    for table in _TABLES:
        with suppress(OSError), table.open(encoding="ascii") as lines:
            next(lines, None)  # the heading
            read = True
            for line in lines:
                _, local, _, state, *_ = line.split()
                if state in _CLOSING and int(local.rpartition(":")[2], 16) == port:
                    return True
    return not read


def url_of(bound: socket.socket) -> str:
    """Return the URL at which a client reaches this socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - any includes loopback
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_CONNECTIONS = 1024
_MOST_FILES = 65_536
"""Highest limit to raise to: some libraries allocate memory for each file that may be open."""
_MOST_RESERVE = 256
"""Files kept for tiers, models, logs and threads; under a small limit, a quarter of the limit."""


def file_limit() -> int:
    """Return this process's soft limit on open files; `_MOST_FILES` if it has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one, at most to 65,536, and return it.

    It changes the whole process, so only commands call it, at their start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # some systems cap it elsewhere; keep the present limit
            return soft
    return file_limit()


def connections_for(*, files_each: int = 1) -> int:
    """Return how many connections may be open at once, if each takes ``files_each`` files.

    1,024, or fewer if the limit on open files, less a reserve, does not allow that many.
    """
    limit = file_limit()
    room = max(1, (limit - min(_MOST_RESERVE, limit // 4)) // files_each)
    return min(_CONNECTIONS, room)
