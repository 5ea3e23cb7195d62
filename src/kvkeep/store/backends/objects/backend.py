"""`ObjectBackend`: records as objects of an object store."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom, require
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import Backend, Listed, Room

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from obstore import GetResult
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from kvkeep.store.backends.urls import TierURL

__all__ = ["ObjectBackend"]

_CHUNK: Final = 256 << 10
"""Bytes received at a time; obstore copies larger chunks once more."""

_AT_ONCE: Final = 16
"""Concurrent requests of one call about many blocks."""

_PAGE: Final = 1000
"""Objects in one page of a listing, and names in one delete request."""

_NOTES_READ: Final = 64
"""Notes on namespaces that are read; each takes a request."""

_NOTE_BYTES: Final = 1 << 14
_SPACE: Final = re.compile(f"[0-9a-f]{{{2 * SPACE_BYTES}}}")
_NAME: Final = re.compile(
    f"[0-9a-f]{{{2 * SPACE_BYTES}}}/[0-9a-f]{{{2 * (BLOCK_ID_BYTES - SPACE_BYTES)}}}"
)
Opener = Callable[[float], "ObjectStore"]
"""Opens a store whose requests end within a timeout in seconds. Does not connect."""


class ObjectBackend(Backend):
    """Records as objects ``<prefix>/<space in hex>/<block key in hex>`` of an ``obstore`` store.

        s3://bucket/prefix?endpoint=https://minio.local:9000&region=eu-central-1&size=2TiB
        gs://bucket/prefix
        az://container/prefix

    Credentials come from where the cloud's own tools look for them (environment, profile files,
    instance metadata), never from the URL.

    Args:
        store: a store of obstore, or a function that opens one for a timeout in seconds. It is
            called at the first use, and again when `timeout` was changed.
        prefix: prefix of all names.
        capacity: maximum bytes held, counted from a listing at the first put and from this
            object's puts and deletes. Later puts by others are missed: exact for one writer only.
        name: what `describe` returns.
        scheme: scheme of the URL.

    A put is one request, so an object is stored whole or not at all, and a broken upload leaves no
    parts that are charged. A call ends in about `timeout` seconds: a request may take 0.8 of it,
    and is retried if it fails within 0.2 of it. `sizes` and `delete` send one request per block,
    16 at once, because object stores cannot look up several at a time. A record that is
    overwritten while it is read is read whole. Thread safety: all methods.
    """

    scheme = "object"
    shared = True

    def __init__(
        self,
        store: ObjectStore | Opener,
        *,
        prefix: str = "",
        capacity: int | None = None,
        name: str = "",
        scheme: str = "object",
    ) -> None:
        self.scheme = scheme
        self._obstore = require("obstore", "objects")
        self._base_error: type[Exception] = require("obstore.exceptions", "objects").BaseError
        self._open: Opener = store if callable(store) else lambda timeout: store
        self._opened: tuple[float, ObjectStore] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()
        prefix = prefix.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._name = name or f"{scheme}://{prefix}"
        self.capacity = capacity
        self._count = None if capacity is None else UsageCount(capacity, self._name, self.list)
        # obstore's own MemoryStore keeps the buffer it is given, which the caller reuses.
        memory = require("obstore.store", "objects").MemoryStore
        self._copies = isinstance(store, memory)

    @classmethod
    def from_url(cls, url: TierURL) -> ObjectBackend:
        """Open ``s3://``, ``gs://`` or ``az://`` with its options. Sends no request yet."""
        opener = opener_of(url)
        capacity = url.size("size")
        url.finish()
        base_error: type[Exception] = require("obstore.exceptions", "objects").BaseError
        try:
            opener(cls.timeout)  # notices settings that are missing
        except (base_error, ValueError) as error:
            raise InvalidValue(f"{url.safe} cannot be opened: {_short(error)}") from error
        return cls(opener, prefix=url.path, capacity=capacity, name=url.safe, scheme=url.scheme)

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Check ``url`` and the settings that the cloud's tools find; send no request."""
        with cls.from_url(url) as opened:
            return opened.capacity is not None

    def put(self, block: bytes, record: memoryview) -> None:
        """Send ``record`` in one request; it is stored when all of it has arrived."""
        with self._counted({block: len(record)}), self._translated("put"):
            self._obstore.put(
                self._store(),
                self._path(block),
                bytes(record) if self._copies else record,
                use_multipart=False,
            )

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Stream the record into the room: one copy of what the network delivers."""
        try:
            with self._translated("get", missing=FileNotFoundError):
                answer: GetResult = self._obstore.get(self._store(), self._path(block))
                size = answer.meta["size"]
        except FileNotFoundError:
            return None
        into = room(size)
        assert len(into) == size, f"a room of {len(into)} bytes for a record of {size}"
        with self._translated("get"):
            at = 0
            for chunk in answer.stream(_CHUNK):
                end = at + len(chunk)
                if end > size:
                    break
                into[at:end] = memoryview(chunk)
                at = end
            else:
                end = at
        if end != size:
            raise BackendFailed(f"{self._name}: {end} bytes received for a record of {size}")
        return into

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return sizes in bytes, by one request per block, several at once."""
        with self._translated("sizes"):
            store = self._store()
            if len(blocks) < 2:
                return [self._size(store, block) for block in blocks]
            # After a failure `map` cancels those that wait: they would fail too, one by one.
            return list(self._pool().map(partial(self._size, store), blocks))

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Look up which blocks exist, then delete those."""
        blocks = list(dict.fromkeys(blocks))
        sizes = self.sizes(blocks)
        there = {block: size for block, size in zip(blocks, sizes, strict=True) if size is not None}
        names = [self._path(block) for block in there]
        with self._counted(dict.fromkeys(blocks, 0)), self._translated("delete"):
            for at in range(0, len(names), _PAGE):
                self._delete(names[at : at + _PAGE])
        return sum(there.values())

    def list(self) -> Iterator[Listed]:
        """Yield all records, page by page; ``used`` is the time of the last put."""
        with self._translated("list"):
            pages = self._obstore.list(self._store(), self._prefix or None, chunk_size=_PAGE)
        while True:
            with self._translated("list"):
                page = next(pages, None)
            if page is None:
                return
            for found in page:
                name = found["path"].removeprefix(self._prefix)
                if _NAME.fullmatch(name):  # the prefix may have foreign objects
                    block = bytes.fromhex(name.replace("/", ""))
                    yield Listed(block, found["size"], found["last_modified"].timestamp())

    def note_space(self, space: bytes, note: bytes) -> None:
        """Put an object ``spaces/<space in hex>``, which does not count against the capacity."""
        with self._translated("put"):
            name = f"{self._prefix}spaces/{space.hex()}"
            self._obstore.put(self._store(), name, bytes(note), use_multipart=False)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """Return the objects below ``spaces/`` that can be notes, 64 at most."""
        notes: dict[bytes, bytes] = {}
        with self._translated("list"):
            store = self._store()
            pages = self._obstore.list(store, f"{self._prefix}spaces/", chunk_size=_NOTES_READ)
            for found in next(pages, []):
                name = found["path"].rpartition("/")[2]
                if found["size"] > _NOTE_BYTES or not _SPACE.fullmatch(name):
                    continue
                with suppress(FileNotFoundError):
                    answer = self._obstore.get(store, found["path"])
                    if answer.meta["size"] <= _NOTE_BYTES:
                        notes[bytes.fromhex(name)] = bytes(answer.bytes())
        return notes

    def used(self) -> int | None:
        """Return the bytes held if there is a capacity, else None: then nothing counts them."""
        return None if self._count is None else self._count.used()

    def close(self) -> None:
        """Release connections and threads; requests under way finish or time out."""
        with self._lock:
            self._closed = True
            self._opened = None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def describe(self) -> str:
        """Return bucket and prefix as a URL."""
        return self._name

    def _counted(self, sizes: Mapping[bytes, int]) -> AbstractContextManager[None]:
        return nullcontext() if self._count is None else self._count.changing(sizes)

    def _path(self, block: bytes) -> str:
        return f"{self._prefix}{block[:SPACE_BYTES].hex()}/{block[SPACE_BYTES:].hex()}"

    def _store(self) -> ObjectStore:
        """Return the store, opened again if `timeout` changed: obstore fixes it at opening."""
        with self._lock:
            self._check_open()
            if self._opened is None or self._opened[0] != self.timeout:
                self._opened = (self.timeout, self._open(self.timeout))
            return self._opened[1]

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            self._check_open()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_ONCE, "kvkeep-objects")
            return self._threads

    def _check_open(self) -> None:
        if self._closed:
            raise BackendFailed(f"{self._name} is closed")

    def _size(self, store: ObjectStore, block: bytes) -> int | None:
        try:
            size: int = self._obstore.head(store, self._path(block))["size"]
        except FileNotFoundError:
            return None
        return size

    def _delete(self, names: Sequence[str]) -> None:
        """Delete objects; other processes may be deleting them too."""
        try:
            self._obstore.delete(self._store(), [*names])
        except FileNotFoundError:  # raised by some stores, which stop at the first missing name
            for name in names:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store(), name)

    @contextmanager
    def _translated(self, doing: str, missing: type[Exception] | None = None) -> Iterator[None]:
        """Turn obstore's errors into `BackendFailed`; ``missing`` passes unchanged."""
        try:
            yield
        except BackendFailed:
            raise
        except (self._base_error, OSError, ValueError, RuntimeError) as error:
            if missing is not None and isinstance(error, missing):
                raise
            raise BackendFailed(f"{self._name}: {doing}: {_short(error)}") from error


