"""`Upstreams`: the instances as HTTP servers: who may be asked, and asking."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from kvkeep.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

__all__ = ["UpstreamFailed", "Upstreams", "passed_on"]

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0
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


@dataclass(slots=True)
class _State:
    failures: int = 0
    rests_until: float = 0.0


class Upstreams:
    """HTTP clients of some instances, named by their base URLs.

    One that fails rests: a second, then twice as long each time it fails again, half a minute at
    most; it is asked meanwhile only where all rest. Thread safety: none; it belongs to the event
    loop. Raises `InvalidValue` for what is no http URL, or comes twice.
    """

    def __init__(
        self,
        instances: Iterable[str],
        *,
        connect_s: float = 3.0,
        answer_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._states: dict[str, _State] = {}
        for url in instances:
            if "@" in url:  # names of instances are in logs and metrics
                raise InvalidValue("an instance's URL has no password in it; clients send the keys")
            if not _can_be_asked(url):
                raise InvalidValue(f"an instance is http://HOST:PORT, got {url!r}")
            if url in self._states:
                raise InvalidValue(f"the instance {url} is named twice")
            self._states[url] = _State()
        if not self._states:
            raise InvalidValue("a router needs at least one instance, got none")
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(answer_s, connect=connect_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # no proxy of the environment between us and them
        )

    @property
    def names(self) -> list[str]:
        """All of them."""
        return list(self._states)

    def awake(self) -> list[str]:
        """Those that do not rest; all, where all do."""
        now = self._clock()
        return [name for name, one in self._states.items() if one.rests_until <= now] or self.names

    def resting(self, name: str) -> bool:
        """Whether it failed a moment ago."""
        return self._states[name].rests_until > self._clock()

    def well(self, name: str) -> bool:
        """Whether the last thing that it was asked for was answered."""
        return not self._states[name].failures

    def failed(self, name: str) -> None:
        """It did not do what it was asked: let it rest."""
        state = self._states[name]
        if not self.resting(name):  # requests that fail together are one failure
            rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2**state.failures)
            state.failures = min(state.failures + 1, 10)
            state.rests_until = self._clock() + rest

    def worked(self, name: str) -> None:
        """It answered."""
        self._states[name].failures = 0
        self._states[name].rests_until = 0.0

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
