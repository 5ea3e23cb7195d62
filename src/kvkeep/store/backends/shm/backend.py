"""`ShmBackend`: records in memory that all processes of a user on a node share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.base import ALIGNMENT, Listed
from kvkeep.store.backends.memory import Draft, InPlaceBackend, Lease
from kvkeep.store.backends.shm import clock
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.arena import SharedArena, check
from kvkeep.store.backends.shm.books import Books
from kvkeep.store.backends.shm.layout import Layout
from kvkeep.store.backends.shm.opening import Warming, check_name, open_arena, path_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends.urls import TierURL

__all__ = ["ShmBackend"]

_LOCK_TIMEOUT: Final = 2.0


class ShmBackend(InPlaceBackend):
    """Records in one arena in shared memory, a file that every process of a node maps.

    Beyond the contract it avoids copies, as `MemoryBackend` does: `reserve` returns memory to write
    a record into, `lease` access to a record in place. A record takes its size, rounded up to
    4 KiB, of ``capacity``.

    What is published survives `kill -9` of any process: see `kvkeep.store.backends.shm.arena`. A
    lease keeps its memory from reuse, in all processes, until its release or the death of its
    process.

    Thread safety: all methods. Cost: about 10 µs for a lease with its release, or a draft with its
    commit, while no other process holds the lock; about 2 and 4 µs for each of many at once
    (`lease_all`, `reserve_all`). A forked process cannot use it: open it again.
    """

    scheme = "shm"
    shared = True
    unit = ALIGNMENT

    def __init__(
        self,
        size: int | None,
        *,
        name: str = "kvkeep",
        directory: str = "/dev/shm",  # noqa: S108 - checked for owner, mode and kind
        records: int | None = None,
        touch: bool = False,
        timeout: float = _LOCK_TIMEOUT,
    ) -> None:
        """Open the arena ``name`` of this user, or create it with ``size`` bytes.

        Arguments:
            size: bytes for records, 4096 at least; None: open an arena that exists. One that exists
                keeps its size, and a warning has both.
            directory: where its file is; memory in a file system, such as ``/dev/shm``.
            records: most extents of memory that it can have; by default one per 64 KiB of ``size``.
            touch: wait until this process has mapped all memory, instead of doing so meanwhile.
            timeout: seconds to wait for the lock of the node.

        Raises:
            InvalidValue: see `open_arena`.
            BackendFailed: the system failed.
        """
        self.path = path_of(directory, name)
        self.timeout = timeout
        self._closed = False
        wanted = None if size is None else Layout.of(size, records)
        opened = open_arena(self.path, wanted, timeout)
        try:
            try:
                self._books = Books(opened.fd, opened.layout)
                self._arena = SharedArena(self._books, opened.lock, self.describe(), new=opened.new)
                if opened.new:
                    os.pwrite(opened.fd, opened.layout.header(), 0)
            finally:
                os.close(opened.fd)
                opened.lock.release()
        except BaseException:
            opened.lock.close()
            raise
        self.capacity: int = opened.layout.data_bytes
        self._warming = Warming(self._books.whole)
        if touch:
            self._warming.wait()

    @classmethod
    def from_url(cls, url: TierURL) -> ShmBackend:
        """``shm://64GiB``; takes ``name`` and ``dir``."""
        return cls(**cls._options(url))

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Check ``url`` without opening or creating the arena."""
        asked = cls._options(url)
        check_name(asked["name"])
        if asked["size"] is not None:
            Layout.of(asked["size"], None)
        return True

    @staticmethod
    def _options(url: TierURL) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        size = url.size("size")
        if url.path.strip("/") or (url.place and size is not None):
            raise InvalidValue(f"{url.safe} must give its size once, as in shm://64GiB")
        if url.place:
            size = parse_bytes(url.place)
        return {
            "size": size,
            "name": url.text("name", "kvkeep"),
            "directory": url.text("dir", "/dev/shm"),  # noqa: S108 - see `__init__`
        }

    # -- access in place --------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int) -> Draft:
        """Return memory for a record of ``size`` bytes, visible under ``block`` once committed.

        It counts as used at once, and as free again if this process dies. An older record of
        ``block`` stays until the commit.

        Raises:
            OutOfRoom: no free extent is large enough, or the arena has as many records as it can.
                ``needed`` is as in `MemoryBackend.reserve`.
            BackendFailed: it is closed, or the lock cannot be had.
        """
        return self.reserve_all([block], [size])[0]

    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks``, 64 at most, up to the first without room.

        One at least. Cost: one lock for all.
        """
        self._check_open()
        for block in blocks:
            if len(block) != BLOCK_ID_BYTES:
                raise InvalidValue(f"a block id has {BLOCK_ID_BYTES} bytes, got {len(block)}")
        drafts = self._arena.reserve(blocks, sizes)
        return [
            Draft(self, block, entry, self._view(entry), generation)
            for block, (entry, generation) in zip(blocks, drafts, strict=False)
        ]

    def lease(self, block: bytes) -> Lease | None:
        """Return access to the record of ``block`` in place; None if it is missing.

        Raises:
            BackendFailed: it is closed, or the lock cannot be had.
        """
        leases = self.lease_all([block])
        return leases[0] if leases else None

    def lease_all(self, blocks: Sequence[bytes]) -> list[Lease]:
        """`lease` leading ``blocks``, up to the first that is missing. Cost: a lock for 64."""
        self._check_open()
        entries = self._arena.find_all(blocks)
        there = entries.index(-1) if -1 in entries else len(entries)
        if not there:
            return []
        holds = self._arena.hold_all(blocks[:there])
        if None in holds:  # it was deleted meanwhile
            there = holds.index(None)
            self._arena.release([hold for hold in holds[there:] if hold is not None])
        return [
            Lease(self, hold[0], self._view(hold[0]), hold[1])
            for hold in holds[:there]
            if hold is not None
        ]

    def commit_all(self, drafts: Sequence[Draft]) -> list[Lease]:
        """Commit ``drafts`` in order; return a lease on each. Cost: a lock for 64."""
        if not all(draft.pending for draft in drafts):
            raise IllegalStep("one of these drafts was committed or discarded before")
        self._publish(drafts, hold=True)
        return [Lease(self, one.offset, one.view, one.generation) for one in drafts]

    def contains(self, block: bytes) -> bool:
        """Whether ``block`` has a record. Raises `BackendFailed` as `lease` does."""
        self._check_open()
        return self._arena.find(block) >= 0

    def _view(self, entry: int) -> memoryview:
        begin = self._books.offset[entry]
        return self._books.data[begin : begin + self._books.size[entry]]

    # -- the contract -----------------------------------------------------------------------------

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return the sizes in bytes, as they were put."""
        self._check_open()
        size = self._books.size
        return [None if entry < 0 else size[entry] for entry in self._arena.find_all(blocks)]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Delete records; return their sizes in bytes, also of those that stay leased."""
        self._check_open()
        return sum(self._arena.delete(blocks))

    def list(self) -> Iterator[Listed]:
        """Yield the records that exist now and still exist at their turn."""
        self._check_open()
        books = self._books
        named = books.named_all[: books.words[at.HIGH]] != 0  # a copy: others change the column
        entries = np.flatnonzero(named).tolist()
        for entry in entries:
            generation = books.named[entry]
            used = clock.to_unix(books.used[entry])
            found = Listed(books.id_of(entry), books.size[entry], used)
            if generation and books.named[entry] == generation:  # else it changed meanwhile
                yield found

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Record the times of use, for all processes."""
        self._check_open()
        stamps = [clock.now()] * len(blocks)
        if used is not None:
            stamps = [clock.from_unix(when) for when in used]
        self._arena.use(self._arena.find_all(blocks), stamps)

    def used(self) -> int:
        """Return the bytes of records, of drafts, and of deleted records that are still leased."""
        return self.capacity - self._books.words[at.FREE_BYTES]

    def close(self) -> None:
        """Leave the arena; its records stay. Leases keep their memory until their release."""
        if not self._closed:
            self._closed = True
            self._warming.stop()
            self._arena.close()

    def describe(self) -> str:
        """Return a URL of the same arena."""
        size = format_bytes(self._books.layout.data_bytes).replace(" ", "")
        name = os.path.basename(self.path).partition("-")[2].partition("-")[2]
        return f"shm://{size}?name={name}"

    def __len__(self) -> int:
        return self._books.words[at.RECORDS]

    # -- for the tier above -----------------------------------------------------------------------

    def claim(self, *, raw: bool) -> None:
        """State what this store puts here: raw KV (it is in front), or records with headers.

        An arena has one kind, for one would be read wrongly as the other; an empty one takes any.

        Raises:
            InvalidValue: it has records of the other kind.
            BackendFailed: the lock cannot be had.
        """
        kind, words = at.RAW if raw else at.SEALED, self._books.words
        with self._arena:
            if words[at.KIND] not in (kind, at.UNDECIDED) and words[at.FREE_BYTES] < self.capacity:
                there, here = (
                    ("in front", "a lower tier") if not raw else ("a lower tier", "in front")
                )
                raise InvalidValue(
                    f"{self.path} is {there} of other stores, so it cannot be {here} of this one, "
                    "which would take its records for others: use another name="
                )
            words[at.KIND] = kind

    @property
    def is_raw(self) -> bool:
        """Whether the records are raw KV without headers and checksums."""
        return self._books.words[at.KIND] == at.RAW

    @property
    def arena(self) -> SharedArena:
        """The arena: recency, pins, quotas and eviction, which all processes share."""
        return self._arena

    @property
    def region(self) -> memoryview:
        """The memory of all records, for callers that pin it."""
        return self._books.data

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def repairs(self) -> int:
        """How often any process rebuilt the index: at each first opening, and after a crash."""
        return self._books.words[at.REPAIRS]

    @property
    def lost(self) -> int:
        """How many published records a repair had to drop, because they were damaged."""
        return self._books.words[at.LOST]

    def warmed(self, timeout: float | None = None) -> bool:
        """Wait until this process has mapped all memory; return whether it has."""
        return self._warming.wait(timeout)

    def check(self) -> None:
        """Assert that the index agrees with itself; all processes wait meanwhile."""
        check(self._arena)

    # -- drafts and leases ------------------------------------------------------------------------

    def commit(self, draft: Draft, *, lease: bool) -> Lease | None:
        """See `Draft.commit`."""
        if not draft.pending:
            raise IllegalStep("this draft was committed or discarded before")
        self._publish([draft], hold=lease)
        return Lease(self, draft.offset, draft.view, draft.generation) if lease else None

    def _publish(self, drafts: Sequence[Draft], *, hold: bool) -> None:
        holds = [(draft.offset, draft.generation) for draft in drafts]
        for draft in drafts:
            draft.pending = False
        try:
            self._check_open()
            self._arena.publish(holds, [draft.block for draft in drafts], hold=hold)
        except BackendFailed:
            self._arena.release(holds)
            raise

    def discard(self, draft: Draft) -> None:
        """See `Draft.discard`."""
        pending, draft.pending = draft.pending, False
        if pending:
            self._arena.release([(draft.offset, draft.generation)])

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""
        self.release_all([lease])

    def release_all(self, leases: Sequence[Lease]) -> None:
        """Release ``leases``. Cost: a lock for 64."""
        holds = [(lease.row, lease.generation) for lease in leases if lease.row >= 0]
        for lease in leases:
            lease.row = -1
        if holds:
            self._arena.release(holds)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendFailed(f"{self.describe()} is closed")
        if self._arena.inherited:  # its parent's leases protect nothing here
            raise BackendFailed(
                f"{self.describe()} is opened by the parent of this process; open it here"
            )
