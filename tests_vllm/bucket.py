"""A server with one bucket that speaks as much S3 as vLLM's tier for objects asks for."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit


class Bucket:
    """Objects by path, which tests may change. While ``answers`` is not set, no request ends."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.answers = threading.Event()
        self.answers.set()
        self.open: set[socket.socket] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """End all connections, and answer no more."""
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for one in list(self.open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _handler(bucket: Bucket) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            bucket.open.add(self.connection)

        def finish(self) -> None:
            bucket.open.discard(self.connection)
            super().finish()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

        def do_PUT(self) -> None:
            body = self.body()
            bucket.answers.wait()
            bucket.objects[urlsplit(self.path).path] = body
            self.answer(200)

        def do_HEAD(self) -> None:
            bucket.answers.wait()
            found = bucket.objects.get(urlsplit(self.path).path)
            self.answer(404 if found is None else 200, length=len(found or b""))

        def do_GET(self) -> None:
            bucket.answers.wait()
            found = bucket.objects.get(urlsplit(self.path).path)
            if found is None:
                self.answer(404)
                return
            given = self.headers.get("Range")
            if given is None:
                self.answer(200, found)
                return
            first, last = given.removeprefix("bytes=").split("-")
            part = found[int(first) : int(last) + 1 if last else None]
            self.answer(206, part, of=f"bytes {first}-{int(first) + len(part) - 1}/{len(found)}")

        def body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                raw = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if not self.headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
                    return raw
                return _unchunked(raw)
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            raw = b"".join(pieces)
            streamed = self.headers.get("x-amz-content-sha256", "").startswith("STREAMING")
            return _unchunked(raw) if streamed else raw

        def answer(
            self, status: int, body: bytes = b"", length: int | None = None, of: str | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            if of is not None:
                self.send_header("Content-Range", of)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _unchunked(raw: bytes) -> bytes:
    """Remove the sizes and signatures of pieces, and what follows the last one."""
    pieces, at = [], 0
    while True:
        line, _, rest = raw[at:].partition(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(rest[:size])
        at += len(line) + 2 + size + 2
