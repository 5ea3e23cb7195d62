"""`MemoryBackend`: records in one arena, which callers read and write in place."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from array import array
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue, OutOfRoom, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.store.backends.arena import Arena
from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed, Room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends.urls import TierURL

__all__ = ["Draft", "InPlaceBackend", "Lease", "LeaseOwner", "MemoryBackend", "copy_bytes"]

_LISTED_AT_ONCE = 256


class LeaseOwner(Protocol):
    """A backend that gives out drafts and leases."""

    def commit(self, draft: Draft, *, lease: bool) -> Lease | None:
        """See `Draft.commit`."""

    def discard(self, draft: Draft) -> None:
        """See `Draft.discard`."""

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""


class Lease:
    """Read access to a record in place, until `release`; a context manager.

    Until then its bytes do not change, even if the block is deleted or replaced. After `release`
    other records reuse the memory: do not read ``view``, or an array made of it, any more.

    Attributes:
        view: the record, read-only and aligned.
        place: the same bytes, writable, for an owner that changes only bytes no reader uses.
        row: the record's row in the backend; -1 after `release`.
        generation: of the record, where rows are reused by other processes; else 0.
    """

    __slots__ = ("_backend", "generation", "place", "row", "view")

    def __init__(
        self, backend: LeaseOwner, row: int, place: memoryview, generation: int = 0
    ) -> None:
        self._backend = backend
        self.row = row
        self.generation = generation
        self.place = place
        self.view = place.toreadonly()

    def release(self) -> None:
        """End the access. A second call does nothing."""
        self._backend.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Draft:
    """Memory for a record that is invisible until `commit`; a context manager.

    Fill ``view`` (writable, aligned, exactly as long as the record), then `commit`. Leaving the
    context without a commit discards the draft. One thread at a time.

    Attributes:
        block: where the record will be found.
        offset: of ``view`` in the arena; its entry in a shared one.
        pending: whether it was neither committed nor discarded yet.
        generation: as that of a `Lease`.
    """

    __slots__ = ("_backend", "block", "generation", "offset", "pending", "view")

    def __init__(
        self,
        backend: LeaseOwner,
        block: bytes,
        offset: int,
        view: memoryview,
        generation: int = 0,
    ) -> None:
        self._backend = backend
        self.block = block
        self.offset = offset
        self.generation = generation
        self.pending = True
        self.view = view

    def commit(self, *, lease: bool = False) -> Lease | None:
        """Make the record visible, replacing an older one of its block.

        With ``lease``, return a `Lease` on it that begins at the same instant.

        Raises:
            IllegalStep: it was committed or discarded before.
            BackendFailed: the backend was closed; the draft is discarded.
        """
        return self._backend.commit(self, lease=lease)

    def discard(self) -> None:
        """Free the memory. Does nothing after `commit` or `discard`."""
        self._backend.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


class InPlaceBackend(Backend):
    """A backend whose records are memory of this process: written and read in place."""

    @abstractmethod
    def reserve(self, block: bytes, size: int) -> Draft:
        """Return memory for a record of ``size`` bytes, to be filled and committed.

        Raises:
            OutOfRoom: there is not enough free memory; nothing changed.
        """

    @abstractmethod
    def lease(self, block: bytes) -> Lease | None:
        """Return access to the record of ``block`` in place; None if it is missing."""

    # Several at once: for less than the sum of the costs, where a backend overrides them.

    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks``, up to the first without room; at least one.

        Raises:
            OutOfRoom: there is not enough free memory for the first; nothing changed.
        """
        drafts: list[Draft] = []
        for block, size in zip(blocks, sizes, strict=True):
            try:
                drafts.append(self.reserve(block, size))
            except OutOfRoom:
                if not drafts:
                    raise
                break
        return drafts

    def commit_all(self, drafts: Sequence[Draft]) -> list[Lease]:
        """Commit ``drafts`` in order; return a lease on each.

        Raises:
            IllegalStep: one was committed or discarded before; nothing changed.
            BackendFailed: it was closed, say; all drafts have ended, the first may be committed.
        """
        if not all(draft.pending for draft in drafts):
            raise IllegalStep("one of these drafts was committed or discarded before")
        leases: list[Lease] = []
        try:
            for draft in drafts:
                lease = draft.commit(lease=True)
                assert lease is not None
                leases.append(lease)
        except BackendFailed:
            self.release_all(leases)
            for draft in drafts:
                draft.discard()
            raise
        return leases

    def lease_all(self, blocks: Sequence[bytes]) -> list[Lease]:
        """`lease` leading ``blocks``, up to the first that is missing."""
        leases: list[Lease] = []
        for block in blocks:
            lease = self.lease(block)
            if lease is None:
                break
            leases.append(lease)
        return leases

    def release_all(self, leases: Sequence[Lease]) -> None:
        """Release ``leases`` of this backend."""
        for lease in leases:
            lease.release()

    def put(self, block: bytes, record: memoryview) -> None:
        """Copy ``record`` into new memory, then replace the older record of ``block``.

        During the copy both records take their space.

        Raises:
            OutOfRoom: see `reserve`; nothing changed.
        """
        with self.reserve(block, record.nbytes) as draft:
            copy_bytes(record, draft.view)
            draft.commit()

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Copy the record into ``room(size)``; see `Backend.get`."""
        lease = self.lease(block)
        if lease is None:
            return None
        with lease:
            target = room(lease.view.nbytes)
            copy_bytes(lease.view, target)
            return target


class MemoryBackend(InPlaceBackend):
    """Records in one preallocated `Arena` of this process.

    Beyond the contract it avoids copies: `reserve` returns memory to write a record into, `lease`
    access to a record in place. A record takes its size, rounded up to 4 KiB, of ``capacity``;
    `used` and `leased` count that.

    Thread safety: all methods. One lock, held for the bookkeeping of one call, never during a copy.
    A reader holds a lease while it copies, so `delete` and replacing records do not disturb it.

    Cost: a dict entry and a row of four numbers per record, no object. `lease` with `release`, and
    `reserve` with `commit`, take a few µs.
    """

    scheme = "memory"
    unit = ALIGNMENT

    def __init__(self, size: int, *, touch: bool = False) -> None:
        """Map ``size`` bytes, 4096 at least, and `touch` them; see `Arena`."""
        self.arena = Arena(size)
        if touch:
            self.arena.touch()
        self.capacity: int = self.arena.size
        self._lock = threading.Lock()
        self._closed = False
        self._rows: dict[bytes, int] = {}  # block → row
        # By row. A leased row whose block is deleted or replaced stays, unnamed, until its release.
        self._offsets = array("q")
        self._sizes = array("q")
        self._used = array("d")
        self._leases = array("q")
        self._named = bytearray()
        self._spare: list[int] = []  # rows to reuse
        self._drafted = 0
        self._leased = 0

    @classmethod
    def from_url(cls, url: TierURL) -> MemoryBackend:
        """``memory://4GiB``, or ``memory://?size=4GiB``; takes ``touch``."""
        size, touch = cls._options(url)
        return cls(size, touch=touch)

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Check ``url`` without reserving memory."""
        whole("the size of an arena in bytes", cls._options(url)[0], ALIGNMENT)
        return True

    @staticmethod
    def _options(url: TierURL) -> tuple[int, bool]:
        size = url.size("size")
        if url.place and size is None and not url.path.strip("/"):
            size = parse_bytes(url.place)
        elif url.place or url.path.strip("/") or size is None:
            raise InvalidValue(f"{url.safe} must give its size once, as in memory://4GiB")
        return size, url.choice("touch", ("yes", "no"), "no") == "yes"

    # -- access in place --------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int) -> Draft:
        """Return memory for a record of ``size`` bytes, visible under ``block`` once committed.

        It counts as used at once. An older record of ``block`` stays until the commit.

        Raises:
            OutOfRoom: no free extent is large enough. ``needed`` is the number of bytes to free
                before a retry: the missing ones, or the record's whole size if enough is free but
                fragmented. If it exceeds ``capacity``, the record can never be stored.
        """
        with self._lock:
            self._check_open()
            offset = self.arena.allocate(size)
            if offset is None:
                taken, free = self.arena.extent(size), self.arena.free_bytes
                possible = free < taken <= self.capacity
                raise OutOfRoom(taken - free if possible else taken, self.describe())
            self._drafted += self.arena.extent(size)
            return Draft(self, block, offset, self.arena.view(offset, size))

    def lease(self, block: bytes) -> Lease | None:
        """Return access to the record of ``block`` in place; None if it is missing.

        A block may have any number of leases. Release each of them.
        """
        with self._lock:
            self._check_open()
            row = self._rows.get(block)
            return None if row is None else self._lease(row)

    def contains(self, block: bytes) -> bool:
        """Whether ``block`` has a record."""
        return block in self._rows

    # -- the contract -----------------------------------------------------------------------------

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return the sizes in bytes, as they were put."""
        with self._lock:
            rows = map(self._rows.get, blocks)
            return [None if row is None else self._sizes[row] for row in rows]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Delete records; return their sizes in bytes.

        A leased record disappears at once, but keeps its memory until its last lease is released.
        Its size is part of this return value nevertheless.
        """
        with self._lock:
            return sum(self._drop(block) for block in blocks)

    def list(self) -> Iterator[Listed]:
        """Yield the records that exist now and still exist at their turn."""
        with self._lock:
            blocks = [*self._rows]
        for start in range(0, len(blocks), _LISTED_AT_ONCE):
            with self._lock:
                found = [
                    Listed(block, self._sizes[row], self._used[row])
                    for block in blocks[start : start + _LISTED_AT_ONCE]
                    if (row := self._rows.get(block)) is not None
                ]
            yield from found

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Record the times of use."""
        now = time.time()
        with self._lock:
            for at, block in enumerate(blocks):
                row = self._rows.get(block)
                if row is not None:
                    self._used[row] = now if used is None else max(self._used[row], used[at])

    def used(self) -> int:
        """Return the bytes of records, of drafts, and of deleted records that are still leased."""
        return self.capacity - self.arena.free_bytes

    @property
    def region(self) -> memoryview:
        """The memory of all records, for callers that pin it."""
        return self.arena.buffer

    @property
    def leased(self) -> int:
        """Bytes of leased records, deleted ones included."""
        return self._leased

    def close(self) -> None:
        """Drop all records and free the memory: that of leased records at their release."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for block in [*self._rows]:
                self._drop(block)
            self.arena.close()

    def describe(self) -> str:
        """Return a URL of the same size."""
        return f"memory://{format_bytes(self.capacity).replace(' ', '')}"

    def __len__(self) -> int:
        return len(self._rows)

    def check(self) -> None:
        """Assert that rows, drafts, leases and the arena agree."""
        with self._lock:
            self.arena.check()
            extent = self.arena.extent
            rows = set(range(len(self._offsets))) - set(self._spare)
            assert len(rows) == len(self._offsets) - len(self._spare), "a row is spare twice"
            named = {row for row in rows if self._named[row]}
            assert sorted(self._rows.values()) == sorted(named), "names and rows differ"
            leased = {row for row in rows if self._leases[row]}
            assert rows == named | leased, "a row is neither named nor leased"
            assert self._leased == sum(extent(self._sizes[row]) for row in leased)
            held = sum(extent(self._sizes[row]) for row in rows)
            assert self.used() == held + self._drafted, "room is lost, or given out twice"
            assert len({self._offsets[row] for row in rows}) == len(rows), "two rows in one place"

    # -- under the lock ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BackendFailed(f"{self.describe()} is closed")

    def _lease(self, row: int) -> Lease:
        if not self._leases[row]:
            self._leased += self.arena.extent(self._sizes[row])
        self._leases[row] += 1
        view = self.arena.view(self._offsets[row], self._sizes[row])
        return Lease(self, row, view)

    def _drop(self, block: bytes) -> int:
        """Remove ``block``; return the bytes of its record."""
        row = self._rows.pop(block, None)
        return 0 if row is None else self._unname(row)

    def _unname(self, row: int) -> int:
        self._named[row] = False
        if not self._leases[row]:
            self._free(row)
        return self._sizes[row]

    def _free(self, row: int) -> None:
        self.arena.free(self._offsets[row], self._sizes[row])
        self._spare.append(row)

    def _new_row(self) -> int:
        if self._spare:
            return self._spare.pop()
        for column in (self._offsets, self._sizes, self._leases, self._named):
            column.append(0)
        self._used.append(0.0)
        return len(self._offsets) - 1

    # -- drafts and leases ------------------------------------------------------------------------

    def commit(self, draft: Draft, *, lease: bool) -> Lease | None:
        """See `Draft.commit`."""
        with self._lock:
            if not draft.pending:
                raise IllegalStep("this draft was committed or discarded before")
            if self._closed:
                self._drop_draft(draft)
                self._check_open()
            size = draft.view.nbytes
            draft.pending = False
            self._drafted -= self.arena.extent(size)
            row = self._new_row()
            self._offsets[row], self._sizes[row] = draft.offset, size
            self._used[row], self._named[row] = time.time(), True
            older = self._rows.get(draft.block)
            self._rows[draft.block] = row  # `contains` must not see it missing at any instant
            if older is not None:
                self._unname(older)
            return self._lease(row) if lease else None

    def discard(self, draft: Draft) -> None:
        """See `Draft.discard`."""
        with self._lock:
            if draft.pending:
                self._drop_draft(draft)

    def _drop_draft(self, draft: Draft) -> None:
        draft.pending = False
        size = draft.view.nbytes
        self._drafted -= self.arena.extent(size)
        self.arena.free(draft.offset, size)

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""
        with self._lock:
            row, lease.row = lease.row, -1
            if row < 0:
                return
            self._leases[row] -= 1
            if not self._leases[row]:
                self._leased -= self.arena.extent(self._sizes[row])
                if not self._named[row]:
                    self._free(row)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy all of ``source``. NumPy releases the GIL; assigning to a memoryview does not."""
    np.copyto(np.asarray(target), np.asarray(source))
