"""An HTTP object store with put, get and head, which fails on demand."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit


class ObjectServer:
    """Objects by path. ``fault`` says what happens to requests from now on.

    ====================  ======================================================
    ``None``              they are obeyed
    a number              answered with this status
    ``"truncate"``        half of the object comes, then the connection ends
    ``"stall"``           half of the object comes, then nothing
    ====================  ======================================================
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: int | str | None = None
        self.healed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.healed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(store: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

        def answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            path = self.begin()
            if path is not None:
                store.objects[path] = body
                self.answer(201)

        def do_GET(self) -> None:
            path = self.begin()
            if path is None:
                return
            body = store.objects.get(path)
            if body is None:
                self.answer(404)
            elif store.fault in {"truncate", "stall"}:
                self.answer(200, body[: len(body) // 2], len(body))
                self.wfile.flush()
                if store.fault == "stall":
                    store.healed.wait(60)
                self.close_connection = True
            else:
                self.answer(200, body)

        def do_HEAD(self) -> None:
            path = self.begin()
            if path is None:
                return
            found = store.objects.get(path)
            self.answer(404 if found is None else 200, length=len(found or b""))

        def do_DELETE(self) -> None:
            path = self.begin()
            if path is not None:
                self.answer(404 if store.objects.pop(path, None) is None else 204)

        def begin(self) -> str | None:
            path = urlsplit(self.path).path
            store.requests.append((self.command, path))
            if isinstance(store.fault, int):
                self.answer(store.fault)
                return None
            return path

    return Handler
