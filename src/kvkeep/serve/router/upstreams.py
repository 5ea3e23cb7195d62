"""`Upstreams`: HTTP clients of the instances; `Probes` of them."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.router.health import Health

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from kvkeep.serve.router.health import Timeouts

__all__ = ["Probes", "UpstreamFailed", "Upstreams", "check_url", "end_to_end_headers"]


# Headers of one connection, not of the message (RFC 9110, 7.6.1), and those the proxy sets anew.
_OWN_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host content-length expect x-data-parallel-rank".split()
)


class UpstreamFailed(Exception):
    """An instance did not respond, or broke off. ``reached``: it may have got the request."""

    def __init__(self, name: str, error: Exception) -> None:
        self.reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        super().__init__(f"{name} failed: {type(error).__name__}")


class Upstreams:
    """HTTP clients of the instances, which are named by their base URLs.

    ``health`` has the state of each. Only connecting has a timeout here; callers set all others.
    Raises `InvalidValue` for a URL that is not http(s), or given twice.

    Thread safety: none; for the event loop.
    """

    def __init__(
        self,
        instances: Iterable[str] = (),
        *,
        connect_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.health = Health(clock)
        for url in instances:
            if url in self.names:
                raise InvalidValue(f"the instance {url} is given twice")
            self.add(url)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # no proxy from the environment
        )

    @property
    def names(self) -> list[str]:
        """The instances that get new requests."""
        return self.health.joined()

    def add(self, url: str, *, proven: bool = True) -> None:
        """Add an instance, see `Health.add`. Raises `InvalidValue` for a URL that is none."""
        check_url(url)
        self.health.add(url, proven=proven)

    def remove(self, name: str) -> None:
        """Forget an instance."""
        self.health.remove(name)

    @asynccontextmanager
    async def request(
        self,
        name: str,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the response, to be read within. Raises `UpstreamFailed`."""
        # Not self._client.build_request: it adds the client's own Accept headers.
        request = httpx.Request(method, name.rstrip("/") + path, headers=headers, content=body)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UpstreamFailed(name, error) from error
        try:
            yield response
        except httpx.RequestError as error:  # also for bodies that claim gzip and are not
            raise UpstreamFailed(name, error) from error
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def check_url(url: str) -> None:
    """Raise `InvalidValue` unless this is the URL of an instance."""
    if "@" in url:  # logs and metrics show the names of instances
        raise InvalidValue("an instance's URL must not contain a password")
    if not _is_base_url(url):
        raise InvalidValue(f"an instance must be http://HOST:PORT, got {url[:200]!r}")


def _is_base_url(url: str) -> bool:
    """Whether appending a path to this URL gives a valid request URL."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        sound = parts.port != 0 and url.isprintable() and " " not in url
    except (ValueError, httpx.InvalidURL):  # such as a bad port or an unbalanced bracket
        return False
    named = parts.scheme in {"http", "https"} and bool(parts.hostname)
    return sound and named and not parts.query and not parts.fragment


def end_to_end_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to forward: all but those about one connection."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {
        one.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for one in value.split(b",")
    }
    return [pair for pair in pairs if pair[0] not in _OWN_HEADERS | named]


# A new connection per probe: the instance may have closed a kept one meanwhile.
_HEADERS = [(b"connection", b"close")]
_LEAST_PAUSE_S = 0.05
_MOST_A_SECOND = 200
"""Probes a second to all instances together; with more instances, each is probed less often."""
_LONGEST_PAUSE = 8
"""Backoff for an instance that stays silent: at most this many probe intervals."""


class Probes:
    """Sends ``GET /health`` to each instance, one probe at a time, and reports to `Health`.

    Instances that come are probed at once, those that leave until they are forgotten.
    A stopped process still accepts connections, so a probe succeeds only with a response; any
    status below 500 counts. ``on_probe`` is called with the instance and whether it answered,
    ``on_gone`` with one that was forgotten, after its last probe.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        timeouts: Timeouts,
        on_probe: Callable[[str, bool], None],
        *,
        on_gone: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._upstreams = upstreams
        self._health = upstreams.health
        self._timeouts = timeouts
        self._on_probe = on_probe
        self._on_gone = on_gone

    async def run(self) -> None:
        """Probe until cancelled."""
        changed = self._health.changed
        following: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                changed.clear()
                names = self._health.names()
                for name in following.keys() - set(names):
                    following.pop(name).cancel()
                    self._on_gone(name)
                for name in names:
                    if name not in following:
                        following[name] = group.create_task(self._follow(name))
                await changed.wait()

    async def _follow(self, name: str) -> None:
        clock = asyncio.get_running_loop().time
        wake = self._health.wake(name)
        times = 1
        while True:
            wake.clear()
            begun = clock()
            answered = await self._answers(name)
            self._on_probe(name, answered)
            self._health.probed(name, answered=answered)
            times = min(times * 2, _LONGEST_PAUSE) if self._health.silent(name) else 1
            every_s = max(self._timeouts.probe_every_s, self._health.size / _MOST_A_SECOND)
            pause = every_s * times - (clock() - begun)
            # A minimum pause, so that doubts in quick succession cause no flood of probes.
            await asyncio.sleep(min(_LEAST_PAUSE_S, self._timeouts.probe_every_s))
            try:
                async with asyncio.timeout(max(0.0, pause)):
                    await wake.wait()
            except TimeoutError:
                pass

    async def _answers(self, name: str) -> bool:
        try:
            async with (
                asyncio.timeout(self._timeouts.probe_s),
                self._upstreams.request(name, "GET", "/health", _HEADERS, b"") as response,
            ):
                return response.status_code < 500
        except (UpstreamFailed, TimeoutError):
            return False
