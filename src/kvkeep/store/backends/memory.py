"""Memory as a backend: records in one arena, readable and writable where they lie."""

from __future__ import annotations

import threading
import time
from array import array
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue, OutOfRoom
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.store.backends.arena import Arena
from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed, Room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from kvkeep.store.backends.urls import TierURL

__all__ = ["Draft", "Lease", "MemoryBackend"]

_LISTED_AT_ONCE = 256


class Lease:
    """Read access to a record where it lies, until `release`; a context manager.

    Until then its bytes stay as they are, also when the block is deleted or replaced meanwhile.
    ``view`` is read-only and aligned. Do not read it, nor an array made of it, after `release`:
    the place is somebody else's then. ``place`` are the same bytes, writable: for an owner who
    knows of some that no reader relies on.
    """

    __slots__ = ("_backend", "_row", "place", "view")

    def __init__(self, backend: MemoryBackend, row: int, place: memoryview) -> None:
        self._backend = backend
        self._row = row
        self.place = place
        self.view = place.toreadonly()

    def release(self) -> None:
        """End the access. A second call does nothing."""
        self._backend._end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Draft:
    """A place for a record that nobody sees before `commit`; a context manager.

    Fill ``view`` (writable, aligned, exactly as long as the record), then `commit`. Left without,
    by an exception too, it is discarded. One thread at a time.
    """

    __slots__ = ("_backend", "_block", "_offset", "_open", "view")

    def __init__(self, backend: MemoryBackend, block: bytes, offset: int, view: memoryview) -> None:
        self._backend = backend
        self._block = block
        self._offset = offset
        self._open = True
        self.view = view

    def commit(self, *, lease: bool = False) -> Lease | None:
        """Make the record visible under its block, in place of an older one.

        With ``lease`` there is a `Lease` on it from the same instant on.

        Raises:
            IllegalStep: it was committed or discarded before.
            BackendFailed: the backend was closed; the draft is discarded.
        """
        return self._backend._commit(self, lease=lease)

    def discard(self) -> None:
        """Give the place back. Does nothing after `commit` or a first `discard`."""
        self._backend._discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


