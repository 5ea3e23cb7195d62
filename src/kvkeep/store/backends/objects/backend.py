"""Records in an object store: S3 and what speaks like it, Google Cloud Storage, Azure Blob.

    s3://bucket/prefix?endpoint=https://minio.local:9000&region=eu-central-1&size=2TiB
    gs://bucket/prefix
    az://container/prefix

A record is one object, ``<prefix>/<space in hex>/<block key in hex>``. Credentials come from where
the cloud's own tools look for them (environment, profile files, instance metadata), never from
the URL.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from kvkeep.core.errors import BackendFailed, InvalidValue, require
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import Backend, Listed, Room
from kvkeep.store.backends.objects.usage import UsageLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore import GetResult
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from kvkeep.store.backends.objects.usage import Move
    from kvkeep.store.backends.urls import TierURL

    Opener = Callable[[float], ObjectStore]

__all__ = ["AzureBackend", "GoogleBackend", "ObjectBackend", "S3Backend"]

_PIECE = 256 << 10
"""Bytes that come over from the network at once; larger pieces are copied once more on the way."""
_AT_ONCE = 16
"""Requests at once where one call is about many blocks."""
_NOTED = 64
"""Notes on namespaces that are read; each takes a request."""
_NOTE_BYTES = 1 << 14
_SPACE = re.compile(f"[0-9a-f]{{{2 * SPACE_BYTES}}}")
_PAGE = 1000
"""Objects in one answer of a listing, and names in one request to delete."""
_HEX = re.compile(f"[0-9a-f]{{{2 * SPACE_BYTES}}}/[0-9a-f]{{{2 * (BLOCK_ID_BYTES - SPACE_BYTES)}}}")


class ObjectBackend(Backend):
    """Records as objects of an ``obstore`` store.

    Args:
        store: a store of obstore, or what makes one for a time-out in seconds (at the first use,
            and again when `timeout` was changed).
        prefix: stands before every name.
        capacity: bytes to hold at most. It is counted from a listing at the first put and from
            what is put and deleted here; what others put meanwhile is not seen, so it is exact for
            one writer alone.
        name: what `describe` says.

    Notes:
        Thread safe. A put is one request, so it is there whole or not at all, and an upload that
        breaks leaves nothing behind that is paid for. A call ends in about `timeout` seconds: a
        request may take 0.8 of it, and one that failed in the first fifth is tried again.
        `sizes` and `delete` ask for each block, `_AT_ONCE` of them at a time: such a store has no
        question about many. A record that others overwrite while it is read is read whole.
    """

    scheme: ClassVar[str] = "object"
    shared = True

    def __init__(
        self,
        store: ObjectStore | Opener,
        *,
        prefix: str = "",
        capacity: int | None = None,
        name: str = "",
    ) -> None:
        self._obstore = require("obstore", "objects")
        self._base_error: type[Exception] = require("obstore.exceptions", "objects").BaseError
        self._open: Opener = store if callable(store) else lambda timeout: store
        self._opened: tuple[float, ObjectStore] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._prefix = prefix.strip("/")
        self._notes = f"{self._prefix}/spaces/" if self._prefix else "spaces/"
        self._name = name or f"{self.scheme}://{self._prefix}"
        self.capacity = capacity
        self._ledger = None if capacity is None else UsageLedger(capacity, self._name, self.list)
        # It keeps the very buffer it is given, and ours is used again: it gets a copy.
        memory = require("obstore.store", "objects").MemoryStore
        self._copies = isinstance(store, memory)

    @classmethod
    def from_url(cls, url: TierURL) -> ObjectBackend:
        """Open ``s3://``, ``gs://`` or ``az://`` with its options; nothing is asked for yet."""
        kinds: dict[str, type[_CloudBackend]] = {
            kind.scheme: kind for kind in (S3Backend, GoogleBackend, AzureBackend)
        }
        if url.scheme not in kinds:
            raise InvalidValue(f"{url.safe}: an object store is one of {', '.join(kinds)}")
        return kinds[url.scheme].from_url(url)

    def put(self, block: bytes, record: memoryview) -> None:
        """Send ``record``; in place at once, when all of it has arrived."""
        move = None if self._ledger is None else self._ledger.putting(block, len(record))
        with self._counted(move), self._translated("put"):
            self._obstore.put(
                self._store(),
                self._path(block),
                bytes(record) if self._copies else record,
                use_multipart=False,
            )

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Stream the record into the room; one copy from what the network brought."""
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
            for piece in answer.stream(_PIECE):
                end = at + len(piece)
                if end > size:
                    break
                into[at:end] = memoryview(piece)
                at = end
            else:
                end = at
        if end != size:
            raise BackendFailed(f"{self._name}: {end} bytes came of a record of {size}")
        return into

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Ask for each block, several at once."""
        with self._translated("sizes"):
            store = self._store()
            if len(blocks) < 2:
                return [self._size(store, block) for block in blocks]
            asked = [self._pool().submit(self._size, store, block) for block in blocks]
            _, unasked = wait(asked, return_when=FIRST_EXCEPTION)
            for one in unasked:  # one failed: the others would fail too, a time-out each
                one.cancel()
            for one in asked:
                if one.done() and not one.cancelled():
                    one.result()
            return [one.result() for one in asked]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Ask which are there, then delete those."""
        blocks = list(dict.fromkeys(blocks))
        sizes = self.sizes(blocks)
        there = {block: size for block, size in zip(blocks, sizes, strict=True) if size is not None}
        names = [self._path(block) for block in there]
        move = None if self._ledger is None else self._ledger.deleting(blocks)
        with self._counted(move), self._translated("delete"):
            for at in range(0, len(names), _PAGE):
                self._take(names[at : at + _PAGE])
        return sum(there.values())

    def list(self) -> Iterator[Listed]:
        """All objects with our kind of name, when they were written last; a page at a time."""
        with self._translated("list"):
            prefix = self._prefix or None
            pages = self._obstore.list(self._store(), prefix, chunk_size=_PAGE)
        while True:
            with self._translated("list"):
                page = next(pages, None)
            if page is None:
                return
            for found in page:
                name = found["path"].removeprefix(f"{self._prefix}/" if self._prefix else "")
                if _HEX.fullmatch(name):  # others may keep things here too
                    block = bytes.fromhex(name.replace("/", ""))
                    yield Listed(block, found["size"], found["last_modified"].timestamp())

    def note_space(self, space: bytes, note: bytes) -> None:
        """An object ``spaces/<space in hex>``; it is not counted in the capacity."""
        with self._translated("put"):
            name = f"{self._notes}{space.hex()}"
            self._obstore.put(self._store(), name, bytes(note), use_multipart=False)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """The objects below ``spaces/``, as far as they can be notes."""
        notes: dict[bytes, bytes] = {}
        with self._translated("list"):
            store = self._store()
            pages = self._obstore.list(store, self._notes, chunk_size=_NOTED)
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
        """Bytes held, where there is a capacity to count for; else nobody counts them."""
        return None if self._ledger is None else self._ledger.used()

    def close(self) -> None:
        """Let go of connections and threads."""
        with self._lock:
            self._closed = True
            self._opened = None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)  # what is asked still gets its answer, or its time-out

    def describe(self) -> str:
        """The bucket and prefix."""
        return self._name

    def _path(self, block: bytes) -> str:
        name = f"{block[:SPACE_BYTES].hex()}/{block[SPACE_BYTES:].hex()}"
        return f"{self._prefix}/{name}" if self._prefix else name

    def _store(self) -> ObjectStore:
        """The store, with time-outs of now: they cannot be changed later on."""
        with self._lock:
            if self._closed:
                raise BackendFailed(f"{self._name} is closed")
            if self._opened is None or self._opened[0] != self.timeout:
                self._opened = (self.timeout, self._open(self.timeout))
            return self._opened[1]

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise BackendFailed(f"{self._name} is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_ONCE, "kvkeep-objects")
            return self._threads

    def _size(self, store: ObjectStore, block: bytes) -> int | None:
        try:
            size: int = self._obstore.head(store, self._path(block))["size"]
        except FileNotFoundError:
            return None
        return size

    def _take(self, names: Sequence[str]) -> None:
        """Delete what is there by these names; somebody else may be doing the same."""
        try:
            self._obstore.delete(self._store(), [*names])
        except FileNotFoundError:  # a store that minds, and has stopped at this one
            for name in names:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store(), name)

    @contextmanager
    def _counted(self, move: Move | None) -> Iterator[None]:
        """Tell the ledger how ``move`` ended."""
        if self._ledger is None or move is None:
            yield
            return
        try:
            yield
        except BaseException:
            self._ledger.failed(move)
            raise
        self._ledger.done(move)

    @contextmanager
    def _translated(self, doing: str, missing: type[Exception] | None = None) -> Iterator[None]:
        """Turn what obstore raises into `BackendFailed`; ``missing`` goes through as it is."""
        try:
            yield
        except BackendFailed:
            raise
        except (self._base_error, OSError, ValueError, RuntimeError) as error:
            if missing is not None and isinstance(error, missing):
                raise
            raise BackendFailed(f"{self._name}: {doing}: {_short(error)}") from error


class _CloudBackend(ObjectBackend):
    """What is reached by a URL: a bucket of a cloud, or of what speaks its protocol."""

    store: ClassVar[str]
    options: ClassVar[dict[str, str]]
    """Which of obstore's settings an option is."""

    @classmethod
    def from_url(cls, url: TierURL) -> ObjectBackend:
        """Take the options; see `ObjectBackend.from_url`."""
        if not url.host or url.port is not None:
            raise InvalidValue(
                f"{url.safe}: a bucket is needed, as in {cls.scheme}://bucket/prefix; "
                "a server of your own goes into ?endpoint=http://host:port"
            )
        if url.username or url.password:
            raise InvalidValue(
                f"{url.safe}: credentials are not taken from the URL, but from the environment "
                "(AWS_ACCESS_KEY_ID …) or the cloud's own configuration"
            )
        settings: dict[str, Any] = {}
        for option, setting in cls.options.items():
            if (value := url.text(option)) is not None:
                settings[setting] = value
        endpoint = settings.get(cls.options["endpoint"], "")
        if endpoint and not re.fullmatch(r"https?://[^@/?#]+/?[^@?#]*", endpoint):
            raise InvalidValue(f"endpoint= in {url.safe}; one is http://host:port or https://host")
        if url.choice("anonymous", ("yes", "no"), "no") == "yes":
            settings["skip_signature"] = True
        capacity = url.size("size")
        url.finish()
        opener = cls._opener(url.place, settings, plain=endpoint.startswith("http://"))
        try:
            opener(cls.timeout)  # talks to nobody, and sees what is missing
        except (require("obstore.exceptions", "objects").BaseError, ValueError) as error:
            raise InvalidValue(f"{url.safe} cannot be opened: {_short(error)}") from error
        return cls(opener, prefix=url.path, capacity=capacity, name=url.safe)

    @classmethod
    def _opener(cls, bucket: str, settings: dict[str, Any], *, plain: bool) -> Opener:
        kind = getattr(require("obstore.store", "objects"), cls.store)

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