def _short(error: BaseException) -> str:
    """Return the first line of an error, without the queries of URLs: they may be signatures."""
    lines = chain(str(error).strip().splitlines(), [type(error).__name__])
    return re.sub(r"\?[^\s)\"']*", "?…", next(line for line in lines if line))[:300]


_CLOUDS: Final = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
"""Class in `obstore.store` by scheme."""


def opener_of(url: TierURL) -> Opener:
    """Return what opens the bucket of ``url``; takes ``endpoint`` and ``region``.

    Raises:
        InvalidValue: a wrong scheme or option, no bucket, or credentials in the URL.
    """
    if url.scheme not in _CLOUDS:
        raise InvalidValue(f"{url.safe}: an object store is one of {', '.join(_CLOUDS)}")
    if not url.host or url.port is not None:
        raise InvalidValue(
            f"{url.safe}: a bucket is needed, as in {url.scheme}://bucket/prefix; "
            "a server of your own goes into ?endpoint=http://host:port"
        )
    if url.username or url.password:
        raise InvalidValue(
            f"{url.safe}: credentials are not taken from the URL, but from the environment "
            "(AWS_ACCESS_KEY_ID …) or the cloud's own configuration"
        )
    endpoint, settings = url.text("endpoint") or "", dict[str, Any]()
    if endpoint:
        settings["base_url" if url.scheme == "gs" else "endpoint"] = endpoint
    if url.scheme == "s3":
        # Signing a payload means hashing it, which takes four times as long as sending it and adds
        # nothing to the checksum in each record.
        settings["unsigned_payload"] = True
        if region := url.text("region"):
            settings["region"] = region
    if endpoint and not re.fullmatch(r"https?://[^@/?#]+/?[^@?#]*", endpoint):
        raise InvalidValue(f"endpoint= in {url.safe}; one is http://host:port or https://host")
    bucket, plain = url.place, endpoint.startswith("http://")
    kind = getattr(require("obstore.store", "objects"), _CLOUDS[url.scheme])

    def open_store(timeout: float) -> ObjectStore:
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout * 0.8),
            "connect_timeout": timedelta(seconds=timeout * 0.4),
            "user_agent": "kvkeep",
        }
        if plain:
            client["allow_http"] = True
        retry: RetryConfig = {
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=timeout * 0.2),
            "backoff": {
                "init_backoff": timedelta(seconds=timeout * 0.01),
                "max_backoff": timedelta(seconds=timeout * 0.05),
            },
        }
        store: ObjectStore = kind(
            bucket, client_options=client, retry_config=retry, config=settings
        )
        return store

    return open_store


