"""`MemoryBackend`: records in one arena, which callers read and write in place."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue, OutOfRoom, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.store.backends.arena import Arena
from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed, Room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends.urls import TierURL

__all__ = ["Draft", "InPlaceBackend", "Lease", "MemoryBackend"]


class _Releases(Protocol):
    def release_all(self, leases: Sequence[Lease]) -> None: ...


class Lease:
    """Access to a record in place, until `release`; a context manager.

    Until then its bytes do not change, even if the block is deleted or replaced. After `release`
    other records reuse the memory: do not read ``view``, or an array made of it, any more.

    Attributes:
        record: the record, aligned; writable for an owner that changes only bytes no reader uses.
        hold: by what the owner knows the record; None after `release`.
    """

    __slots__ = ("_owner", "hold", "record")

    def __init__(self, owner: _Releases, hold: Any, record: memoryview) -> None:
        self._owner = owner
        self.hold = hold
        self.record = record

    @property
    def view(self) -> memoryview:
        """The record, read-only."""
        return self.record.toreadonly()

    def release(self) -> None:
        """End the access. A second call does nothing."""
        self._owner.release_all([self])

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
        hold: by what the backend knows the record.
        pending: whether it was neither committed nor discarded yet.
    """

    __slots__ = ("_backend", "block", "hold", "pending", "view")

    def __init__(self, backend: InPlaceBackend, block: bytes, hold: Any, view: memoryview) -> None:
        self._backend = backend
        self.block = block
        self.hold = hold
        self.pending = True
        self.view = view

    def commit(self, *, lease: bool = False) -> Lease | None:
        """Make the record visible, replacing an older one of its block.

        With ``lease``, return a `Lease` on it that begins at the same instant.

        Raises:
            IllegalStep: it was committed or discarded before.
            BackendFailed: the backend was closed; the draft is discarded.
        """
        leases = self._backend.commit_all([self], lease=lease)
        return leases[0] if lease else None

    def discard(self) -> None:
        """Free the memory. Does nothing after `commit` or `discard`."""
        if self.pending:
            self._backend.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


class InPlaceBackend(Backend):
    """A backend whose records are memory of this process: written and read in place.

    Calls take several records at once, for less than the sum of the costs.
    """

    def reserve(self, block: bytes, size: int) -> Draft:
        """Return memory for a record of ``size`` bytes, visible under ``block`` once committed.

        It counts as used at once. An older record of ``block`` stays until the commit.

        Raises:
            OutOfRoom: no free extent is large enough; nothing changed. ``needed`` is the number of
                bytes to free before a retry: the missing ones, or the record's whole size if enough
                is free but fragmented. If it exceeds ``capacity``, the record can never be stored.
            BackendFailed: it is closed, say.
        """
        return self.reserve_all([block], [size])[0]

    @abstractmethod
    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks``, up to the first without room; at least one.

        Raises:
            OutOfRoom: there is no room for the first.
        """

    @abstractmethod
    def commit_all(self, drafts: Sequence[Draft], *, lease: bool = True) -> list[Lease]:
        """Commit ``drafts`` in order; return a lease on each, or none.

        Raises:
            IllegalStep: one was committed or discarded before; nothing changed.
            BackendFailed: it was closed, say; all drafts have ended, the first may be committed.
        """

    @abstractmethod
    def discard(self, draft: Draft) -> None:
        """Free the memory of a draft that is pending."""

    def lease(self, block: bytes) -> Lease | None:
        """Return access to the record of ``block`` in place; None if it is missing.

        A block may have any number of leases. Release each of them.

        Raises:
            BackendFailed: it is closed, say.
        """
        leases = self.lease_all([block])
        return leases[0] if leases else None

    @abstractmethod
    def lease_all(self, blocks: Sequence[bytes]) -> list[Lease]:
        """`lease` leading ``blocks``, up to the first that is missing."""

    @abstractmethod
    def release_all(self, leases: Sequence[Lease]) -> None:
        """Release ``leases`` of this backend."""

    def put(self, block: bytes, record: memoryview) -> None:
        """Copy ``record`` into new memory, then replace the older record of ``block``.

        During the copy both records take their space.

        Raises:
            OutOfRoom: see `reserve`; nothing changed.
        """
        with self.reserve(block, record.nbytes) as draft:
            _copy(record, draft.view)
            draft.commit()

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Copy the record into ``room(size)``; see `Backend.get`."""
        lease = self.lease(block)
        if lease is None:
            return None
        with lease:
            target = room(lease.record.nbytes)
            _copy(lease.record, target)
            return target


class _Record:
    """A draft, or a record: where it is, when it was used, how many leases it has.

    A leased record whose block is deleted or replaced stays, unnamed, until its release.
    """

    __slots__ = ("leases", "named", "offset", "size", "used")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.used = 0.0
        self.leases = 0
        self.named = False


