"""Bodies of requests: bounds on the size and time of each, and on the memory of all."""

from __future__ import annotations

import asyncio
import math
import mmap
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["BodyBudget", "BodyGuard", "BodyRefused", "RequestBody", "body_of"]

FREE_BYTES = 64 << 10
"""The first bytes of each body are not counted, so small requests pass when the budget is full."""
_LINGER_S = 1.0
"""Seconds for which a refused body is still read, so that the client can read the answer."""
_KEY = "kvkeep.body"
# The rest of a refused body is not read.
_CLOSE = {"Connection": "close"}


class BodyRefused(Exception):
    """A body is refused: ``status``, ``code`` and ``headers`` of the answer.

    The message is sent to the client.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] = _CLOSE
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers)


class BodyBudget:
    """Limits and counts the bodies of all requests.

    One body has at most ``largest`` bytes and ``seconds`` to arrive. All bodies that are held have
    at most ``budget`` bytes together; the first 64 KiB of each are not counted. A body is held from
    its first byte to the end of the answer.

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
        """Counted bytes of the bodies that are held now."""
        self.refused = {"too_large": 0, "late": 0, "budget": 0}
        """Refused bodies by reason."""

    def take(self, size: int) -> bool:
        """Count ``size`` bytes more. Return False and count nothing if the budget is exceeded."""
        if self.held + size > self.budget:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """Count ``size`` bytes less."""
        self.held -= size
        assert self.held >= 0, "more of a body was given back than taken"


class RequestBody:
    """The body of one request: `read` it once, then `take` it.

    Beyond 64 KiB a body lies in an anonymous mapping until `take`, which is returned to the system
    at once when the client leaves: the heap does not grow.
    """

    def __init__(self, bodies: BodyBudget, headers: Headers, receive: Receive) -> None:
        self._bodies = bodies
        self._headers = headers
        self._receive = receive
        self._small = bytearray()
        self._large: mmap.mmap | None = None
        self._counted = 0
        self.size = 0
        """Bytes that have arrived."""

    async def read(self) -> None:
        """Wait for the whole body.

        Raises `BodyRefused` for a body that is too large (413), too slow (408), or exceeds the
        budget of all bodies (503), and `ClientDisconnect` when the client leaves first.
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
        """Wait for the next piece. Return whether more follows."""
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
            # As large as the largest body: pages that are not written take no memory.
            self._large = mmap.mmap(-1, self._bodies.largest)
            self._large.write(self._small)
            self._small = bytearray()
        self._large.write(piece)

    def take(self) -> bytes:
        """Return the whole body, once. It stays counted until the request ends."""
        if self._large is None:
            body = bytes(self._small)
            self._small = bytearray()
        else:
            body = self._large[: self.size]
            self._release()
        return body

    def close(self) -> None:
        """Free and uncount the body: the request has ended."""
        self._release()
        self._small = bytearray()
        self._bodies.give(self._counted)
        self._counted = 0

    def _release(self) -> None:
        if self._large is not None:
            self._large.close()
            self._large = None

    async def _refused(self, why: str, *, lingers: bool) -> BodyRefused:
        """Return the refusal, after the rest of the body was read for a moment."""
        self.close()
        self._bodies.refused[why] += 1
        if lingers:
            await _linger(self._receive)
        if why == "too_large":
            message = f"a request's body has at most {self._bodies.largest:,} bytes"
            return BodyRefused(413, "body_too_large", message)
        if why == "late":
            seconds = self._bodies.seconds
            return BodyRefused(
                408, "timeout", f"the request's body did not arrive within {seconds:g} seconds"
            )
        return BodyRefused(
            503,
            "bodies_full",
            f"the bodies of all requests exceed this server's budget of {self._bodies.budget:,} "
            "bytes; try again later",
            {**_CLOSE, "Retry-After": "1"},
        )


class BodyGuard:
    """ASGI middleware that counts each body in ``bodies``; the application calls `body_of`."""

    def __init__(self, app: ASGIApp, bodies: BodyBudget) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = scope[_KEY] = RequestBody(self._bodies, Headers(scope=scope), receive)
        try:
            await self._app(scope, receive, send)
        finally:
            body.close()


def body_of(scope: Scope) -> RequestBody:
    """The body of the request with this ``scope``, behind a `BodyGuard`."""
    body: RequestBody = scope[_KEY]
    return body


async def _linger(receive: Receive) -> None:
    """Read and drop the rest of a body, for a moment."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
