"""Bodies of requests: how large one may be, how slow, and how much all of them take together."""

from __future__ import annotations

import asyncio
import math
import mmap
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from kvkeep.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Bodies", "Body", "BodyGuard", "BodyRefused", "body_of"]

FREE_BYTES = 64 << 10
"""So much of each body is not counted: small requests pass while large ones fill the budget."""
_LINGER_S = 1.0
"""What is refused is read on for so long, or the client would never read why."""
_KEY = "kvkeep.body"
# What still comes of a body that was refused is not read.
_CLOSE = {"Connection": "close"}


class BodyRefused(Exception):
    """A body that is not taken: the HTTP ``status`` and ``headers`` of the answer, and a ``code``.

    The message is for the client.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] = _CLOSE
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers)


class Bodies:
    """What the bodies of all requests may take.

    One has at most ``largest`` bytes and ``seconds`` to arrive; all that are held at one time have
    ``budget`` bytes together, the first 64 KiB of each not counted. A body is held from its first
    byte to the end of its request's answer.

    Thread safety: none; it belongs to the event loop. Memory: ``budget``, and 64 KiB a connection.
    """

    def __init__(
        self, *, largest: int = 8 << 20, budget: int = 256 << 20, seconds: float = 60.0
    ) -> None:
        self.largest = whole("max_body_bytes", largest, 1)
        self.budget = whole("body_budget_bytes", budget, self.largest)
        if not 0 < seconds < math.inf:
            raise InvalidValue(f"body_timeout_s is a number of seconds above 0, got {seconds}")
        self.seconds = seconds
        self.held = 0
        """Counted bytes of all bodies now."""
        self.refused = {"too_large": 0, "late": 0, "budget": 0}
        """Bodies that were not taken, by why."""

    def take(self, size: int) -> bool:
        """Count ``size`` bytes more; False, and nothing is counted, where that is too much."""
        if self.held + size > self.budget:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """So many bytes are held no more."""
        self.held -= size
        assert self.held >= 0, "more of a body was given back than taken"


class Body:
    """The body of one request: `read` it once, then `take` it.

    What is beyond 64 KiB lies in pages of its own until then, which go back to the system at once
    when the client leaves: no heap that has grown stays behind.
    """

    def __init__(self, bodies: Bodies, headers: Headers, receive: Receive) -> None:
        self._bodies = bodies
        self._headers = headers
        self._receive = receive
        self._small = bytearray()
        self._large: mmap.mmap | None = None
        self._counted = 0
        self.size = 0
        """Bytes that have come."""

    async def read(self) -> None:
        """Wait for all of it.

        Raises `BodyRefused` for one that is too large (413), too slow (408), or too much beside
        those of others (503), and `ClientDisconnect` when the client leaves first.
        """
        said = self._headers.get("content-length", "")
        if said.isdecimal() and int(said[:20]) > self._bodies.largest:
            raise await self._refused("too_large", lingers="expect" not in self._headers)
        try:
            async with asyncio.timeout(self._bodies.seconds):
                while await self._more():
                    pass
        except TimeoutError:
            raise await self._refused("late", lingers=False) from None

    async def _more(self) -> bool:
        """Wait for the next piece; whether more comes behind it."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if self.size + len(piece) > self._bodies.largest:
            raise await self._refused("too_large", lingers=more)
        owed = max(0, self.size + len(piece) - FREE_BYTES)
        if not self._bodies.take(owed - self._counted):
            raise await self._refused("budget", lingers=more)
        self._counted = owed
        self._add(piece)
        return more

    def _add(self, piece: bytes) -> None:
        self.size += len(piece)
        if self._large is None and self.size <= FREE_BYTES:
            self._small += piece
            return
        if self._large is None:
            # Room for the longest; pages that are not written take no memory.
            self._large = mmap.mmap(-1, self._bodies.largest)
            self._large.write(self._small)
            self._small = bytearray()
        self._large.write(piece)

    def take(self) -> bytes:
        """All of it, once; it stays counted until the request ends."""
        if self._large is None:
            body = bytes(self._small)
            self._small = bytearray()
        else:
            body = self._large[: self.size]
            self._release()
        return body

    def close(self) -> None:
        """The request has ended: nothing is held any more."""
        self._release()
        self._small = bytearray()
        self._bodies.give(self._counted)
        self._counted = 0

    def _release(self) -> None:
        if self._large is not None:
            self._large.close()
            self._large = None

    async def _refused(self, why: str, *, lingers: bool) -> BodyRefused:
        """The refusal, when what still comes was read for a moment."""
        self.close()
        self._bodies.refused[why] += 1
        if lingers:
            await _linger(self._receive)
        if why == "too_large":
            message = f"a request's body has at most {self._bodies.largest:,} bytes"
            return BodyRefused(413, "body_too_large", message)
        if why == "late":
            return BodyRefused(408, "timeout", "the request's body did not arrive in time")
        return BodyRefused(
            503,
            "bodies_full",
            f"the bodies of the requests at hand have {self._bodies.budget:,} bytes together, "
            "which is all this server takes; try again later",
            {**_CLOSE, "Retry-After": "1"},
        )


class BodyGuard:
    """ASGI: each request's body is counted in ``bodies``; an application reads it by `body_of`."""

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = scope[_KEY] = Body(self._bodies, Headers(scope=scope), receive)
        try:
            await self._app(scope, receive, send)
        finally:
            body.close()


def body_of(scope: Scope) -> Body:
    """The body of the request with this ``scope``, behind a `BodyGuard`."""
    body: Body = scope[_KEY]
    return body


async def _linger(receive: Receive) -> None:
    """Read and forget what still comes, for a moment."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
