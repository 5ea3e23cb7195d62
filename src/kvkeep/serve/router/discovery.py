"""`DnsName`: instances behind a name whose addresses come and go, such as a headless service."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

    Resolver = Callable[[str, int], list[Any]]

__all__ = ["DnsName", "Resolution", "resolve"]

log = logging.getLogger("kvkeep.router")


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a resolution brought: the URLs of instances; empty if it failed."""

    urls: tuple[str, ...] = ()
    why: str = ""
    """Why it failed."""


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
        hosts = {family: set[str]() for family in (socket.AF_INET, socket.AF_INET6)}
        for family, _, _, _, address in answers:
            if family in hosts and "%" not in address[0]:  # an address of one link only
                hosts[family].add(address[0])
        found = [f"http://{host}:{parts.port}" for host in sorted(hosts[socket.AF_INET])]
        if not found:
            found = [f"http://[{host}]:{parts.port}" for host in sorted(hosts[socket.AF_INET6])]
        return Resolution(tuple(found)) if found else Resolution(why="the name has no address")

    async def follow(
        self,
        every_s: float,
        on_found: Callable[[Resolution], None],
        resolver: Resolver | None = None,
    ) -> None:
        """Resolve again and again, until cancelled; ``on_found`` is called in the event loop.

        Each resolution has a thread of its own, since it may take half a minute: nothing waits for
        it, not even the end of the process.
        """
        loop = asyncio.get_running_loop()
        while True:
            answer: asyncio.Future[Resolution] = loop.create_future()
            asking = threading.Thread(
                target=self._ask,
                args=(resolver or resolve, loop, answer),
                name=f"resolve {self.text}",
                daemon=True,
            )
            asking.start()
            on_found(await answer)
            await asyncio.sleep(every_s)

    def _ask(
        self,
        resolver: Resolver,
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[Resolution],
    ) -> None:
        found = self.resolve(resolver)

        def deliver() -> None:
            if not answer.done():
                answer.set_result(found)

        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver)


def resolve(name: str, port: int) -> list[Any]:
    """Ask the system's resolver: /etc/hosts, then its name servers."""
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
