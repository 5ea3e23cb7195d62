"""`Membership`: the instances that come and go, and what the router keeps of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.serve.kv_events import Source
from kvkeep.serve.router.upstreams import check_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.serve.kv_events import EventReader
    from kvkeep.serve.router.router import PrefixRouter
    from kvkeep.serve.router.upstreams import Upstreams

    Resolver = Callable[[str, int], list[Any]]

__all__ = ["DnsName", "EventAddresses", "Membership", "Resolution", "resolve"]

log = logging.getLogger("kvkeep.router")

_OPTIONS: Final = "options"
_MOST: Final = 4096
"""Instances at the most; each has an index, probes and sockets."""
_SWEEP_S: Final = 0.5
_STEP: Final = 20_000  # blocks that are forgotten at once, in some 15 ms


def resolve(name: str, port: int) -> list[Any]:
    """Ask the system's resolver: /etc/hosts, then its name servers."""
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The URLs that a name was resolved to; none if that failed, and why."""

    urls: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class DnsName:
    """``dns://NAME:PORT``: an instance at each address of a name, all at one port, without TLS.

    Raises `InvalidValue` for any other text.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.text)
            sound = parts.scheme == "dns" and parts.hostname and parts.port
        except ValueError:  # a port that is none
            sound = False
        if not sound or self.text != f"dns://{parts.netloc}" or "@" in self.text:
            raise InvalidValue(f"instances are discovered at dns://NAME:PORT, got {self.text!r}")

    def resolve(self, resolver: Resolver) -> Resolution:
        """Ask for the addresses. Blocks for as long as the system's resolver does.

        Without an address it has failed: a service in which nobody is ready looks like this, and so
        does a name server that has lost its data. Of a name with addresses of both families those
        of IPv4 count, as they belong to the same instances.
        """
        parts = urlsplit(self.text)
        assert parts.hostname is not None
        assert parts.port is not None
        try:
            answers = resolver(parts.hostname, parts.port)
        except (OSError, UnicodeError) as error:
            return Resolution(why=str(error))
        for family, form in ((socket.AF_INET, "{}"), (socket.AF_INET6, "[{}]")):
            addresses = {address[0] for of, _, _, _, address in answers if of == family}
            hosts = sorted(host for host in addresses if "%" not in host)  # an address of one link
            if hosts:
                return Resolution(tuple(f"http://{form.format(h)}:{parts.port}" for h in hosts))
        return Resolution(why="the name has no address")

    async def resolved(self, resolver: Resolver) -> Resolution:
        """Resolve in a thread of its own, since it may take half a minute.

        Nothing waits for the thread, not even the end of the process.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Resolution] = loop.create_future()

        def ask() -> None:
            resolution = self.resolve(resolver)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(
                    lambda: None if answer.done() else answer.set_result(resolution)
                )

        threading.Thread(target=ask, name=f"resolve {self.text}", daemon=True).start()
        return await answer


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAddresses:
    """Where instances publish KV events and resend missed ones.

    ``events`` and ``replay`` are patterns, in which ``{host}`` and ``{port}`` stand for those of
    the instance's URL; "" for none. ``listed`` has the addresses of some instances by URL instead.
    With ``ranks``, the ports of each rank are one above those of the rank before.

    Raises `InvalidValue` for ranks out of range, and for patterns that give no address.
    """

    events: str = ""
    replay: str = ""
    listed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ranks: int = 1

    def __post_init__(self) -> None:
        whole("--ranks", self.ranks, 1, 1024)
        for url in (*self.listed, "http://host:1"):
            self.sources(url)

    def sources(self, url: str) -> tuple[Source, ...]:
        """Return the sources of an instance. Raises `InvalidValue` for addresses that are none."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        port = str(parts.port or (443 if parts.scheme == "https" else 80))
        events, replay = (
            pattern.replace("{host}", host).replace("{port}", port)
            for pattern in self.listed.get(url, (self.events, self.replay))
        )
        if not events:
            return ()
        return tuple(
            Source(url, _of_rank(events, rank), _of_rank(replay, rank) or None)
            for rank in range(self.ranks)
        )