class S3Backend(_CloudBackend):
    """``s3://bucket/prefix``: Amazon S3, MinIO, Ceph, R2 and others that speak like it."""

    scheme = "s3"
    store = "S3Store"
    options: ClassVar = {"endpoint": "endpoint", "region": "region"}

    @classmethod
    def _opener(cls, bucket: str, settings: dict[str, Any], *, plain: bool) -> Opener:
        # Hashing what is sent takes four times as long as sending it, and says nothing that the
        # checksum of the record does not.
        return super()._opener(bucket, {"unsigned_payload": True, **settings}, plain=plain)


class GoogleBackend(_CloudBackend):
    """``gs://bucket/prefix``: Google Cloud Storage."""

    scheme = "gs"
    store = "GCSStore"
    options: ClassVar = {"endpoint": "base_url"}


class AzureBackend(_CloudBackend):
    """``az://container/prefix``: Azure Blob; the account comes from the environment."""

    scheme = "az"
    store = "AzureStore"
    options: ClassVar = {"endpoint": "endpoint"}


def _short(error: BaseException) -> str:
    """The first line of an error, without the queries of URLs: those may be signatures."""
    lines = chain(str(error).strip().splitlines(), [type(error).__name__])
    return re.sub(r"\?[^\s)\"']*", "?…", next(line for line in lines if line))[:300]