class MemoryBackend(Backend):
    """Records in one preallocated `Arena` of this process; gone when the process is.

    Beyond the contract it hands out places instead of copying: `reserve` one to write a record
    into, `lease` one to read it from. A record takes its size rounded up to 4 KiB of ``capacity``;
    `used` and `leased` count that.

    Notes
    -----
    Thread safety: everything may be called from every thread. One lock, held for the bookkeeping
    of one call; nothing is copied under it. A reader holds a lease while it copies, so neither
    `delete` nor a new record under the same block disturbs it.

    Cost: a dict entry and a row of four numbers a record, no object. `lease` with `release`, and
    `reserve` with `commit`, take a few µs.
    """

    scheme: ClassVar[str] = "memory"
    unit = ALIGNMENT

    def __init__(self, size: int, *, touch: bool = False) -> None:
        """Map ``size`` bytes (at least 4096), and `touch` them; see `Arena`.

        Raises `InvalidValue`.
        """
        self.arena = Arena(size)
        if touch:
            self.arena.touch()
        self.capacity: int = self.arena.size
        self._lock = threading.Lock()
        self._closed = False
        self._rows: dict[bytes, int] = {}  # what can be found
        # By row. A row that is leased lives on when its block is deleted or replaced, unnamed.
        self._offsets = array("q")
        self._sizes = array("q")
        self._used = array("d")
        self._leases = array("q")
        self._named = bytearray()
        self._spare: list[int] = []  # rows to use again
        self._drafted = 0
        self._leased = 0

    @classmethod
    def from_url(cls, url: TierURL) -> MemoryBackend:
        """``memory://4GiB``, or ``memory://?size=4GiB``; takes ``touch``."""
        size = url.size("size")
        if url.place and size is None and not url.path.strip("/"):
            size = parse_bytes(url.place)
        elif url.place or url.path.strip("/") or size is None:
            raise InvalidValue(f"{url.safe} has to name its size once, as in memory://4GiB")
        return cls(size, touch=url.choice("touch", ("yes", "no"), "no") == "yes")

    # -- places -----------------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int) -> Draft:
        """A place for a record of ``size`` bytes, to be seen under ``block`` once it is committed.

        It counts as used. A record that is there under ``block`` stays until then.

        Raises:
            OutOfRoom: no free place is large enough. Its ``needed`` says how many bytes to free
                before trying again: what is missing, or as much as the record takes where enough is
                free but in pieces. More than ``capacity``: there will never be a place.
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
        """Access to the record under ``block`` where it lies; None: not there.

        A block may have any number of leases. Each has to be released.
        """
        with self._lock:
            self._check_open()
            row = self._rows.get(block)
            return None if row is None else self._lease(row)

    def contains(self, block: bytes) -> bool:
        """Whether there is a record under ``block``."""
        return block in self._rows

    # -- the contract -----------------------------------------------------------------------------

    def put(self, block: bytes, record: memoryview) -> None:
        """Copy ``record`` into a place of its own, then let it take over ``block``.

        While it is copied, what it replaces is there as well and needs its room.

        Raises:
            OutOfRoom: see `reserve`; nothing changed.
        """
        with self.reserve(block, record.nbytes) as draft:
            _copy(record, draft.view)
            draft.commit()

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Copy the record under ``block`` into ``room(size)`` and return that; None: not there."""
        lease = self.lease(block)
        if lease is None:
            return None
        with lease:
            target = room(lease.view.nbytes)
            _copy(lease.view, target)
            return target

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Bytes of each record, as they were put."""
        with self._lock:
            rows = map(self._rows.get, blocks)
            return [None if row is None else self._sizes[row] for row in rows]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Take records away; their bytes.

        One that is leased is not found from here on, but keeps its room until its last lease is
        released. It is counted here, not then.
        """
        with self._lock:
            return sum(self._drop(block) for block in blocks)

    def list(self) -> Iterator[Listed]:
        """Every record that is there from now until it is its turn."""
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
        """Note when ``blocks`` were used, or that it was now."""
        now = time.time()
        with self._lock:
            for at, block in enumerate(blocks):
                row = self._rows.get(block)
                if row is not None:
                    self._used[row] = now if used is None else max(self._used[row], used[at])

    def used(self) -> int:
        """Bytes that are not free: of records, of drafts, and of deleted records still leased."""
        return self.capacity - self.arena.free_bytes

    @property
    def leased(self) -> int:
        """Bytes of records that have a lease, whether they can still be found or not."""
        return self._leased

    def close(self) -> None:
        """Forget all records and give the memory back: what is leased, at its release."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for block in [*self._rows]:
                self._drop(block)
            self.arena.close()

    def describe(self) -> str:
        """The URL that makes one as large."""
        return f"memory://{format_bytes(self.capacity).replace(' ', '')}"

    def __len__(self) -> int:
        return len(self._rows)

    def check(self) -> None:
        """Assert that rows, drafts, leases and the arena say the same."""
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
        """Make ``block`` not there; the bytes of its record."""
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

    # -- what drafts and leases call --------------------------------------------------------------

    def _commit(self, draft: Draft, *, lease: bool) -> Lease | None:
        with self._lock:
            if not draft._open:
                raise IllegalStep("this draft was committed or discarded before")
            if self._closed:
                self._drop_draft(draft)
                self._check_open()
            size = draft.view.nbytes
            draft._open = False
            self._drafted -= self.arena.extent(size)
            row = self._new_row()
            self._offsets[row], self._sizes[row] = draft._offset, size
            self._used[row], self._named[row] = time.time(), True
            older = self._rows.get(draft._block)
            self._rows[draft._block] = row  # at no instant is it missing: see `contains`
            if older is not None:
                self._unname(older)
            return self._lease(row) if lease else None

    def _discard(self, draft: Draft) -> None:
        with self._lock:
            if draft._open:
                self._drop_draft(draft)

    def _drop_draft(self, draft: Draft) -> None:
        draft._open = False
        size = draft.view.nbytes
        self._drafted -= self.arena.extent(size)
        self.arena.free(draft._offset, size)

    def _end(self, lease: Lease) -> None:
        with self._lock:
            row, lease._row = lease._row, -1
            if row < 0:
                return
            self._leases[row] -= 1
            if not self._leases[row]:
                self._leased -= self.arena.extent(self._sizes[row])
                if not self._named[row]:
                    self._free(row)


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy all of ``source``; NumPy lets other threads run meanwhile, a memoryview would not."""
    np.copyto(np.asarray(target), np.asarray(source))