def _of_rank(address: str, rank: int) -> str:
    """Return the address of a rank: as in vLLM, each rank's port is one above the last."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank and port.isdecimal() else address


@dataclass(slots=True, eq=False)
class _Member:
    """An instance, where it is known from, and since when it is leaving."""

    origins: set[str]
    sources: tuple[Source, ...]
    left_at: float | None = None


class Membership:
    """Adds instances to the router and its parts, and removes them.

    ``names`` are resolved every ``every_s`` seconds by ``resolver``. An instance stays as long as
    one of its origins has it: the options, or a name. One that leaves is drained: it gets no new
    requests, and those that run there end. It is forgotten, index and all, once none runs and it
    has been gone for ``keep_s`` seconds. If it returns before, nothing is lost: its events were
    followed. If it returns later, a snapshot or a replay tells what it holds.

    Raises `InvalidValue` for seconds that are not above 0. Thread safety: none; for the event loop.
    """

    def __init__(
        self,
        router: PrefixRouter,
        upstreams: Upstreams,
        reader: EventReader | None = None,
        *,
        addresses: EventAddresses | None = None,
        names: Sequence[DnsName] = (),
        every_s: float = 5.0,
        resolver: Resolver = resolve,
        keep_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < every_s < float("inf"):
            raise InvalidValue(f"every_s is a number of seconds above 0, got {every_s}")
        self._router = router
        self._upstreams = upstreams
        self._reader = reader
        self._addresses = addresses or EventAddresses()
        self._names = names
        self._every_s = every_s
        self._resolver = resolver
        self._keep_s = keep_s
        self._clock = clock
        self._listed: dict[str, frozenset[str]] = {}  # origin → what it named last
        self._failing: set[str] = set()
        self._members: dict[str, _Member] = {}
        self.on_resolved: Callable[[str, Resolution], None] = lambda name, resolution: None
        """Called with each name that was resolved, and what was found."""
        for name in upstreams.names:
            router.add(name)
            self._members[name] = _Member({_OPTIONS}, self._addresses.sources(name))

    async def run(self) -> None:
        """Resolve names and forget instances that have left, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._follow(name))
            while True:
                await asyncio.sleep(0.0 if self.sweep() else _SWEEP_S)

    async def _follow(self, name: DnsName) -> None:
        while True:
            self.resolved(name.text, await name.resolved(self._resolver))
            await asyncio.sleep(self._every_s)

    # --- changes -----------------------------------------------------------------------------

    def resolved(self, origin: str, resolution: Resolution) -> None:
        """Take over what a name was resolved to. After a failure, what is known stays."""
        self.on_resolved(origin, resolution)
        before, now = self._listed.get(origin, frozenset()), frozenset(resolution.urls)
        if not now:
            if origin not in self._failing:
                why = resolution.why
                log.warning(
                    "%s is not resolved: %s; its %d instances stay", origin, why, len(before)
                )
            self._failing.add(origin)
            return
        if origin in self._failing:
            log.info("%s is resolved again", origin)
            self._failing.discard(origin)
        self._listed[origin] = now
        for url in sorted(before - now):
            self._leave(url, origin)
        left_out = ""
        for url in sorted(now):
            member = self._members.get(url)
            if member is not None and origin in member.origins:
                continue
            try:
                self._join(url, origin)
            except InvalidValue as error:
                left_out = f"{url} is left out: {error}"
        if left_out and now != before:
            log.error("%s: %s", origin, left_out)

    def sweep(self) -> bool:
        """Forget the instances that have left, where no request runs any more.

        In steps, so that requests go on; returns whether there is more to do at once.
        """
        now, more = self._clock(), False
        for name, member in list(self._members.items()):
            if member.left_at is None or now - member.left_at < self._keep_s:
                continue
            if self._router.load(name)[0]:
                continue
            if self._reader is not None and member.sources:
                self._reader.unfollow(name)  # first, so that no event of it comes afterwards
            member.sources = ()
            if more or self._router.shrink(name, _STEP):
                more = True
                continue
            log.info("%s is forgotten", name)
            del self._members[name]
            self._upstreams.remove(name)
            self._router.remove(name)
        return more

    def _join(self, url: str, origin: str) -> None:
        check_url(url)
        member = self._members.get(url)
        if member is None and len(self._members) >= _MOST:
            raise InvalidValue(f"there are {_MOST:,} instances; a router takes no more")
        sources = self._addresses.sources(url)
        self._upstreams.add(url, proven=False)
        self._router.add(url)
        if member is None:
            member = self._members[url] = _Member(set(), ())
            log.info("%s joins (%s)", url, origin)
        elif member.left_at is not None:
            log.info("%s stays (%s)", url, origin)
        member.origins.add(origin)
        member.left_at = None
        if self._reader is not None and sources != member.sources:
            self._reader.unfollow(url)
            self._router.clear(url)
            self._reader.follow(sources)
        member.sources = sources

    def _leave(self, url: str, origin: str) -> None:
        member = self._members.get(url)
        if member is None:
            return
        member.origins.discard(origin)
        if not member.origins and member.left_at is None:
            log.info("%s leaves: no new requests", url)
            member.left_at = self._clock()
            self._upstreams.health.drain(url)
