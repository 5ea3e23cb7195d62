"""`Bodies`: the bodies of requests, kept until they are answered, within one budget."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvkeep.errors import whole

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Bodies", "Body", "BodyRefused"]

_WAIT_S = 60.0


class BodyRefused(Exception):
    """A body is not taken: what to answer, and after how many seconds to try again (0: never)."""

    def __init__(self, status: int, message: str, *, retry_after_s: int = 0) -> None:
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Body:
    """The bytes of one request; they count until `release`."""

    __slots__ = ("_bodies", "data")

    def __init__(self, bodies: Bodies, data: bytes) -> None:
        self._bodies: Bodies | None = bodies
        self.data = data

    def release(self) -> None:
        """Give the bytes back; a second time changes nothing."""
        if self._bodies is not None:
            self._bodies.held -= len(self.data)
            self._bodies = None
            self.data = b""


class Bodies:
    """Reads bodies of at most ``most_each`` bytes, all together at most ``most_all``.

    A body is kept as long as its request runs: it may have to be sent to another instance, and the
    HTTP client refers to it until the answer has ended. Bytes count as they arrive. The tokens of a
    prompt come on top: up to twice the bytes of its body. Thread safety: none; it belongs to the
    event loop.
    """

    def __init__(
        self, *, most_each: int = 8 << 20, most_all: int = 256 << 20, wait_s: float = _WAIT_S
    ) -> None:
        self._most_each = whole("the largest body", most_each, 1)
        self._most_all = whole("the budget of all bodies", most_all, most_each)
        self._wait_s = wait_s
        self.held = 0
        """Bytes of all bodies at the moment."""
        self.refused = 0
        """Requests that found the budget used up."""

    async def read(self, request: Request) -> Body:
        """The whole body. Raises `BodyRefused`, or what the request's stream raises."""
        read = bytearray()  # not a list of pieces: a client may send one byte each
        try:
            async with asyncio.timeout(self._wait_s):
                async for piece in request.stream():
                    self._room(len(read), len(piece))
                    read += piece
                    self.held += len(piece)
        except TimeoutError:
            self.held -= len(read)
            raise BodyRefused(408, "the request's body did not arrive in time") from None
        except BaseException:
            self.held -= len(read)
            raise
        return Body(self, bytes(read))

    def _room(self, size: int, more: int) -> None:
        if size + more > self._most_each:
            raise BodyRefused(413, "the request's body is too large")
        if self.held + more > self._most_all:
            self.refused += 1
            raise BodyRefused(503, "too many requests at once; try again", retry_after_s=1)
