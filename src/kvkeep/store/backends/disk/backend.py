"""`DiskBackend`: records as files in a directory."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import stat
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, cast

from kvkeep.core.errors import BackendFailed, InvalidValue, whole
from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed
from kvkeep.store.backends.disk.directory import RecordDirectory
from kvkeep.store.backends.disk.files import (
    CANNOT_WRITE,
    closing_fd,
    lstat,
    open_record,
    padded,
    preallocate,
    read_whole,
    size_of,
    supports_direct,
    translated,
    write_whole,
)
from kvkeep.store.backends.disk.index import DiskIndex, LastBudget
from kvkeep.store.backends.disk.sync import Sync, SyncQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvkeep.store.backends.base import Room
    from kvkeep.store.backends.urls import TierURL

__all__ = ["DiskBackend", "Io"]

_LOG = logging.getLogger("kvkeep.tiers")
Io = Literal["auto", "direct", "buffered"]
DIRECT_FROM: Final = 64 * 1024
"""Bytes from which ``io="auto"`` bypasses the page cache. Below, waiting for the device costs more
than a copy."""

_AT_ONCE: Final = 32  # files unlinked in one transaction
_APART: Final = 1000  # nanoseconds between the times of two blocks used at once
_SHARE: Final = 0.8  # of the free space, that a directory without a budget takes


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
    be on a filesystem of one machine.

    Cost: a put or delete waits for the index, for some ten microseconds; with 16 MiB of the budget
    free, most puts do not: each process reserves room ahead, 256 KiB or four records, but at most a
    64th of what is free. It counts as used. The first use of a directory without an index, and the
    first listing after a kill, look at each file.
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
        self._directory = RecordDirectory(path)
        self._index = DiskIndex(self._directory)
        with self._translated("opened"):
            can = io != "buffered" and supports_direct(self._directory.format)
        if io == "direct" and not can:
            raise InvalidValue(f"the filesystem of {self.describe()} has no direct I/O; io=auto")
        self._direct_from = (0 if io == "direct" else DIRECT_FROM) if can else math.inf
        self._sync = SyncQueue(sync, self._directory.root)

    @classmethod
    def from_url(cls, url: TierURL) -> DiskBackend:
        """Open ``file:///absolute/path``; takes ``size``, ``sync`` and ``io``."""
        capacity, sync, io = _options(url)
        backend = cls(url.path, capacity, sync, io)
        if capacity is None:
            backend._has_default = True
            if last := backend.last_budget():
                backend.capacity = last.bytes
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
            BackendFailed: the filesystem failed, or the index was locked for too long.
        """
        size = len(record)
        assert size, "a record of no bytes"
        self._sync.throttle(self.timeout)
        with self._translated("written", size):
            self._directory.check_space(block)
            draft, used = self._index.reserve(size, self.capacity, self.timeout), None
            try:
                self._write(draft, record)
                self._directory.rename(draft, block)
                used = time.time_ns()
            finally:
                if used is None:
                    with suppress(FileNotFoundError):
                        os.unlink(draft)
                self._index.finish(block, size, used)
            self._sync.add([self._directory.path(block)])

    def _write(self, path: str, record: memoryview) -> None:
        size, is_direct = len(record), len(record) >= self._direct_from
        with closing_fd(self._directory.create(path)) as fd:
            if size >= DIRECT_FROM:
                preallocate(fd, padded(size))
            write_whole(fd, record, direct=is_direct)
            if size != padded(size) and (size >= DIRECT_FROM or is_direct):
                os.ftruncate(fd, size)
            if self._sync.mode == "always":
                os.fsync(fd)

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
            self._index.suspect(block)
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
            for start in range(0, len(blocks), _AT_ONCE):
                some = blocks[start : start + _AT_ONCE]
                try:
                    freed += sum(self._unlink(block) for block in some)
                finally:
                    self._index.settle(some, self.timeout)
            if freed:
                self._sync.add({self._directory.space(block) for block in blocks})
        return freed

    def _unlink(self, block: bytes) -> int:
        """Unlink a record; return its size in bytes."""
        path = self._directory.path(block)
        # check_space raises if a file or symlink has the name of a namespace's directory.
        there = lstat(path) if self._directory.check_space(block) else None
        if there is None or not stat.S_ISREG(there.st_mode):
            return 0
        with suppress(FileNotFoundError):
            os.unlink(path)
        return there.st_size

    def list(self) -> Iterator[Listed]:
        """Yield every record, from names and the index.

        Memory: 64 bytes a record of the namespace being listed.
        """
        now, odd, odd_bytes = time.time(), 0, 0
        with self._translated("listed"):
            for item in self._records():
                if isinstance(item, int):
                    odd += 1
                    odd_bytes += item
                else:
                    yield item if item.used <= now else item._replace(used=now)
        if odd_bytes and not self.odd_bytes:
            _LOG.warning(
                "%s holds %d bytes in files that are no records; kvkeep neither touches nor counts "
                "them",
                self.describe(),
                odd_bytes,
            )
        self.odd, self.odd_bytes = odd, odd_bytes

    def _records(self) -> Iterator[Listed | int]:
        try:
            yield from self._index.sweep(self.timeout)
        except OSError as error:
            if error.errno not in CANNOT_WRITE | {errno.ENOENT, errno.ENOSPC}:
                raise
            # A read-only or full directory is still good for reading; a missing one has no records.
            yield from self._directory.scan()

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Record times of use in one transaction; does nothing in a read-only directory.

        Cost: 5 µs a block. The times of one call differ, so blocks keep their order.
        """
        times, before = [], 0
        for at in range(len(blocks)):
            when = time.time_ns() if used is None else int(used[at] * 1e9)
            times.append(before := max(when, before + _APART))
        with self._translated("touched"):
            try:
                self._index.touch(blocks, times, self.timeout)
            except OSError as error:
                if error.errno not in CANNOT_WRITE:
                    raise

    def quarantine(self, block: bytes, reason: str) -> None:
        """Move the record to ``quarantine/``, with the reason in its name, for inspection.

        The newest 16 are kept, in a sixteenth of the capacity at most.
        """
        slug = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:60] or "bad"
        name = f"{time.time_ns():020}.{block.hex()}.{slug}"
        with self._translated("quarantined"):
            if self._directory.move_away(block, name):
                self.quarantined += 1
                self._sync.add([self._directory.space(block)])
            self._index.trim_quarantine(block, self.capacity, self.timeout)

    def used(self) -> int:
        """Return the bytes used by all processes."""
        with self._translated("counted"):
            try:
                return self._index.used(self.timeout)
            except OSError as error:
                if error.errno not in CANNOT_WRITE | {errno.ENOSPC}:
                    raise
            listing = self._directory.scan()
            return sum(padded(item.size) for item in listing if isinstance(item, Listed))

    def flush(self) -> None:
        """With ``sync="flush"``, make earlier puts and deletes survive a loss of power.

        Cost: one ``fsync`` for each record that is not synced yet, and one for each directory.
        """
        with self._translated("flushed"):
            self._sync.flush()

    def last_budget(self) -> LastBudget | None:
        """Return the budget that a store last opened the directory with; None: it is not known."""
        try:
            return self._index.last_budget(self.timeout)
        except OSError:
            return None

    def settle_capacity(self) -> None:
        """Remember the capacity in the index; choose it if the URL gave none.

        It is the one that the directory was last opened with, but no more than the filesystem has.
        A directory without one gets what it holds and 80 % of the space that is free now: so
        opening it evicts nothing, and a fifth stays free.

        Remembers nothing in a directory that this process may only read, or while another process
        is stopped within a change.
        """
        if self.capacity is None and not self._has_default:
            return
        given = None if self._has_default else self.capacity
        is_new = False

        def choose(last: LastBudget | None, used: int) -> LastBudget:
            nonlocal is_new
            there, now = os.statvfs(self._directory.root), time.time()
            if given is not None:
                return LastBudget(given, True, now)
            if last is not None:
                return LastBudget(min(last.bytes, there.f_blocks * there.f_frsize), last.given, now)
            is_new = True
            free = int(there.f_bavail * there.f_frsize * _SHARE)
            return LastBudget(max(ALIGNMENT, used + free), False, now)

        with self._translated("opened"):
            try:
                budget = self._index.agree(choose, self.timeout, sweep=given is None)
                self.capacity = budget.bytes
            except OSError:
                self.capacity = choose(self.last_budget(), 0).bytes
        if given is None:
            size = format_bytes(self.capacity)
            if is_new:
                _LOG.warning(
                    "%s has no size=: it keeps to %s, which is what it holds and 80 %% of the free "
                    "space. The directory remembers this; size= changes it",
                    self.describe(),
                    size,
                )
            else:
                _LOG.info(
                    "%s has no size=: it keeps to %s, as when last opened", self.describe(), size
                )

    def note_space(self, space: bytes, note: bytes) -> None:
        """Add a note to the index; 64 KiB in all at most."""
        with self._translated("written to"):
            self._index.add_note(space, note, self.timeout)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """Return the notes of the index."""
        with self._translated("read"):
            return self._index.notes(self.timeout)

    def close(self) -> None:
        """Wait up to ``timeout`` seconds for unsynced files; a thread syncs the rest afterwards."""
        self._sync.drain(self.timeout)
        self._index.close(self.timeout)

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
