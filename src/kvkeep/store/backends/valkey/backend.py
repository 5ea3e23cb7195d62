"""`ValkeyBackend`: records as string values."""

from __future__ import annotations

import re
import ssl
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom, reason
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import Backend, Listed, Room
from kvkeep.store.backends.valkey.nodes import Address, Nodes, Number
from kvkeep.store.backends.valkey.wire import (
    MAX_VALUE,
    Answer,
    Garbled,
    Lost,
    ServerError,
    TimedOut,
    Wire,
    around_value,
    command,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends.urls import TierURL
    from kvkeep.store.backends.valkey.nodes import Topology

__all__ = ["ValkeyBackend", "ValkeyOptions"]

_FORMAT: Final = b"1"
_NOTED: Final = 256  # notes on namespaces, at most
_SCANNED: Final = 500  # keys that a server visits for each SCAN


class ValkeyBackend(Backend):
    """Records on a Valkey or Redis server, or spread over a cluster of them.

        valkey://[user:password@]host[:6379][/database][?option=value…]      valkeys:// with TLS

    =================  ===========================================================================
    ``cluster``        ``auto`` (ask the server), ``yes``, ``no``
    ``expire``         ``7d``: the server deletes records that were neither put nor touched so long
    ``prefix``         ``kvkeep``: prefix of all keys
    ``connections``    4: maximum connections to each node
    ``password_file``  file with the password, to keep it out of the URL
    ``ca``             file with certificates to trust, instead of the system's
    ``cert``, ``key``  files with the client certificate, for a server that requires one
    =================  ===========================================================================

    The server limits its memory: set ``maxmemory``, and ``maxmemory-policy allkeys-lru`` so that it
    evicts. With ``noeviction`` a full server makes `put` raise `OutOfRoom`. The server also decides
    what survives its restart (``appendonly``, ``save``); `flush` does nothing.

    Keys are ``prefix:1:space:key`` in hexadecimal, without hash tags: a cluster spreads the blocks
    of a prompt over its nodes.

    The first call connects; after a failure later calls connect again. A call ends within
    ``timeout``, unless resolving the host's name takes longer. Only redirections are retried.

    Thread safety: ``connections`` calls to a node run at once, others wait for a connection.
    """

    scheme = "valkey"
    shared = True

    def __init__(self, options: ValkeyOptions) -> None:
        self.options = options
        self.timeout = 5.0
        self._tls = options.tls_context()
        self._prefix = f"{options.prefix}:".encode() + _FORMAT + b":"
        self._nodes = Nodes(
            (options.host, options.port), options.cluster, options.connections, self._dial
        )

    @classmethod
    def from_url(cls, url: TierURL) -> ValkeyBackend:
        """Take a URL as shown above. Does not connect, so the server may be down."""
        return cls(ValkeyOptions.from_url(url))

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Check ``url``, and read the files that it names; the server limits its memory itself."""
        ValkeyOptions.from_url(url).tls_context()
        return False

    def put(self, block: bytes, record: memoryview) -> None:
        """Send ``record`` without a copy; see `Backend.put`."""
        size = record.nbytes
        if size > MAX_VALUE:
            place = f"{self.describe()}, where a value has {format_bytes(MAX_VALUE)} at most,"
            raise OutOfRoom(size, place)
        name = self._name(block)
        expiry: Sequence[bytes | int] = (
            [] if self.options.expire is None else [b"PX", self._expire_ms()]
        )
        head, end = around_value([b"SET", name], size, expiry)
        with self._translated():
            try:
                self._nodes.call(name, [head, record, end], Wire.expect_ok, self._deadline())
            except ServerError as error:
                if error.code == "OOM":
                    raise OutOfRoom(size, self.describe()) from error
                raise

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Read a record into ``room(size)`` without a copy; see `Backend.get`.

        If ``room`` raises, the connection is closed, because the record is still on it.
        """
        name = self._name(block)

        def read(wire: Wire) -> memoryview | None:
            size = wire.value_size()
            if size is None:
                return None
            out = room(size)
            wire.fill(out)
            return out

        with self._translated():
            return self._nodes.call(name, [command(b"GET", name)], read, self._deadline())

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return sizes in bytes, by one exchange with each node."""
        return [length or None for _, length in self._each(blocks, [(b"STRLEN",)])]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Delete records, and any other type of value under their keys."""
        return sum(
            first if unlinked and isinstance(first, int) else 0
            for first, unlinked in self._each(blocks, [(b"STRLEN",), (b"UNLINK",)])
        )

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Restart the time to ``expire``, or count a use in the server's LRU; always as of now."""
        expiring = self.options.expire is not None
        self._each(blocks, [(b"PEXPIRE", self._expire_ms()) if expiring else (b"TOUCH",)])

    def part(self, block: bytes) -> str:
        """Return ``host:port`` of the node that has ``block``; "" for a single server."""
        address = self._nodes.known_node_of(self._name(block))
        return "" if address is None else f"{address[0]}:{address[1]}"

    def list(self) -> Iterator[Listed]:
        """Yield every record; records put or deleted meanwhile may be missing.

        The last use is the server's; the present time if it has none (LFU policies). Servers before
        7.2 count a listing as a use.
        """
        seen: set[bytes] = set()
        with self._translated():
            primaries = self._nodes.primaries(self._deadline())
        for address in primaries:
            cursor = b"0"
            while True:
                with self._translated():
                    cursor, found = self._scan(address, cursor)
                for one in found:
                    if one.block not in seen:  # SCAN may return a key twice
                        seen.add(one.block)
                        yield one
                if cursor == b"0":
                    break

    def note_space(self, space: bytes, note: bytes) -> None:
        """Set a field of the hash ``prefix:1:spaces``, unless it has 256."""
        deadline = self._deadline()
        with self._translated():
            if self._notes_call(deadline, b"HLEN") in range(_NOTED):
                self._notes_call(deadline, b"HSETNX", space.hex().encode(), note)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """Return the fields of the hash ``prefix:1:spaces``, unless it has more than 256."""
        deadline = self._deadline()
        with self._translated():
            if self._notes_call(deadline, b"HLEN") not in range(1, _NOTED + 1):
                return {}
            answer = self._notes_call(deadline, b"HGETALL")
        notes: dict[bytes, bytes] = {}
        fields = answer if isinstance(answer, list) else []
        for space, note in zip(fields[::2], fields[1::2], strict=False):
            with suppress(ValueError):
                if isinstance(space, bytes) and isinstance(note, bytes):
                    notes[bytes.fromhex(space.decode("ascii"))] = note
        return notes

    def _notes_call(self, deadline: float, verb: bytes, *words: bytes) -> Answer:
        name = self._prefix + b"spaces"
        return self._nodes.call(name, [command(verb, name, *words)], Wire.expect, deadline)

    def memory(self) -> Sequence[ServerMemory]:
        """Return what each primary says of its memory. Raises `BackendFailed`."""
        found = []
        with self._translated():
            deadline = self._deadline()
            for address in self._nodes.primaries(deadline):
                with self._nodes.wire(address, deadline) as wire:
                    wire.send(command(b"INFO", b"memory"))
                    found.append(read_memory(wire.expect(), f"{address[0]}:{address[1]}"))
        return found

    def close(self) -> None:
        """Close all connections."""
        self._nodes.close()

    def describe(self) -> str:
        """Return ``valkey://host:port/database``."""
        options = self.options
        host = f"[{options.host}]" if ":" in options.host else options.host
        scheme = "valkeys" if options.tls else "valkey"
        return f"{scheme}://{host}:{options.port}/{options.database}"

    def _scan(self, address: Address, cursor: bytes) -> tuple[bytes, Sequence[Listed]]:
        """Return the cursor for the next call and the records that one SCAN of a node finds."""
        pattern = self._prefix + b"*"
        words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCANNED, b"TYPE", b"string")
        with self._nodes.wire(address, self._deadline()) as wire:
            wire.send(command(*words))
            cursor, names = _scanned(wire.expect())
            blocks = {name: block for name in names if (block := self._block(name))}
            wire.send(
                command(b"CLIENT", b"NO-TOUCH", b"ON"),  # a listing is not a use
                *(command(b"OBJECT", b"IDLETIME", n) + command(b"STRLEN", n) for n in blocks),
                command(b"CLIENT", b"NO-TOUCH", b"OFF"),
            )
            wire.answer()  # an error on servers without this command
            pairs = [(block, wire.answer(), wire.answer()) for block in blocks.values()]
            wire.answer()
        now = time.time()
        return cursor, [
            Listed(block, length, now - idle if isinstance(idle, int) else now)
            for block, idle, length in pairs
            if isinstance(length, int) and length > 0  # else deleted meanwhile
        ]

    def _each(
        self, blocks: Sequence[bytes], commands: Sequence[tuple[bytes | int, ...]]
    ) -> Sequence[tuple[Number, int]]:
        """Send commands, each ``(verb, words after the key…)``, for every block.

        Returns the first and the last answer for each block. Only an error as the last one is
        raised: a value that STRLEN cannot measure can still be deleted.
        """
        names = [self._name(block) for block in blocks]
        texts = [[command(verb, name, *rest) for verb, *rest in commands] for name in names]
        with self._translated():
            answers = self._nodes.call_numbers(names, texts, self._deadline())
            for numbers in answers:
                if isinstance(numbers[-1], ServerError):
                    raise numbers[-1]
        return [(numbers[0], cast("int", numbers[-1])) for numbers in answers]

    def _name(self, block: bytes) -> bytes:
        assert len(block) == BLOCK_ID_BYTES
        space, key = block[:SPACE_BYTES], block[SPACE_BYTES:]
        return self._prefix + space.hex().encode() + b":" + key.hex().encode()

    def _block(self, name: bytes) -> bytes | None:
        """Return the block whose key is ``name``; None for foreign keys."""
        space, _, key = name.removeprefix(self._prefix).partition(b":")
        try:
            block = bytes.fromhex(space.decode() + key.decode())
        except ValueError:
            return None
        return block if len(block) == BLOCK_ID_BYTES and self._name(block) == name else None

    def _expire_ms(self) -> int:
        assert self.options.expire is not None
        return max(1, round(self.options.expire * 1000))

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of connections and servers into `BackendFailed`."""
        try:
            yield
        except TimedOut as error:
            text = f"{self.describe()} did not answer in {self.timeout:g} s: {error}"
            raise BackendFailed(text) from error
        except (Lost, ServerError) as error:
            raise BackendFailed(f"{self.describe()}: {error}") from error

    def _dial(self, address: Address, deadline: float) -> Wire:
        options = self.options
        wire = connect(address, deadline, self._tls)
        try:
            if options.password is not None or options.username is not None:
                user = [options.username.encode()] if options.username is not None else []
                wire.send(command(b"AUTH", *user, (options.password or "").encode()))
                wire.expect_ok()
            if options.database:
                wire.send(command(b"SELECT", options.database))
                wire.expect_ok()
        except BaseException:
            wire.close()
            raise
        return wire


def _scanned(answer: Answer) -> tuple[bytes, list[bytes]]:
    match answer:
        case [bytes(cursor), list(names)] if all(isinstance(name, bytes) for name in names):
            return cursor, cast("list[bytes]", names)
    raise Garbled("the server's listing cannot be read")


class ServerMemory(NamedTuple):
    """The memory of the server ``node``.

    Attributes:
        node: ``host:port``.
        used: bytes that it uses.
        limit: its ``maxmemory`` in bytes; 0: none.
        policy: its ``maxmemory-policy``.
    """

    node: str
    used: int
    limit: int
    policy: str


def read_memory(answer: Answer, node: str) -> ServerMemory:
    """Read the answer to ``INFO memory``. Raises `Garbled` if it lacks a field."""
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else ""
    fields = dict(re.findall(r"^(\w+):(\S*)\r?$", text, re.MULTILINE))
    try:
        return ServerMemory(
            node, int(fields["used_memory"]), int(fields["maxmemory"]), fields["maxmemory_policy"]
        )
    except (KeyError, ValueError) as error:
        raise Garbled("the server does not tell its memory") from error


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
