"""`DiskBackend`: records as files in a directory."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, cast

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom, whole
from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed
from kvkeep.store.backends.disk.files import (
    ABSENT,
    CANNOT_WRITE,
    closing_fd,
    create_locked,
    open_record,
    padded,
    preallocate,
    read_whole,
    size_of,
    supports_direct,
    translated,
    write_whole,
)
from kvkeep.store.backends.disk.ledger import DiskLedger
from kvkeep.store.backends.disk.notes import LastBudget, add_note, read_budget, read_notes, settle
from kvkeep.store.backends.disk.opening import open_directory, restore
from kvkeep.store.backends.disk.recount import Recount
from kvkeep.store.backends.disk.sync import Sync, SyncQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvkeep.store.backends.base import Room
    from kvkeep.store.backends.disk.directory import RecordDirectory
    from kvkeep.store.backends.disk.ledger import Count
    from kvkeep.store.backends.urls import TierURL

__all__ = ["DiskBackend", "Io"]

_LOG = logging.getLogger("kvkeep.tiers")
Io = Literal["auto", "direct", "buffered"]
DIRECT_FROM: Final = 64 * 1024
"""Bytes from which ``io="auto"`` bypasses the page cache. Below, waiting for the device costs more
than a copy."""

_PER_LOCK: Final = 32  # files unlinked before other processes get the lock
_APART: Final = 1000  # nanoseconds between the times of two blocks used at once
_AHEAD: Final = 1.0  # seconds that a file's time may be ahead of the clock
RECOUNT_AFTER: Final = 300.0
"""Seconds after which a full store is recounted, in case files were deleted by hand."""

SMALL: Final = 8192
"""Files that are counted under the lock; a larger directory is counted by the next listing."""


class DiskBackend(Backend):
    """One directory of a disk, one file a record: ``file:///path?size=200GiB&sync=flush&io=auto``.

    Arguments:
        path: the directory, created with mode 0700; an existing store is tightened to that.
            It must be empty or hold records already; foreign files are never deleted.
        capacity: maximum bytes of all records, files counted in whole units of 4096 bytes, those
            being written and those in quarantine included. All processes that share the directory
            are counted together at any instant; each keeps to its own capacity. Foreign files are
            not counted. None: as much as the filesystem has. A URL without ``size=`` is another
            matter: see `settle_capacity`.
        sync: what survives a loss of power, see below.
        io: ``direct`` bypasses the page cache, ``buffered`` uses it; ``auto`` is direct from 64 KiB
            on if the filesystem supports it, else buffered.

    What survives, by ``sync``:

        =========  ====================  ========================================================
        ``sync``   the process killed    power lost, or the kernel crashed
        =========  ====================  ========================================================
        never      every finished put    nothing for certain; records may be torn or empty
        flush      every finished put    what was put before the last `flush` that returned
        always     every finished put    every finished put
        =========  ====================  ========================================================

    A killed process tears no record: a file gets its name when it is complete. The tier above
    detects a record torn by a loss of power by its checksum. A `delete` is as durable as a put. A
    disk that lies about its write cache can break the promises of the last column.

    With ``flush``, a background thread syncs from 64 files on, so a `flush` has little left to do.
    If the disk syncs more slowly than records are put, 32,768 files may be unsynced; beyond that
    each put waits for a second at most, or half of ``timeout`` if shorter. From 65,536 on it fails.

    Deleted and replaced files free their space within milliseconds of the call; the count drops at
    once.

    A directory that is emptied, removed, replaced or moved while open is created again by the next
    put or delete, on the same filesystem only.

    Attributes:
        quarantined: records that this object put into quarantine.
        odd: entries of the last complete `list` that are no records: foreign names, special files,
            empty files.
        odd_bytes: bytes of the foreign files among them.
        inspecting: if set, `get` raises for an unreadable file and leaves it where it is.

    Thread safety: every method, from any thread and process; also after a fork. The directory must
    be on a filesystem whose ``flock`` reaches all writers, which means one machine. Cost: a put or
    delete holds the ledger's lock for some ten microseconds. The first use of an object counts the
    directory, under the lock if it has at most 8,192 files; the first `list` counts a larger one
    while other processes write.
    """

    scheme = "file"
    shared = True
    unit = ALIGNMENT

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | None = None,
        sync: Sync = "flush",
        io: Io = "auto",
    ) -> None:
        if sys.platform == "win32":
            raise InvalidValue(
                "a file:// tier needs POSIX locks, which Windows does not have; use memory:// "
                "or a server there"
            )
        if sync not in ("never", "flush", "always"):
            raise InvalidValue(f"sync={sync!r}; it is one of never, flush, always")
        if io not in ("auto", "direct", "buffered"):
            raise InvalidValue(f"io={io!r}; it is one of auto, direct, buffered")
        self.capacity = None if capacity is None else whole("capacity", capacity, ALIGNMENT)
        self.quarantined = 0
        self.inspecting = False
        self.odd = 0
        self.odd_bytes = 0
        self._has_default = False
        self._directory = open_directory(path)
        self._usage = DiskUsage(self._directory, self.capacity)
        with self._translated("opened"):
            can = io != "buffered" and supports_direct(self._directory.format)
        if io == "direct" and not can:
            raise InvalidValue(f"the filesystem of {self.describe()} has no direct I/O; io=auto")
        self._direct_from = (0 if io == "direct" else DIRECT_FROM) if can else math.inf
        self._sync = SyncQueue(sync, self._directory.root)
        self._writer = RecordWriter(
            self._directory, self._usage, direct_from=self._direct_from, sync=sync == "always"
        )

    @classmethod
    def from_url(cls, url: TierURL) -> DiskBackend:
        """Open ``file:///absolute/path``; takes ``size``, ``sync`` and ``io``."""
        capacity, sync, io = _options(url)
        backend = cls(url.path, capacity, sync, io)
        if capacity is None:
            backend._has_default = True
            if last := backend.last_budget():
                backend._limit(last.bytes)
        return backend

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Check ``url`` without looking at the directory; it has a budget without ``size``, too."""
        capacity, _, _ = _options(url)
        if capacity is not None:
            whole("capacity", capacity, ALIGNMENT)
        return True

    @property
    def last_progress(self) -> float:  # type: ignore[override] # the contract only reads it
        """Time of the last sync of a file, in seconds of the monotonic clock."""
        return self._sync.last_progress

    # -- records --------------------------------------------------------------------------------

    def put(self, block: bytes, record: memoryview) -> None:
        """Write ``record`` to a temporary file, then rename it.

        Raises:
            OutOfRoom: capacity would be exceeded; ``needed`` says by how many bytes. Or the
                filesystem is full. Nothing changed.
            BackendFailed: the filesystem failed, or the ledger's lock was not free in time.
        """
        assert len(record), "a record of no bytes"
        self._sync.throttle(self.timeout)
        with self._translated("written", len(record)):
            self._sync.add([self._writer.write(block, record, self.timeout)])

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Read the record. An empty or unreadable file goes to quarantine.

        A symlink, pipe or directory in its place is no record and is left alone.

        Raises:
            BackendFailed: the file cannot be read, or was truncated while it was read.
        """
        path = self._directory.path(block)
        with self._translated("read"):
            try:
                held = open_record(path)
            except PermissionError:
                if self.inspecting or size_of(path) is None:
                    raise
                self.quarantine(block, "unreadable")
                return None
        if held is None:
            return None
        with closing_fd(held[0]) as fd:
            if size := held[1]:
                buffer = room(size)  # outside `_translated`: its errors pass unchanged
                with self._translated("read"):
                    if read_whole(fd, buffer, direct=size >= self._direct_from):
                        return buffer
                raise BackendFailed(f"a record in {self.describe()} was truncated meanwhile")
        self.quarantine(block, "empty")
        return None

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return sizes, by one `os.stat` each (2 µs)."""
        with self._translated("looked up"):
            return [size_of(self._directory.path(block)) for block in blocks]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Unlink records; return their sizes. The space freed is that or more."""
        freed = 0
        with self._translated("deleted"):
            for start in range(0, len(blocks), _PER_LOCK):
                some = blocks[start : start + _PER_LOCK]
                # Raises if a file or symlink has the name of a namespace's directory.
                some = [block for block in some if self._directory.has_space(block)]
                with self._usage.ledger.held(self.timeout) as count:
                    freed += sum(count.remove(self._directory.path(block), block) for block in some)
            if freed:
                self._sync.add({self._directory.space(block) for block in blocks})
        return freed

    def list(self) -> Iterator[Listed]:
        """Yield every record, from names and file attributes alone.

        The first listing also counts a large directory. Memory: 32 bytes a record of the namespace
        being listed; while it counts, 16 more for every record.
        """
        now, odd, odd_bytes = time.time(), 0, 0
        with self._translated("listed"):
            recount = self._usage.begin_recount(self.timeout)
            for block, size, used in self._directory.scan():
                if block is None:
                    odd += 1
                    odd_bytes += size
                    continue
                if recount is not None:
                    recount.saw(block, size)
                if used > now + _AHEAD:
                    # The clock was ahead when it was used. With the time of now it ages as others.
                    self.touch([block])
                yield Listed(block, size, min(used, now))
            if recount is not None:
                recount.finish(self.timeout)
        if odd_bytes and not self.odd_bytes:
            _LOG.warning(
                "%s holds %d bytes in files that are no records; kvkeep neither touches nor counts "
                "them",
                self.describe(),
                odd_bytes,
            )
        self.odd, self.odd_bytes = odd, odd_bytes

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Set modification times; does nothing where that is not permitted.

        Cost: 5 µs a block. The times of one call differ, so blocks keep their order.
        """
        before = 0
        with self._translated("touched"):
            for at, block in enumerate(blocks):
                when = time.time_ns() if used is None else int(used[at] * 1e9)
                before = when = max(when, before + _APART)
                path = self._directory.path(block)
                try:
                    if used is not None and os.lstat(path).st_mtime_ns >= when:
                        continue
                    os.utime(path, ns=(when, when), follow_symlinks=False)
                except OSError as error:
                    # A read-only directory is still good for reading.
                    if error.errno not in ABSENT | CANNOT_WRITE:
                        raise

    def quarantine(self, block: bytes, reason: str) -> None:
        """Move the record to ``quarantine/``, with the reason in its name, for inspection.

        The newest 16 are kept, in a sixteenth of the capacity at most.
        """
        directory = self._directory
        slug = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:60] or "bad"
        name = f"{time.time_ns():020}.{block.hex()}.{slug}"
        with self._translated("quarantined"), self._usage.ledger.held(self.timeout) as count:
            try:
                count.quarantine(directory.path(block), f"{directory.quarantine}/{name}", block)
            except FileNotFoundError:
                if size_of(directory.path(block)) is not None:
                    restore(directory)  # quarantine/ itself is missing
                    raise
                return
            self.quarantined += 1
            for path in directory.quarantine_surplus(self.capacity):
                if count.remove(path) and path.endswith(name):
                    # Too large to be kept: perhaps put here by hand, and never counted.
                    self._usage.ledger.recount(count)

    # -- the whole ------------------------------------------------------------------------------

    def used(self) -> int:
        """Return the bytes of all records, in whole units, unfinished and quarantined included.

        For a large directory that no `list` of this object has counted, it is the count that other
        processes wrote last.
        """
        with self._translated("counted"):
            return self._usage.used(self.timeout)

    def flush(self) -> None:
        """With ``sync="flush"``, make earlier puts and deletes survive a loss of power.

        Cost: one ``fsync`` for each record that is not synced yet, and one for each directory.
        """
        with self._translated("flushed"):
            self._sync.flush()

    def last_budget(self) -> LastBudget | None:
        """Return the budget that a store last opened the directory with; None: it is not known."""
        return read_budget(self._directory.root)

    def settle_capacity(self) -> None:
        """Remember the capacity in the file ``budget``; choose it if the URL gave none.

        See `kvkeep.store.backends.disk.notes.settle`.
        """
        if self.capacity is not None or self._has_default:
            given = None if self._has_default else self.capacity
            with self._translated("opened"):
                used = partial(self._usage.used, self.timeout)
                self._limit(settle(self._directory, given, used, self.timeout))

    def _limit(self, capacity: int | None) -> None:
        self.capacity = self._usage.capacity = capacity

    def note_space(self, space: bytes, note: bytes) -> None:
        """Append a line to the file ``spaces``."""
        with self._translated("written to"):
            add_note(self._directory.root, space, note)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """Return the lines of the file ``spaces``."""
        with self._translated("read"):
            return read_notes(self._directory.root)

    def close(self) -> None:
        """Wait up to ``timeout`` seconds for unsynced files; a thread syncs the rest afterwards."""
        self._sync.drain(self.timeout)

    def describe(self) -> str:
        """Return the directory as a URL."""
        return self._directory.url

    def _translated(self, done: str, size: int = 0) -> AbstractContextManager[None]:
        return translated(self._directory.url, done, size)


def _options(url: TierURL) -> tuple[int | None, Sync, Io]:
    """Take ``size``, ``sync`` and ``io`` out of ``url``."""
    if url.place or not url.path.strip("/"):
        path = f"/{(url.place + url.path).strip('/') or 'var/lib/kvkeep'}"
        if url.place in {".", ".."}:
            path = os.path.abspath(path[1:])
        raise InvalidValue(
            f"{url.safe} names no directory; an absolute path has three slashes: file://{path}"
        )
    capacity = url.size("size")
    sync = url.choice("sync", ("never", "flush", "always"), "flush")
    io = url.choice("io", ("auto", "direct", "buffered"), "auto")
    return capacity, cast("Sync", sync), cast("Io", io)


class RecordWriter:
    """Writes records into ``directory``, for all threads.

    Records of ``direct_from`` bytes and more are written with direct I/O. With ``sync`` each file
    is synced before it gets its name.
    """

    def __init__(
        self, directory: RecordDirectory, usage: DiskUsage, *, direct_from: float, sync: bool
    ) -> None:
        self._directory = directory
        self._usage = usage
        self._direct_from = direct_from
        self._sync = sync

    def write(self, block: bytes, record: memoryview, timeout: float) -> str:
        """Write ``record``; return its path. ``timeout`` limits each wait for the ledger's lock."""
        path = self._directory.path(block)
        fd, tmp = self._reserve(padded(len(record)), timeout)
        try:
            self._fill(fd, record)
            self._rename(tmp, path, block, timeout)
        except BaseException:
            self._discard(tmp, timeout)
            raise
        finally:
            os.close(fd)
        return path

    def _reserve(self, size: int, timeout: float) -> tuple[int, str]:
        """Create a temporary file whose ``size`` bytes count as used from now on."""
        tmp = f"{self._directory.tmp}/{os.getpid()}-{os.urandom(12).hex()}"
        with self._usage.ledger.held(timeout) as count:
            self._usage.make_room(count, size)
            count.mark(size)
            try:
                fd = self._create(tmp, size)
            except OSError:
                count.settle()  # nothing changed
                raise
            count.used += size
        return fd, tmp

    def _create(self, tmp: str, size: int) -> int:
        try:
            return create_locked(tmp, size)
        except FileNotFoundError:
            restore(self._directory)  # tmp/ was removed from outside
            return create_locked(tmp, size)

    def _fill(self, fd: int, record: memoryview) -> None:
        size = len(record)
        preallocate(fd, padded(size))
        write_whole(fd, record, direct=size >= self._direct_from)
        if size != padded(size):
            os.ftruncate(fd, size)
        # The kernel stamps writes by a coarse clock; this finer one keeps the order of records.
        os.utime(fd, ns=(now := time.time_ns(), now))
        if self._sync:
            os.fsync(fd)

    def _rename(self, tmp: str, path: str, block: bytes, timeout: float) -> None:
        """Give the finished file the name of its record."""
        with self._usage.ledger.held(timeout) as count:
            if not self._directory.has_space(block):
                os.mkdir(self._directory.space(block), 0o700)
            count.rename(tmp, path, block)

    def _discard(self, tmp: str, timeout: float) -> None:
        try:
            with self._usage.ledger.held(timeout) as count:
                count.remove(tmp)
        except OSError:
            # Report the error of the put, not this one. The file stays counted, and is removed
            # later like the files of killed writers.
            return


