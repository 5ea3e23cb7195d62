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

__all__ = ["InPlaceBackend", "Lease", "MemoryBackend"]


class _Owner(Protocol):
    def commit_all(self, drafts: Sequence[Lease]) -> None: ...
    def release_all(self, leases: Sequence[Lease]) -> None: ...


class Lease:
    """Access to a record in place, until `release`; a context manager.

    Until then its bytes do not change, even if the block is deleted or replaced. After `release`
    other records reuse the memory: do not read ``view``, or an array made of it, any more.

    A *draft* is a lease of a record that is not visible yet: fill ``record``, then `commit`. Its
    release without a commit frees the memory. One thread at a time.

    Attributes:
        block: where the record is, or will be visible.
        record: the record, aligned, exactly as long as it is; writable while it is a draft, and for
            an owner that changes only bytes no reader uses.
        hold: by what the owner knows the record; None after `release`.
        pending: whether it is a draft.
    """

    __slots__ = ("_owner", "block", "hold", "pending", "record")

    def __init__(
        self, owner: _Owner, block: bytes, record: memoryview, hold: Any, *, pending: bool = False
    ) -> None:
        self._owner = owner
        self.block = block
        self.record = record
        self.hold = hold
        self.pending = pending

    @property
    def view(self) -> memoryview:
        """The record, read-only."""
        return self.record.toreadonly()

    def commit(self) -> None:
        """Make the record of a draft visible, replacing an older one of its block.

        Raises:
            IllegalStep: it was committed or released before.
            BackendFailed: the backend was closed; the draft is released.
        """
        self._owner.commit_all([self])

    def release(self) -> None:
        """End the access. A second call does nothing."""
        self._owner.release_all([self])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class InPlaceBackend(Backend):
    """A backend whose records are memory of this process: written and read in place.

    Calls take several records at once, for less than the sum of the costs.
    """

    def reserve(self, block: bytes, size: int) -> Lease:
        """Return a draft of a record of ``size`` bytes, visible under ``block`` once committed.

        It counts as used at once. An older record of ``block`` stays until the commit.

        Raises:
            OutOfRoom: no free extent is large enough; nothing changed. ``needed`` is the number of
                bytes to free before a retry: the missing ones, or the record's whole size if enough
                is free but fragmented. If it exceeds ``capacity``, the record can never be stored.
            BackendFailed: it is closed, say.
        """
        return self.reserve_all([block], [size])[0]

    @abstractmethod
    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Lease]:
        """`reserve` leading ``blocks``, up to the first without room; at least one.

        Raises:
            OutOfRoom: there is no room for the first.
        """

    @abstractmethod
    def commit_all(self, drafts: Sequence[Lease], *, release: bool = False) -> None:
        """Commit ``drafts`` in order; they are leases of visible records then, or released.

        Raises:
            IllegalStep: one was committed or released before; nothing changed.
            BackendFailed: it was closed, say; all are released, the first may be committed.
        """

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
            _copy(record, draft.record)
            self.commit_all([draft], release=True)

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
    """A record: where it is, when it was used, how many leases it has.

    A draft is unnamed, and so is a leased record whose block was deleted or replaced: it stays
    until its release.
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

    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Lease]:
        drafts: list[Lease] = []
        arena = self.arena
        with self._lock:
            self._check_open()
            for block, size in zip(blocks, sizes, strict=True):
                offset = arena.allocate(size)
                if offset is None:
                    break
                drafts.append(self._lease(block, _Record(offset, size), pending=True))
            if not drafts:
                taken, free = arena.extent(sizes[0]), arena.free_bytes
                possible = free < taken <= self.capacity
                raise OutOfRoom(taken - free if possible else taken, self.describe())
        return drafts

    def commit_all(self, drafts: Sequence[Lease], *, release: bool = False) -> None:
        with self._lock:
            for draft in drafts:
                if not draft.pending or draft.hold is None:
                    raise IllegalStep("this draft was committed or released before")
            if self._closed:
                self._release(drafts)
                self._check_open()
            now = time.time()
            for draft in drafts:
                record, draft.pending = draft.hold, False
                record.used, record.named = now, True
                older = self._records.get(draft.block)
                self._records[draft.block] = record  # `contains` must not miss it at any instant
                if older is not None:
                    self._unname(older)
            if release:
                self._release(drafts)

    def lease_all(self, blocks: Sequence[bytes]) -> list[Lease]:
        leases: list[Lease] = []
        with self._lock:
            self._check_open()
            for block in blocks:
                record = self._records.get(block)
                if record is None:
                    break
                leases.append(self._lease(block, record))
        return leases

    def release_all(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            self._release(leases)

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
        """Bytes of leased records, with drafts and deleted ones."""
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
        """Assert that records, leases and the arena agree."""
        with self._lock:
            self.arena.check()
            records, extent = [*self._records.values()], self.arena.extent
            assert all(record.named for record in records), "a deleted record has a name"
            leased = sum(extent(record.size) for record in records if record.leases)
            assert leased <= self._leased
            held = sum(extent(record.size) for record in records) + self._leased - leased
            assert self.used() == held, "room is lost, or given out twice"
            assert len({record.offset for record in records}) == len(records), "two in one place"

    # -- under the lock ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BackendFailed(f"{self.describe()} is closed")

    def _lease(self, block: bytes, record: _Record, *, pending: bool = False) -> Lease:
        if not record.leases:
            self._leased += self.arena.extent(record.size)
        record.leases += 1
        place = self.arena.view(record.offset, record.size)
        return Lease(self, block, place, record, pending=pending)

    def _release(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            record, lease.hold = lease.hold, None
            if record is not None:
                record.leases -= 1
                if not record.leases:
                    self._leased -= self.arena.extent(record.size)
                    if not record.named:
                        self._free(record)

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
