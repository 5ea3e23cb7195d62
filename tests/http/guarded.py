"""A guarded server around a few lines of ASGI, in a thread, on a port of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from kvkeep.serve.http import (
    BodyBudget,
    BodyGuard,
    BodyRefused,
    ConnectionLimits,
    GuardedServer,
    bind,
)
from kvkeep.serve.http import body_of as body

if TYPE_CHECKING:
    from collections.abc import Iterator

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 4 << 20


def eventually(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.005)


class Guarded:
    """``/health``; ``/large``: 4 MiB; ``/wait`` for `release`; all else answers the body's size."""

    def __init__(self, limits: ConnectionLimits, bodies: BodyBudget) -> None:
        self.bodies = bodies
        self.release = threading.Event()
        self._socket = bind("127.0.0.1", 0)
        self.address = self._socket.getsockname()
        self._server = GuardedServer(BodyGuard(self._answer, bodies), limits)
        self.connections = self._server.connections
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        eventually(lambda: self._server.started)
        self._mine: list[socket.socket] = []

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve([self._socket])

    async def _answer(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        status, said, headers = 200, b"ok", {}
        if scope["path"] == "/large":
            said = b"x" * LARGE
        elif scope["path"] == "/wait":
            while not self.release.is_set():
                await asyncio.sleep(0.005)
        elif scope["path"] != "/health":
            try:
                await body(scope).read()
                said = b"%d" % len(body(scope).take())
                while scope["path"] == "/hold" and not self.release.is_set():
                    await asyncio.sleep(0.005)
            except BodyRefused as refused:
                status, said, headers = refused.status, str(refused).encode(), refused.headers
            except ClientDisconnect:
                return
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        pairs.append((b"content-length", b"%d" % len(said)))
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": said})

    def connect(self, *sent: bytes, window: int | None = None) -> socket.socket:
        """A client that has sent that, and closes with the server."""
        one = socket.socket()
        if window is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        one.settimeout(20)
        one.connect(self.address)
        self._mine.append(one)
        with suppress(ConnectionError):  # refused while it still sends
            for data in sent:
                one.sendall(data)
        return one

    def status(self, path: str = "/health", data: bytes = b"", **headers: str) -> int:
        """What a whole request is answered with."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}"
        one = self.connect(f"{head}Content-Length: {len(data)}\r\n\r\n".encode(), data)
        return int(everything(one).split(b" ", 2)[1])

    def pause(self, seconds: float) -> None:
        """Keep the event loop busy: what comes meanwhile is accepted at once."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def stop(self) -> None:
        self.release.set()
        for one in self._mine:
            one.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert len(self.connections) == 0, "a connection was never forgotten"
        assert self.bodies.held == 0, "a body was never given back"


@contextmanager
def guarded(bodies: BodyBudget | None = None, **limits: Any) -> Iterator[Guarded]:
    """A server with these limits."""
    server = Guarded(ConnectionLimits(**limits), bodies or BodyBudget())
    try:
        yield server
    finally:
        server.stop()


def answer(one: socket.socket) -> bytes:
    """One whole answer of a connection that stays open: status, then the body."""
    told = b""
    while b"\r\n\r\n" not in told:
        told += one.recv(1000)
    head, _, said = told.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(said) < size:
        said += one.recv(1000)
    return head.split(b" ", 2)[1] + b" " + said


def everything(one: socket.socket) -> bytes:
    """What comes until the server closes; a reset ends it, too."""
    told = b""
    try:
        while data := one.recv(1 << 16):
            told += data
    except ConnectionResetError:
        pass
    return told


def is_closed(one: socket.socket) -> bool:
    """Whether the server has closed it."""
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        one.settimeout(20)