class DiskUsage:
    """Counts the bytes used, and frees space by removing unfinished files of killed writers.

    Attributes:
        capacity: maximum bytes; None: as much as the filesystem has.
        ledger: the count and its lock.
    """

    def __init__(self, directory: RecordDirectory, capacity: int | None) -> None:
        self._directory = directory
        self.capacity = capacity
        self.ledger = DiskLedger(directory.ledger, self._recount, partial(restore, directory))

    def used(self, timeout: float) -> int:
        """Return the bytes used, waiting for the lock for ``timeout`` seconds at most."""
        try:
            with self.ledger.held(timeout) as count:
                return count.used
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
        used = self._directory.used()
        assert used is not None, "without a limit all is counted"
        return used

    def make_room(self, count: Count, need: int) -> None:
        """Raise `OutOfRoom` unless ``need`` more bytes fit; free space first if needed."""
        if self.capacity is None or count.used + need <= self.capacity:
            return
        self._remove_abandoned(count)
        counted_at = self.ledger.counted_at
        if counted_at is not None and time.monotonic() - counted_at > RECOUNT_AFTER:
            self.ledger.recount(count)
        if count.used + need > self.capacity:
            raise OutOfRoom(count.used + need - self.capacity, self._directory.url)

    def begin_recount(self, timeout: float) -> Recount | None:
        """Return a recount if the directory has to be counted; the caller feeds it from a scan."""
        try:
            if self.ledger.counted_at is None:
                with self.ledger.held(timeout):
                    pass  # the first use counts a small directory
            if self.ledger.wants_count:
                return Recount(self.ledger, self._directory, timeout)
        except OSError as error:
            # A read-only directory need not be counted; a missing one is listed as empty.
            if error.errno not in CANNOT_WRITE | {errno.ENOENT}:
                raise
        return None

    def _recount(self, count: Count) -> int | None:
        self._remove_abandoned(count)
        self._directory.remove_spaces(self._directory.empty_spaces())
        return self._directory.used(SMALL)

    def _remove_abandoned(self, count: Count) -> None:
        for path in self._directory.abandoned():
            count.remove(path)
