"""A server that answers with what it is told to: for what no real one says, or says in time."""

from __future__ import annotations

import json
import socket
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Answer = dict[str, Any] | bytes | tuple[int, Any] | Callable[[], Any]


def failure(message: str, code: str | None = None) -> dict[str, Any]:
    """An error as kvkeep's server writes it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": error}


class Told(ThreadingHTTPServer):
    """``answers`` by path without its query: JSON, bytes, (status, either), or what makes one."""

    daemon_threads = True
    # Who is refused while the server is stopped and started finds the port free.
    allow_reuse_address = True

    def __init__(self, answers: dict[str, Answer], port: int = 0) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []  # method, path with query, body
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.connected: list[Any] = []
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error; all else is one of the test."""
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Told

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1
        self.server.connected.append(self.connection)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, json.loads(body) if body else None))
        self.server.headers.append(dict(self.headers))
        said = self.server.answers.get(self.path.partition("?")[0])
        said = said() if callable(said) else said
        if said is None:
            said = (404, failure("there is nothing at this address; see /openapi.json"))
        status, said = said if isinstance(said, tuple) else (200, said)
        sent = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = _answer


@contextmanager
def told(answers: dict[str, Answer], port: int = 0) -> Iterator[Told]:
    """A server with these answers; at the end it is gone, with all its connections."""
    with Told(answers, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)
            for connection in server.connected:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)
