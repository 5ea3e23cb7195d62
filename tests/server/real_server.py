"""A real server on the bundled model: uvicorn in a thread, a port of its own, real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import Listener, ServerSettings, bind, create_app, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.serve.http import ConnectionLimits

NAME = "kvkeep-tiny"
COMPLETIONS = "/v1/completions"
PATIENCE_S = 30.0


class Running:
    """A server that listens: its ``url``, its ``engine``, and an HTTP client (``http``)."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, connections: ConnectionLimits | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.app = create_app(engine, settings)
        self.service = self.app.state.service
        self.listener = Listener(self.app, connections)
        self.socket = bind("127.0.0.1", 0)
        self.url = url_of(self.socket)
        self.port = self.socket.getsockname()[1]
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self._thread = threading.Thread(target=self._serve, name="server under test")
        self._thread.start()
        eventually(lambda: self.listener.started)

    def _serve(self) -> None:
        asyncio.run(self.listener.serve([self.socket]))

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client; it does not try again by itself."""
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def stats(self) -> dict[str, dict[str, float]]:
        """What /kv/stats says."""
        return self.http.get("/kv/stats").raise_for_status().json()

    def flush(self, seconds: float = PATIENCE_S) -> bool:
        """Wait until all tiers have what was stored for the answers so far; return whether."""
        assert self.engine.store is not None
        offload = self.engine._offload
        assert offload is not None
        return offload._mover.flush(seconds) and self.engine.store.flush(seconds)

    def assert_idle(self) -> None:
        """Nothing runs or waits, no page is held, and the cache agrees with itself."""
        eventually(lambda: not self.engine.has_work)
        stats = self.engine.cache.stats()
        assert (stats.sequences, stats.pages_protected) == (0, 0)
        rows_and_states = 0 if stats.groups is None else stats.groups.pages
        assert stats.pages_used == stats.pages_cached + rows_and_states
        self.engine.cache.check()

    def stop(self) -> None:
        """Drain and end."""
        self.http.close()
        self.listener.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not end"


def eventually(holds: Any, seconds: float = PATIENCE_S) -> None:
    """Wait until ``holds()``."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.005)


@contextmanager
def standing(server: Running) -> Iterator[None]:
    """No more than one step within the block: what runs by then still runs, whoever is slow."""
    step, goes_on = server.engine.step, threading.Event()

    def held() -> Any:
        made = step()
        goes_on.wait(PATIENCE_S)
        return made

    server.engine.step = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.engine.step = step  # type: ignore[method-assign]
        goes_on.set()


@contextmanager
def running(
    *,
    num_pages: int = 1024,
    page_size: int = 16,
    limits: Limits | None = None,
    reuse: bool = True,
    what_if: float | None = None,
    eviction: str = "lru",
    connections: ConnectionLimits | None = None,
    model: Path | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Start a server and stop it; ``settings`` are those of `kvkeep.serve.server.Settings`."""
    model = model or bundled_model()
    runner = Runner.load(model, num_pages=num_pages, page_size=page_size, device="cpu")
    engine = Engine(
        runner,
        PagedCache(num_pages, page_size, eviction=eviction, what_if=what_if, reuse=reuse),
        Tokenizer.load(model),
        limits=limits or Limits(max_running=16, max_waiting=64),
    )
    server = Running(engine, ServerSettings(**{"name": NAME, **settings}), connections)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def raw(
    server: Running, body: dict[str, Any], *, buffer: int | None = None
) -> Iterator[socket.socket]:
    """A connection on which ``body`` was asked, closed without a word at the end.

    ``buffer``: so many bytes at most wait here to be read.
    """
    data = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.settimeout(30)
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + data)
        yield connection
