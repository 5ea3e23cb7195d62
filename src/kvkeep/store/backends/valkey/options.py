"""Options of a Valkey tier, from its URL."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvkeep.core.errors import InvalidValue, reason

if TYPE_CHECKING:
    from kvkeep.store.backends.urls import TierURL
    from kvkeep.store.backends.valkey.nodes import Topology

__all__ = ["ValkeyOptions"]


@dataclass(frozen=True, kw_only=True)
class ValkeyOptions:
    """Address, credentials and use of a server.

    ``expire`` is in seconds; None leaves eviction to the server. ``ca`` is a file with certificates
    to trust (None: the system's), ``cert`` and ``key`` are files with the client certificate. The
    repr shows neither ``username`` nor ``password``.
    """

    host: str
    port: int = 6379
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    cluster: Topology = "auto"
    connections: int = 4
    expire: float | None = None
    prefix: str = "kvkeep"

    @classmethod
    def from_url(cls, url: TierURL) -> ValkeyOptions:
        """Read a URL as documented at `ValkeyBackend`."""
        if url.host is None:
            raise InvalidValue(
                f"{url.safe} names no host; write for example valkey://localhost:6379"
            )
        if url.text("size") is not None:
            raise InvalidValue(
                f"{url.safe} takes no size: the server limits its memory; set its maxmemory, and "
                "maxmemory-policy allkeys-lru"
            )
        place = url.path.strip("/")
        if not re.fullmatch(r"[0-9]{0,9}", place):
            raise InvalidValue(f"{url.safe} ends in {place!r}; a database is a number such as /0")
        prefix = cast("str", url.text("prefix", "kvkeep"))
        if not re.fullmatch(r"[A-Za-z0-9._:/-]{1,100}", prefix):
            raise InvalidValue(f"prefix={prefix} in {url.safe}; use letters, digits and . _ : / -")
        tls = url.scheme in {"valkeys", "rediss"}
        files = {name: _file(url, name) for name in ("ca", "cert", "key")}
        given = [name for name, path in files.items() if path]
        if given and not tls:
            raise InvalidValue(f"{url.safe} has {given[0]}= but no TLS; write valkeys://")
        if files["key"] and not files["cert"]:
            raise InvalidValue(f"{url.safe} has key= without cert=, the certificate it belongs to")
        options = cls(
            host=url.host,
            port=6379 if url.port is None else url.port,
            database=int(place or 0),
            username=url.username,
            password=_password(url),
            tls=tls,
            cluster=cast("Topology", url.choice("cluster", ("auto", "yes", "no"), "auto")),
            connections=url.number("connections", 4, 1, 256),
            expire=url.seconds("expire"),
            prefix=prefix,
            **files,
        )
        if options.cluster == "yes" and options.database:
            raise InvalidValue(f"{url.safe} names a database; a cluster has database 0 only")
        url.finish()
        return options

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, None without TLS. Raises `InvalidValue`."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                # Without a password OpenSSL would prompt on the terminal for an encrypted key.
                context.load_cert_chain(self.cert, self.key, password="")
        except OSError as error:
            files = ", ".join(f for f in (self.ca, self.cert, self.key) if f)
            raise InvalidValue(
                f"certificates and keys cannot be read from {files}: {reason(error)}"
            ) from error
        return context


def _password(url: TierURL) -> str | None:
    path = _file(url, "password_file")
    if path is None:
        return url.password
    if url.password is not None:
        raise InvalidValue(f"{url.safe} has a password and password_file=; use one of them")
    try:
        password = Path(path).read_text("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:  # its text contains bytes of the file
        raise InvalidValue(f"password_file={path} in {url.safe} is not UTF-8 text") from None
    if not password:
        raise InvalidValue(f"password_file={path} in {url.safe} is empty")
    return password


def _file(url: TierURL, name: str) -> str | None:
    """Take an option that names a file; check that the file can be read."""
    path = url.text(name)
    if path is not None:
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise InvalidValue(
                f"{name}={path} in {url.safe} cannot be read: {reason(error)}"
            ) from error
    return path