class UsageCount:
    """Counts the bytes held, from a listing and from this process's puts and deletes.

    A put counts while it is under way. After a failed call the content is uncertain: the place is
    listed again before the next put.

    Thread safety: all methods. While the place is listed, other calls wait.
    """

    def __init__(self, capacity: int, where: str, listing: Callable[[], Iterable[Listed]]) -> None:
        self._capacity = capacity
        self._where = where
        self._listing = listing
        self._sizes: dict[bytes, int] | None = None  # None: list the place first
        self._held = 0
        self._coming: dict[bytes, int] = {}  # sizes of puts under way
        self._lock = threading.Lock()

    @contextmanager
    def changing(self, sizes: Mapping[bytes, int]) -> Iterator[None]:
        """Count the new ``sizes`` of blocks, which the ``with`` block stores, or deletes (0).

        Raises:
            OutOfRoom: they exceed the capacity.
        """
        puts = {block: size for block, size in sizes.items() if size}
        with self._lock:
            if puts:
                held = self._list()
                more = sum(size - held.get(block, 0) for block, size in puts.items())
                if self._held + more > self._capacity:
                    raise OutOfRoom(sum(puts.values()), self._where)
                self._coming |= puts
                self._set(puts)
        stored = False
        try:
            yield
            stored = True
        finally:
            with self._lock:
                for block in puts:
                    self._coming.pop(block, None)
                if not stored:
                    self._sizes = None
                self._set(dict.fromkeys(sizes.keys() - puts.keys(), 0))

    def used(self) -> int:
        """Return the bytes held; list the store first if its content is uncertain."""
        with self._lock:
            self._list()
            return self._held

    def _list(self) -> dict[bytes, int]:
        if self._sizes is None:
            self._sizes = {one.block: one.size for one in self._listing()} | self._coming
            self._held = sum(self._sizes.values())
        return self._sizes

    def _set(self, sizes: Mapping[bytes, int]) -> None:
        held = self._sizes
        if held is None:
            return
        for block, size in sizes.items():
            self._held += size - held.pop(block, 0)
            if size:
                held[block] = size
