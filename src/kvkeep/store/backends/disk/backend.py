"""Records as files in a directory of a local disk, which several processes may share.

disk.py          the backend
disk_home.py     the directory: what lies where, whose it is
disk_ledger.py   the bytes used, counted by all who write
disk_journal.py  what changes while a large directory is counted
disk_sync.py     what is still to be made to last
disk_files.py    whole records to and from files, with direct I/O
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import time
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom, whole
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed
from kvkeep.store.backends.disk import notes
from kvkeep.store.backends.disk.directory import SMALL, Home
from kvkeep.store.backends.disk.files import (
    ABSENT,
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
from kvkeep.store.backends.disk.ledger import DiskLedger, Recount
from kvkeep.store.backends.disk.sync import Sync, Syncing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvkeep.store.backends.base import Room
    from kvkeep.store.backends.disk.ledger import Count
    from kvkeep.store.backends.urls import TierURL

__all__ = ["DiskBackend", "Io", "Sync"]

_LOG = logging.getLogger("kvkeep.tiers")

Io = Literal["auto", "direct", "buffered"]

DIRECT_FROM: Final = 64 * 1024
"""Bytes: with ``io="auto"``, records from this size on go around the page cache. Below it, waiting
for the device costs more than copying does."""
RECOUNT_AFTER: Final = 300.0
"""Seconds after which a full store is counted anew: somebody may have deleted files by hand."""
_PER_LOCK: Final = 32  # files that are unlinked while others wait
_APART: Final = 1000  # nanoseconds between the times of two blocks that were used at once
_AHEAD: Final = 1.0  # seconds that a file's time may be ahead of the clock

_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}


class DiskBackend(Backend):
    """One directory of a disk, one file a record: ``file:///path?size=200GiB&sync=flush&io=auto``.

    Arguments:
        path: the directory. It is made with mode 0700; one of ours is tightened to that. It must
            be empty or hold records already; nothing that is not ours is ever deleted.
        capacity: bytes that all records may have, files counted in whole units of 4096 bytes,
            those being written and those in quarantine included. All processes that share the
            directory are counted together, at any instant; each keeps to its own capacity. Files
            that are no records are not counted. None: as much as the filesystem has.
        sync: what survives a loss of power, see below.
        io: ``direct`` goes around the page cache, ``buffered`` through it; ``auto`` is direct from
            64 KiB on where the filesystem can, else buffered.

    What survives, by ``sync``:

        =========  ====================  ========================================================
        ``sync``   the process killed    power lost, or the kernel crashed
        =========  ====================  ========================================================
        never      every finished put    nothing is sure; records may be torn or empty
        flush      every finished put    what was put before the last `flush` that returned
        always     every finished put    every finished put
        =========  ====================  ========================================================

    A record is never torn by a killed process: it gets its name when it is whole. One that power
    loss tore is found by its checksum, in the tier above. A `delete` is as lasting as a put. A disk
    that lies about its write cache can break the promises of the last column.

    With ``flush``, a thread syncs in the background what was put, from 64 files on, so a `flush`
    has little left to do. Where the disk syncs more slowly than is put, 32,768 files may wait; then
    each put is slowed down by a second at most, or half of ``timeout`` if that is shorter, and from
    65,536 on it fails.

    The space of what was deleted or replaced is given back within milliseconds of the call; the
    count is ahead by that.

    A directory that is emptied, removed, replaced or moved while it is open is made anew by the
    next put or delete, on the same filesystem only: `stale_listings` tells.

    Attributes:
        quarantined: records taken out by this object because they did not verify.
        odd: what the last full `list` found that is no record: foreign names, no files, empty.
        odd_bytes: what the foreign files among them have; they are not counted.

    Thread safety: every method, from any thread and process; a fork may go on using it. The
    directory must be on a filesystem whose ``flock`` reaches all that write there: one machine's.
    Cost: a put or delete takes the ledger's lock for some ten microseconds. The first use of an
    object counts the directory, with the lock held if it has 8,192 files at most; a larger one is
    counted by the first `list`, while others go on writing.
    """

    scheme: ClassVar[str] = "file"
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
        self.odd = 0
        self.odd_bytes = 0
        self._home = Home(path)
        self._ledger = DiskLedger(
            self._home.ledger, self._recount, self._home.restore, self._replaced
        )
        self._spaces: set[bytes] = set()  # namespaces whose directory was there when last used
        self._sweeps = self._ledger.sweeps()
        with self._translated("opened"):
            can = io != "buffered" and supports_direct(self._home.format)
        if io == "direct" and not can:
            raise InvalidValue(f"the filesystem of {self.describe()} has no direct I/O; io=auto")
        self._direct_from = (0 if io == "direct" else DIRECT_FROM) if can else None
        self._syncing = Syncing(sync, self._home.root)

    @classmethod
    def from_url(cls, url: TierURL) -> DiskBackend:
        """Open ``file:///absolute/path``; takes ``size``, ``sync`` and ``io``."""
        if url.place or not url.path.strip("/"):
            raise InvalidValue(
                f"{url.safe} names no directory; an absolute path has three slashes: "
                f"file:///{(url.place + url.path).strip('/') or 'var/lib/kvkeep'}"
            )
        capacity = url.size("size")
        sync = url.choice("sync", ("never", "flush", "always"), "flush")
        io = url.choice("io", ("auto", "direct", "buffered"), "auto")
        return cls(url.path, capacity, sync, io)  # type: ignore[arg-type] # choice checked both

    @property
    def slowed(self) -> int:
        """Puts that waited because the disk syncs more slowly than is put."""
        return self._syncing.slowed

    @property
    def last_progress(self) -> float:  # type: ignore[override] # the contract only reads it
        """When a file was synced last (seconds of the monotonic clock)."""
        return self._syncing.last_progress

    # -- records --------------------------------------------------------------------------------

    def put(self, block: bytes, record: memoryview) -> None:
        """Write ``record`` beside the others, then give it its name.

        Raises:
            OutOfRoom: capacity would be passed, and ``needed`` bytes must go before; or the
                filesystem is full. Nothing changed.
            BackendFailed: the filesystem refuses, or the lock could not be had.
        """
        assert len(record), "a record of no bytes"
        self._syncing.slow_down(self.timeout)
        with self._translated("written", len(record)):
            path = self._home.path(block)
            fd, tmp = self._reserve(len(record))
            try:
                self._fill(fd, record)
                self._name(tmp, path, block)
            except BaseException:
                self._forget(tmp)
                raise
            finally:
                os.close(fd)
            self._syncing.changed([path])

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Read the record. An empty file, or one that may not be read, goes to quarantine.

        A symlink, a pipe or a directory in its place is no record, and is left alone.

        Raises:
            BackendFailed: the file could not be read, or was cut short while it was read.
        """
        reason: str | None = None
        with self._translated("read"):
            try:
                held = open_record(self._home.path(block))
            except PermissionError:
                if size_of(self._home.path(block)) is None:
                    raise
                held, reason = None, "unreadable"
        if reason is not None:
            self.quarantine(block, reason)
            return None
        if held is None:
            self._look([block])
            return None
        fd, size = held
        try:
            if size:
                buffer = room(size)  # what it raises is the caller's
                with self._translated("read"):
                    if read_whole(fd, buffer, direct=self._is_direct(size)):
                        return buffer
                raise BackendFailed(f"a record in {self.describe()} was cut short meanwhile")
        finally:
            os.close(fd)
        self.quarantine(block, "empty")
        return None

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Bytes of each record, one look at the directory each (2 µs)."""
        with self._translated("looked up"):
            found = [size_of(self._home.path(block)) for block in blocks]
        if None in found:
            self._look(blocks)
        return found

    def peek(self, block: bytes, size: int) -> bytes | None:
        """The first ``size`` bytes of a record; None when it is not there."""
        with self._translated("read"):
            held = open_record(self._home.path(block))
            if held is None:
                return None
            try:
                return os.pread(held[0], size, 0)
            finally:
                os.close(held[0])

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Unlink records; how many bytes they had. The room they leave is that or more."""
        freed = 0
        with self._translated("deleted"):
            for start in range(0, len(blocks), _PER_LOCK):
                some = blocks[start : start + _PER_LOCK]
                # A directory that is none of ours is looked into by nobody.
                some = [block for block in some if self._home.has_space(block)]
                with self._ledger.held(self.timeout) as count:
                    freed += sum(count.remove(self._home.path(block), block) for block in some)
            if freed:
                self._syncing.changed({self._home.space(block) for block in blocks})
        return freed

    def list(self) -> Iterator[Listed]:
        """Every record, by names and file attributes alone.

        The first time, a large directory is counted as well. Memory: 32 bytes a record of the
        namespace that is being listed, 48 while it is counted.
        """
        now, odd, odd_bytes = time.time(), 0, 0
        spaces: set[bytes] = set()
        with self._translated("listed"):
            recount = self._recount_along()
            for block, size, used in self._home.scan():
                if block is None:
                    odd += 1
                    odd_bytes += size
                    continue
                if recount is not None:
                    recount.saw(block, size)
                spaces.add(block[:SPACE_BYTES])
                if used > now + _AHEAD:
                    # The clock was ahead. Used now at the latest, it must age from now on.
                    self.touch([block])
                yield Listed(block, size, min(used, now))
            if recount is not None:
                recount.finish(self.timeout, self._home.path, self._home.beside)
        self._spaces = spaces
        if odd_bytes and not self.odd_bytes:
            _LOG.warning(
                "%s holds %d bytes in files that are no records; they are left alone and not "
                "counted",
                self.describe(),
                odd_bytes,
            )
        self.odd, self.odd_bytes = odd, odd_bytes

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Set the modification time; where that is not allowed, recency is not remembered.

        Cost: 5 µs a block. No two of a call get the same time, so they keep their order.
        """
        before = 0
        with self._translated("touched"):
            for at, block in enumerate(blocks):
                when = time.time_ns() if used is None else int(used[at] * 1e9)
                before = when = max(when, before + _APART)
                path = self._home.path(block)
                try:
                    if used is not None and os.lstat(path).st_mtime_ns >= when:
                        continue
                    os.utime(path, ns=(when, when), follow_symlinks=False)
                except OSError as error:
                    # A read-only store is still good for reading.
                    if error.errno not in ABSENT | _READ_ONLY:
                        raise

    def quarantine(self, block: bytes, reason: str) -> None:
        """Move the record out of the way; the newest 16 are kept for inspection.

        They have a sixteenth of the capacity at most, and the reason in their names.
        """
        slug = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:60] or "bad"
        name = f"{time.time_ns():020}.{block.hex()}.{slug}"
        with self._translated("quarantined"), self._ledger.held(self.timeout) as count:
            try:
                count.put_aside(self._home.path(block), f"{self._home.quarantine}/{name}", block)
            except FileNotFoundError:
                if size_of(self._home.path(block)) is not None:
                    self._home.restore()  # its own directory is missing
                    raise
                return
            self.quarantined += 1
            for path in self._home.surplus(self.capacity):
                if count.remove(path) and path.endswith(name):
                    # So large that somebody may have put it here by hand, where nobody counted it.
                    self._ledger.recount(count)

    # -- the whole ------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes of all records, in whole units, with those being written and in quarantine.

        Of a large directory that was never counted, as `list` does, it is what the last process
        wrote down.
        """
        with self._translated("counted"):
            try:
                with self._ledger.held(self.timeout) as count:
                    return count.used
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
            used = self._home.used()
            assert used is not None, "without a limit all is counted"
            return used

    def flush(self) -> None:
        """With ``sync="flush"``, all that was put or deleted before this survives a loss of power.

        Cost: one ``fsync`` a record that was not synced in the background, and one a directory.
        """
        with self._translated("flushed"):
            self._syncing.flush()

    def note_space(self, space: bytes, note: bytes) -> None:
        """A line of the file ``spaces``."""
        with self._translated("written to"):
            notes.note(self._home.root, space, note)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """The lines of the file ``spaces``."""
        with self._translated("read"):
            return notes.noted(self._home.root)

    def close(self) -> None:
        """Sync what is left, for as long as a call may take; the rest is synced behind it."""
        self._syncing.drain(self.timeout)

    def describe(self) -> str:
        """The directory as a URL."""
        return f"file://{self._home.root}"

    # -- the steps of put -----------------------------------------------------------------------

    def _reserve(self, size: int) -> tuple[int, str]:
        """Create the file of a record, as long as it will be: its length is what is counted."""
        tmp = f"{self._home.tmp}/{os.getpid()}-{os.urandom(12).hex()}"
        with self._ledger.held(self.timeout) as count:
            self._make_room(count, padded(size))
            count.mark(padded(size))
            try:
                fd = self._create(tmp, padded(size))
            except OSError:
                count.settle()  # nothing changed
                raise
            count.used += padded(size)
        return fd, tmp

    def _create(self, tmp: str, size: int) -> int:
        try:
            return create_locked(tmp, size)
        except FileNotFoundError:
            self._home.restore()  # the directory of what is being written was taken away
            return create_locked(tmp, size)

    def _make_room(self, count: Count, need: int) -> None:
        """Have ``need`` bytes below the capacity, without a record that is any good going."""
        if self.capacity is None or count.used + need <= self.capacity:
            return
        self._collect(count)
        counted_at = self._ledger.counted_at
        if counted_at is not None and time.monotonic() - counted_at > RECOUNT_AFTER:
            self._ledger.recount(count)
        if count.used + need > self.capacity:
            raise OutOfRoom(count.used + need - self.capacity, self.describe())

    def _fill(self, fd: int, record: memoryview) -> None:
        size = len(record)
        preallocate(fd, padded(size))
        write_whole(fd, record, direct=self._is_direct(size))
        if size != padded(size):
            os.ftruncate(fd, size)
        # The kernel stamps writes by a coarse clock; by this one records keep their order.
        os.utime(fd, ns=(now := time.time_ns(), now))
        if self._syncing.mode == "always":
            os.fsync(fd)

    def _name(self, tmp: str, path: str, block: bytes) -> None:
        """Give a record that is whole its name."""
        with self._ledger.held(self.timeout) as count:
            if not self._home.has_space(block):
                if self._lost({block[:SPACE_BYTES]}):
                    self._ledger.recount(count)  # what was there may be counted
                    self._doubt()
                os.mkdir(self._home.space(block), 0o700)
            count.rename(tmp, path, block)
        self._spaces.add(block[:SPACE_BYTES])

    def _forget(self, tmp: str) -> None:
        """Take a record away that got no name."""
        try:
            with self._ledger.held(self.timeout) as count:
                count.remove(tmp)
        except OSError:
            # What made the put fail is what the caller should hear of. The file is counted, and
            # collected like those of killed writers.
            return

    # -- helpers --------------------------------------------------------------------------------

    def _is_direct(self, size: int) -> bool:
        return self._direct_from is not None and size >= self._direct_from

    def _recount(self, count: Count) -> int | None:
        self._collect(count)
        if empty := self._home.empty_spaces():
            before = self._ledger.sweeps()
            count.sweep()
            self._home.sweep(empty)
            if before == self._sweeps:  # nobody else took any away: it is known which are gone
                self._sweeps = self._ledger.sweeps()
                self._spaces.difference_update(map(bytes.fromhex, empty))
        return self._home.used(SMALL)

    def _collect(self, count: Count) -> None:
        """Take away what killed writers left."""
        for path in self._home.left_behind():
            count.remove(path)

    def _recount_along(self) -> Recount | None:
        """What counts the directory while it is listed, if that must be."""
        try:
            if self._ledger.counted_at is None:
                with self._ledger.held(self.timeout):
                    pass  # the first use of an object counts
            if self._ledger.wants_count:
                return Recount(self._ledger, self.timeout)
        except OSError as error:
            # What can only be read need not be counted. One that is gone is listed as empty.
            if error.errno not in _READ_ONLY | {errno.ENOENT}:
                raise
        return None

    def _look(self, blocks: Sequence[bytes]) -> None:
        """Some of ``blocks`` are missing: see whether they are gone together with all others."""
        lost = self._lost({block[:SPACE_BYTES] for block in blocks})
        if lost or not self._ledger.is_there():
            self._ledger.forget()
            self._spaces -= lost
            self._doubt()

    def _lost(self, spaces: set[bytes]) -> set[bytes]:
        """Those of ``spaces`` whose directory was there and is gone, with what was in it."""
        lost = {space for space in spaces & self._spaces if not self._has(space)}
        if lost and (sweeps := self._ledger.sweeps()) != self._sweeps:
            # Somebody counted, and took away what was empty. These may have been.
            self._sweeps = sweeps
            known = self._spaces.copy()  # other threads put meanwhile
            self._spaces.difference_update([space for space in known if not self._has(space)])
            lost = set()
        return lost

    def _has(self, space: bytes) -> bool:
        return os.path.isdir(self._home.space(space))

    def _replaced(self) -> None:
        self._spaces = set()
        self._doubt()

    def _doubt(self) -> None:
        _LOG.warning(
            "%s was emptied or replaced by somebody else; it is listed again", self.describe()
        )
        self.stale_listings += 1

    def _translated(self, done: str, size: int = 0) -> AbstractContextManager[None]:
        return translated(self.describe(), done, size)