class MemoryBackend(InPlaceBackend):
    """Records in one preallocated `Arena` of this process.

    Beyond the contract it avoids copies: `reserve` returns memory to write a record into, `lease`
    access to a record in place. A record takes its size, rounded up to 4 KiB, of ``capacity``;
    `used` and `leased` count that.

    Thread safety: all methods. One lock, held for the bookkeeping of one call, never during a copy.
    A reader holds a lease while it copies, so `delete` and replacing records do not disturb it.

    Cost: a dict entry and an object per record, about 250 bytes. `lease` with `release`, and
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
        self._records: dict[bytes, _Record] = {}
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

    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = []
        arena = self.arena
        with self._lock:
            self._check_open()
            for block, size in zip(blocks, sizes, strict=True):
                offset = arena.allocate(size)
                if offset is None:
                    break
                self._drafted += arena.extent(size)
                drafts.append(Draft(self, block, _Record(offset, size), arena.view(offset, size)))
            if not drafts:
                taken, free = arena.extent(sizes[0]), arena.free_bytes
                possible = free < taken <= self.capacity
                raise OutOfRoom(taken - free if possible else taken, self.describe())
        return drafts

    def commit_all(self, drafts: Sequence[Draft], *, lease: bool = True) -> list[Lease]:
        with self._lock:
            for draft in drafts:
                if not draft.pending:
                    raise IllegalStep("this draft was committed or discarded before")
            if self._closed:
                for draft in drafts:
                    self._end_draft(draft)
                    self._free(draft.hold)
                self._check_open()
            now = time.time()
            for draft in drafts:
                record = self._end_draft(draft)
                record.used, record.named = now, True
                older = self._records.get(draft.block)
                self._records[draft.block] = record  # `contains` must not miss it at any instant
                if older is not None:
                    self._unname(older)
            return [self._lease(draft.hold, draft.view) for draft in drafts if lease]

    def discard(self, draft: Draft) -> None:
        with self._lock:
            if draft.pending:
                self._free(self._end_draft(draft))

    def lease_all(self, blocks: Sequence[bytes]) -> list[Lease]:
        leases: list[Lease] = []
        with self._lock:
            self._check_open()
            for block in blocks:
                record = self._records.get(block)
                if record is None:
                    break
                leases.append(self._lease(record, self.arena.view(record.offset, record.size)))
        return leases

    def release_all(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            for lease in leases:
                record, lease.hold = lease.hold, None
                if record is not None:
                    record.leases -= 1
                    if not record.leases:
                        self._leased -= self.arena.extent(record.size)
                        if not record.named:
                            self._free(record)

    def contains(self, block: bytes) -> bool:
        """Whether ``block`` has a record."""
        return block in self._records

    # -- the contract -----------------------------------------------------------------------------

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return the sizes in bytes, as they were put."""
        with self._lock:
            records = map(self._records.get, blocks)
            return [None if record is None else record.size for record in records]

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
            records = [*self._records.items()]
        for block, record in records:
            if record.named:
                yield Listed(block, record.size, record.used)

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Record the times of use."""
        now = time.time()
        with self._lock:
            for at, block in enumerate(blocks):
                record = self._records.get(block)
                if record is not None:
                    record.used = now if used is None else max(record.used, used[at])

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
            for block in [*self._records]:
                self._drop(block)
            self.arena.close()

    def describe(self) -> str:
        """Return a URL of the same size."""
        return f"memory://{format_bytes(self.capacity).replace(' ', '')}"

    def __len__(self) -> int:
        return len(self._records)

    def check(self) -> None:
        """Assert that records, drafts, leases and the arena agree."""
        with self._lock:
            self.arena.check()
            records, extent = [*self._records.values()], self.arena.extent
            assert all(record.named for record in records), "a deleted record has a name"
            leased = sum(extent(record.size) for record in records if record.leases)
            assert leased <= self._leased
            held = sum(extent(record.size) for record in records) + self._leased - leased
            assert self.used() == held + self._drafted, "room is lost, or given out twice"
            assert len({record.offset for record in records}) == len(records), "two in one place"

    # -- under the lock ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BackendFailed(f"{self.describe()} is closed")

    def _end_draft(self, draft: Draft) -> _Record:
        draft.pending = False
        record: _Record = draft.hold
        self._drafted -= self.arena.extent(record.size)
        return record

    def _lease(self, record: _Record, view: memoryview) -> Lease:
        if not record.leases:
            self._leased += self.arena.extent(record.size)
        record.leases += 1
        return Lease(self, record, view)

    def _drop(self, block: bytes) -> int:
        """Remove ``block``; return the bytes of its record."""
        record = self._records.pop(block, None)
        if record is None:
            return 0
        self._unname(record)
        return record.size

    def _unname(self, record: _Record) -> None:
        record.named = False
        if not record.leases:
            self._free(record)

    def _free(self, record: _Record) -> None:
        self.arena.free(record.offset, record.size)


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy all of ``source``. NumPy releases the GIL; assigning to a memoryview does not."""
    np.copyto(np.asarray(target), np.asarray(source))
