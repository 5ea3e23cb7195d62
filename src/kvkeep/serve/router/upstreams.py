"""`Upstreams`: the instances as HTTP servers."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.router.health import Health

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

__all__ = ["UpstreamFailed", "Upstreams", "passed_on"]

# What is about one connection and not about the message (RFC 9110, 7.6.1), and what is made anew.
_OWN_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host content-length expect x-data-parallel-rank".split()
)


class UpstreamFailed(Exception):
    """An instance did not answer, or broke off; ``reached``: it may have had the request."""

    def __init__(self, name: str, error: Exception) -> None:
        self.reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        super().__init__(f"{name} failed: {type(error).__name__}")


class Upstreams:
    """HTTP clients of some instances, named by their base URLs.

    ``health`` is what is known of them. Connecting is the one thing here with a time limit: whoever
    asks sets the limits of waiting.

    Thread safety: none; it belongs to the event loop. Raises `InvalidValue` for what is no http
    URL, or comes twice.
    """

    def __init__(
        self,
        instances: Iterable[str],
        *,
        connect_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names: list[str] = []
        for url in instances:
            if "@" in url:  # names of instances are in logs and metrics
                raise InvalidValue("an instance's URL has no password in it; clients send the keys")
            if not _can_be_asked(url):
                raise InvalidValue(f"an instance is http://HOST:PORT, got {url!r}")
            if url in self.names:
                raise InvalidValue(f"the instance {url} is named twice")
            self.names.append(url)
        if not self.names:
            raise InvalidValue("a router needs at least one instance, got none")
        self.health = Health(self.names, clock=clock)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # no proxy of the environment between us and them
        )

    @asynccontextmanager
    async def asking(
        self,
        name: str,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
    ) -> AsyncIterator[httpx.Response]:
        """The answer's head; its body is to be read within. Raises `UpstreamFailed`."""
        # Not the client's own way to build one: that says what *it* accepts.
        request = httpx.Request(method, name.rstrip("/") + path, headers=headers, content=body)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UpstreamFailed(name, error) from error
        try:
            yield response
        except httpx.RequestError as error:  # what is no gzip, though it says so, among them
            raise UpstreamFailed(name, error) from error
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Give the connections back."""
        await self._client.aclose()


def _can_be_asked(url: str) -> bool:
    """Whether paths can be put behind it, and requests sent there."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        sound = parts.port != 0 and url.isprintable() and " " not in url
    except (ValueError, httpx.InvalidURL):  # a port that is none, a bracket too many
        return False
    named = parts.scheme in {"http", "https"} and bool(parts.hostname)
    return sound and named and not parts.query and not parts.fragment


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a message that are for whoever comes next."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {
        one.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for one in value.split(b",")
    }
    return [pair for pair in pairs if pair[0] not in _OWN_HEADERS | named]
