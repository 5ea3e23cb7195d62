"""Servers of a few lines that misbehave as they are told, on real sockets; and the proxy itself."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvkeep.serve.http import bind
from kvkeep.serve.router import PrefixRouter, RoutingCost
from kvkeep.serve.router.health import Timeouts
from kvkeep.serve.router.listening import Server
from kvkeep.serve.router.proxy import create_proxy
from kvkeep.serve.router.upstreams import Upstreams

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNKS = [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]


def eventually(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.005)


class StandIn:
    """An HTTP server that answers in chunks, or does what ``mood`` says.

    "well" · "503" · "429" · "500" · "hangs up" before a head · "head only" then hangs up ·
    "half" an answer · "waits" until the client goes · "stalls" after a head · "stops" in the
    middle · "garbage" · "stopped": nothing, on no path. /health is answered with ``health`` in all
    moods but the last, and not counted as asked.
    """

    def __init__(self, mood: str = "well") -> None:
        self.mood = mood
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.methods: list[str] = []
        self.left = 0
        self.health = "200"
        self.probes = 0
        self.chunks = CHUNKS
        self._serving: set[asyncio.Task[Any]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._woken = asyncio.Event()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()
            # asyncio never closes a connection that was accepted just before its server closed: no
            # new ones, and what was accepted just now becomes a task within some turns.
            self._loop.remove_reader(server.sockets[0].fileno())
            for _ in range(10):
                await asyncio.sleep(0)
        if self._serving:  # until their transports are closed
            await asyncio.wait(self._serving, timeout=20)

    def wake(self) -> None:
        """Whatever waits is answered, and all that comes."""
        self.mood = "well"
        self._loop.call_soon_threadsafe(self._woken.set)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            pairs = [line.split(": ", 1) for line in lines]
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = first.split()
            if path == "/health":
                self.probes += 1
                if self.mood == "stopped":
                    await reader.read(1)
                else:
                    head = f"HTTP/1.1 {self.health} X\r\nconnection: close\r\ncontent-length: 0"
                    writer.write(head.encode() + b"\r\n\r\n")
                return
            self.asked.append((path, headers, body))
            self.methods.append(method)
            await self._answer(path, body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._serving.discard(task)

    async def _answer(self, path, body, reader, writer) -> None:
        def head(status: str, more: str = "") -> bytes:
            return f"HTTP/1.1 {status}\r\nconnection: close\r\n{more}\r\n".encode()

        if path == "/tokenize":
            answer = json.dumps({"tokens": list(json.loads(body)["prompt"].encode())}).encode()
            writer.write(head("200 OK", f"content-length: {len(answer)}\r\n") + answer)
        elif self.mood == "well":
            kind = "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-mine: 1\r\n"
            writer.write(head("200 OK", kind))
            for chunk in self.chunks:
                writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        elif self.mood.isdecimal():
            answer = b'{"error": {"message": "no"}}'
            writer.write(head(f"{self.mood} No", f"content-length: {len(answer)}\r\n") + answer)
        elif self.mood == "head only":
            writer.write(head("200 OK", "transfer-encoding: chunked\r\n"))
        elif self.mood == "half":
            writer.write(head("200 OK", "transfer-encoding: chunked\r\n"))
            writer.write(b"%x\r\n%s\r\n" % (len(CHUNKS[0]), CHUNKS[0]))
        elif self.mood in {"stalls", "stops"}:
            writer.write(head("200 OK", "transfer-encoding: chunked\r\n"))
            if self.mood == "stops":
                writer.write(b"%x\r\n%s\r\n" % (len(CHUNKS[0]), CHUNKS[0]))
            await reader.read(1)
            self.left += 1
        elif self.mood == "garbage":
            writer.write(b"\x00 this is no HTTP\r\n\r\n")
        elif self.mood in {"waits", "stopped"}:
            if await self._wakes(reader):
                await self._answer(path, body, reader, writer)
            else:
                self.left += 1
        await writer.drain()

    async def _wakes(self, reader) -> bool:
        """Whether it is woken before the client goes."""
        gone = asyncio.ensure_future(reader.read(1))
        woken = asyncio.ensure_future(self._woken.wait())
        await asyncio.wait({gone, woken}, return_when=asyncio.FIRST_COMPLETED)
        left = gone.done()
        for one in (gone, woken):
            one.cancel()
        return not left


class Routing:
    """A proxy in a thread, in front of some instances."""

    def __init__(self, *urls: str, **options: Any) -> None:
        cost = options.pop("cost", RoutingCost(balance=0.0, slack=0.0))
        self.router = options.pop("router", None) or PrefixRouter(urls, cost=cost)
        self.upstreams = options.pop("upstreams", None) or Upstreams(urls, connect_s=2.0)
        waits = {"first_byte_s": 20.0, "probe_every_s": 0.05, "probe_s": 1.0}
        options["timeouts"] = Timeouts(**{**waits, **options.pop("timeouts", {})})
        drain_s = options.pop("drain_s", 30.0)
        self._socket = options.pop("bound", None) or bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        proxy = create_proxy(self.router, self.upstreams, **options)
        self._server = Server(proxy, drain_s=drain_s)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self._socket]))
        )
        self._thread.start()
        eventually(lambda: self._server.started)

    @property
    def runs(self) -> bool:
        """Whether the proxy has not ended."""
        return self._thread.is_alive()

    def signal(self) -> None:
        """Do what a SIGTERM does."""
        self._server.handle_exit(signal.SIGTERM, None)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        assert not self._thread.is_alive()
        for name in self.upstreams.names:
            assert self.router.load(name) == (0, 0.0), "a request was never given back"


@contextmanager
def routing(*moods: str, **options: Any) -> Iterator[tuple[Routing, list[StandIn]]]:
    """A proxy in front of stand-ins in these moods."""
    made = [StandIn(mood) for mood in moods]
    try:
        proxy = Routing(*(one.url for one in made), **options)
        try:
            yield proxy, made
        finally:
            proxy.stop()
    finally:
        for one in made:
            one.stop()
