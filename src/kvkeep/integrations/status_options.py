"""Options for the status of a cache inside an engine: where it is served, and who may read it."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvkeep.core.errors import InvalidValue, reason, told
from kvkeep.integrations.options import EngineOptions, option, text_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

__all__ = [
    "StatusAddress", "StatusOptions", "address_text", "bound_or_none", "key_in", "key_of",
    "loopback_names",
]  # fmt: skip

_LOG = logging.getLogger("kvkeep.status")
_LOOPBACK: Final = "127.0.0.1"
_MOST_PORT: Final = 65_535
_KEY_BYTES: Final = 4096


class StatusAddress(NamedTuple):
    """Where the status is served; port 0: any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> StatusAddress:
        """Return the address that `address_text` returned."""
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def of_rank(self, rank: int) -> StatusAddress:
        """Return the address for one of several engines on a machine: the ports follow each other.

        Raises:
            InvalidValue: there is no such port.
        """
        if self.port and self.port + rank > _MOST_PORT:
            raise InvalidValue(
                f"status is port {self.port}, and rank {rank} would have {self.port + rank}; "
                f"ports go up to {_MOST_PORT}"
            )
        return self._replace(port=self.port + rank if self.port else 0)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_text(name: str, value: object) -> str:
    """Return an address given as "host:port", ":port" or "port" with its host; "" as it is.

    Without a host it is the loopback address, so that no other machine can reach it.

    Raises:
        InvalidValue: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    text = text_of(name, value)
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    plain = host.isascii() and host.isprintable() and not set(host) & set(" /@[]")
    if not plain or not (port.isascii() and port.isdigit()) or int(port) > _MOST_PORT:
        raise InvalidValue(f'{name} is {told(value)}; an address is needed, as "127.0.0.1:8201"')
    return str(StatusAddress(host or _LOOPBACK, int(port)))


def key_of(name: str, value: object) -> str:
    """Return an API key; the message of an error does not quote it.

    Raises:
        InvalidValue: it is not one line of printable ASCII.
    """
    key = value.strip() if isinstance(value, str) else None
    if key is None or (value and not key) or not (key.isascii() and key.isprintable()):
        raise InvalidValue(f"{name} is no key: one line of printable ASCII is needed")
    return key


def key_in(name: str, value: object) -> str:
    """Return the key in the file ``value``; "" for an empty text.

    Raises:
        InvalidValue: the file cannot be read, or holds no key.
    """
    path = text_of(name, value)
    if not path:
        return ""
    try:
        with Path(path).open("rb") as opened:
            key = opened.read(_KEY_BYTES + 1).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{name}: cannot read a key from {path}: {reason(error)}") from error
    if not key or len(key) > _KEY_BYTES or not (key.isascii() and key.isprintable()):
        raise InvalidValue(f"{name}: {path} holds no key: it is one line of printable ASCII")
    return key


@dataclass(frozen=True, slots=True)
class StatusOptions(EngineOptions):
    """Options of an engine that can serve a status.

    Attributes:
        status: address at which it is told of tiers and requests; empty: nowhere. Of several
            data-parallel ranks, the ports follow each other.
        status_key: what readers of the status must send; empty: nothing.
        status_key_file: the key that is in a file, instead.
    """

    status: str = option("", address_text)
    status_key: str = option("", key_of, shown=False)
    status_key_file: str = option("", key_in, shown=False)

    @classmethod
    def from_json(cls, given: Mapping[str, object], where: str) -> Self:
        """See `EngineOptions.from_json`.

        Raises:
            InvalidValue: also if there are two keys, or one and no address.
        """
        options = super(StatusOptions, cls).from_json(given, where)
        if options.status_key and options.status_key_file:
            raise InvalidValue("status_key and status_key_file are given; leave one of them out")
        if options.key is not None and not options.status:
            raise InvalidValue('a key is given, and no address: add "status": "127.0.0.1:8201"')
        return options

    @property
    def key(self) -> str | None:
        """The key; None: there is none."""
        return self.status_key or self.status_key_file or None


def loopback_names(host: str) -> frozenset[str] | None:
    """Return the Host headers to accept at ``host``; None: all, as it is no loopback address.

    At a loopback address nothing else is accepted: a web page could reach it under its own name.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return frozenset({"localhost", _LOOPBACK, "::1", host.lower()}) if loopback else None


def bound_or_none(address: StatusAddress) -> socket.socket | None:
    """Return a socket bound to ``address``; None if that fails, with a warning: no status, then."""
    try:
        from kvkeep.serve.http import bind  # noqa: PLC0415 - its packages are an extra

        return bind(address.host, address.port)
    except InvalidValue as error:
        why = str(error).partition(";")[0]
    except ImportError as error:
        why = str(error)
    _LOG.warning("kvkeep serves no status at %s: %s. The engine goes on without", address, why)
    return None
