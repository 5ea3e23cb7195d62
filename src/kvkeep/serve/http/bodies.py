"""Request bodies: limits on size, arrival time and values of each, and on the memory of all."""

from __future__ import annotations

import asyncio
import math
import mmap
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = [
    "BodyBudget",
    "BodyGuard",
    "BodyRefused",
    "RequestBody",
    "body_of",
    "check_values",
    "text_size",
    "texts_in",
    "unless_disconnected",
]


FREE_BYTES = 64 << 10
"""The first bytes of each body are not counted, so small requests pass when the budget is full."""
_LINGER_S = 1.0
"""Seconds to keep reading a refused body, so that the client gets to read the response."""
_KEY = "kvkeep.body"
# A connection whose body was not read to its end cannot carry another request.
_CLOSE = {"Connection": "close"}


class BodyRefused(Exception):
    """A refused body, with the ``status``, ``code`` and ``headers`` of the response.

    The response has the exception's message.
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

    Each body may have ``largest`` bytes and take ``seconds`` to arrive. All bodies in memory have
    at most ``budget`` bytes together, not counting the first 64 KiB of each. A body counts from
    its first byte until the response has ended.

    Thread safety: none; for the event loop. Memory: ``budget``, and 64 KiB per connection.
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
        """Counted bytes of the bodies in memory."""
        self.refused = {"too_large": 0, "late": 0, "budget": 0}
        """Refused bodies by reason."""

    def take(self, size: int) -> bool:
        """Count ``size`` more bytes. Return False, and count nothing, if the budget is exceeded."""
        if self.held + size > self.budget:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """Count ``size`` fewer bytes."""
        self.held -= size
        assert self.held >= 0, "more of a body was given back than taken"


class RequestBody:
    """The body of one request: `read` it once, then `take` it.

    Beyond 64 KiB it is kept in an anonymous mapping, which goes back to the system at once when the
    client leaves: the heap does not grow.
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
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._bodies.largest:
            raise await self._refused("too_large", lingers="expect" not in self._headers)
        try:
            async with asyncio.timeout(self._bodies.seconds):
                while await self._more():
                    pass
        except TimeoutError:
            raise await self._refused("late", lingers=False) from None

    async def _more(self) -> bool:
        """Wait for the next piece. Return whether more follow."""
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
            # Mapped at the largest size: pages that are never written take no memory.
            self._large = mmap.mmap(-1, self._bodies.largest)
            self._large.write(self._small)
            self._small = bytearray()
        self._large.write(piece)

    def take(self) -> bytes:
        """Return the whole body; call once. It stays counted until the request ends."""
        if self._large is None:
            body = bytes(self._small)
            self._small = bytearray()
        else:
            body = self._large[: self.size]
            self._release()
        return body

    def close(self) -> None:
        """Free the body and stop counting it, at the end of the request."""
        self._release()
        self._small = bytearray()
        self._bodies.give(self._counted)
        self._counted = 0

    def _release(self) -> None:
        if self._large is not None:
            self._large.close()
            self._large = None

    async def _refused(self, why: str, *, lingers: bool) -> BodyRefused:
        """Release the body, keep reading for a moment if ``lingers``; return the error to raise."""
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
    """ASGI middleware that counts each request's body in ``bodies``; read it with `body_of`."""

    def __init__(self, app: ASGIApp, bodies: BodyBudget) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the body available to the application, and free it afterwards."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = scope[_KEY] = RequestBody(self._bodies, Headers(scope=scope), receive)
        try:
            await self._app(scope, receive, send)
        finally:
            body.close()


def body_of(scope: Scope) -> RequestBody:
    """Return the body of the request with this ``scope``; needs `BodyGuard` in front."""
    body: RequestBody = scope[_KEY]
    return body


async def _linger(receive: Receive) -> None:
    """Read and drop the rest of a body, for a limited time."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


Result = TypeVar("Result")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``. Cancel it and raise `ClientDisconnect` if the client leaves.

    The body must have been read: from then on ``receive`` only reports the disconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_MOST_CONTAINERS = 32_768
"""Objects and lists; 4,096 messages of four parts each have fewer."""
_MOST_TEXTS = 131_072
"""Strings, including names of fields."""
_MOST_VALUES = 1 << 20
"""Values in lists and objects, mostly tokens."""
_FEW_BYTES = 32_768
"""A body of no more bytes cannot exceed any of these limits."""


def check_values(data: bytes) -> None:
    """Raise `InvalidValue` for a body with too many values.

    A JSON parser creates a Python object per value and holds the interpreter meanwhile: five
    megabytes of ``[[1], [1], …]`` would stop the event loop for seconds. So values are counted
    first, in the bytes.

    Cost: a fast upper bound for most bodies; an exact count takes about 50 ms for 8 MiB.
    """
    if len(data) <= _FEW_BYTES:
        return
    if (
        _containers(data) <= _MOST_CONTAINERS
        and data.count(b'"') <= 2 * _MOST_TEXTS
        and data.count(b",") <= _MOST_VALUES
    ):
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes left delimit strings
    _at_most("strings", bare.count(b'"') // 2, _MOST_TEXTS)
    outside = b"".join(bare.split(b'"')[::2])
    _at_most("objects and lists", _containers(outside), _MOST_CONTAINERS)
    _at_most("values", outside.count(b","), _MOST_VALUES)


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a decoded JSON value at any depth, names of fields included.

    In no particular order. Cost: a step for each value, about 0.1 s for the most that
    `check_values` allows, so run it off the event loop for a large body.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(part for part in item if isinstance(part, str | dict | list | tuple))


def text_size(value: object) -> int:
    """Return the number of characters of `texts_in`: what a tokenizer or a template may get."""
    return sum(map(len, texts_in(value)))


def _containers(data: bytes) -> int:
    count: Callable[[bytes], int] = data.count
    return count(b"[") + count(b"{")


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidValue(f"the body has {count:,} {what}; a request has at most {most:,}")
