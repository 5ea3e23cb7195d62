"""The bytes used in a directory, counted by all the processes that write there.

    lock ─▶ counted, and unmarked? ──no──▶ recount: a scan of the directory, if it is small
                │ yes                        │
                ▼                            ▼
              is there room? ─▶ mark ─▶ create, rename or unlink ─▶ new count, unmark ─▶ unlock

A process that is killed while the mark is set leaves it there, and the next one recounts. A process
that is killed elsewhere leaves a right count. The count that power loss leaves is not trusted: each
process recounts once, before its first use. The lock is flock's, so it ends with its holder; it is
held for accounting, never while data is written, and never while a large directory is scanned.

A large directory is counted while others write there, in three steps (`Recount`):

1. Under the lock: begin a journal (`disk_journal`). From now on it has every record that changes.
2. Without the lock: add up the sizes of all records. What changes meanwhile is seen or missed.
3. Under the lock: look again at each record in the journal; write the count; end the journal.

Until then the count that was there goes on being used. A killed process leaves one that is too high
at most, by the change that it was making; a loss of power leaves an old one, and whoever takes the
ledger away leaves 0.

The file, little-endian:

     0  magic, 1 when unmarked, bytes used
    24  which ledger this is
    40  what the journal is for and where it ends, see disk_journal
    56  how often directories of empty namespaces were taken away
    64  the journal
"""

from __future__ import annotations

import os
import struct
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.disk.directory import LEDGER_MAGIC as _MAGIC
from kvkeep.store.backends.disk.files import open_known, padded, pin, size_of
from kvkeep.store.backends.disk.journal import HEAD, ChangeJournal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import fcntl

__all__ = ["Count", "DiskLedger", "Recount"]

_LAYOUT: Final = struct.Struct("<8sQQ")  # magic, 1 when unmarked, bytes used
_ID: Final = struct.Struct("<16s")  # which ledger this is
_SWEEPS_AT: Final = 56  # behind the journal's state
_NOT_YET: Final = bytes(_ID.size)
_FIRST_PAUSE: Final = 0.0001  # seconds


class Count:
    """The bytes used, while the lock is held: every change of the directory goes through here.

    ``used`` is set after `mark`. It is in bytes, each file counted in whole units of `ALIGNMENT`.
    """

    __slots__ = ("_fd", "_marked", "journal", "pins", "used")

    def __init__(self, fd: int, used: int, journal: ChangeJournal) -> None:
        self._fd = fd
        self._marked = False
        self.journal = journal
        self.pins: list[int] = []  # what is unlinked already, and freed when the lock is
        self.used = used

    def mark(self, more: int = 0) -> None:
        """The directory is about to change, and ``used`` with it, by at most ``more`` bytes.

        That much is written at once: whoever is killed leaves no count that is too low.
        """
        if more or not self._marked:
            self._marked = True
            self._write(more)

    def settle(self) -> None:
        """``used`` is what is in the directory: write it down and take the mark away."""
        # Below zero somebody put files here by hand, which nobody counted: the mark stays.
        if self._marked and self.used >= 0:
            self._marked = False
            self._write(0)

    def remove(self, path: str, block: bytes | None = None) -> int:
        """Unlink a file; how long it was, in bytes, 0 when it is not there or no regular file.

        ``block``: the record that it is, if it is one.
        """
        held = pin(path)
        if held is None:
            return 0
        self.pins.append(held[0])
        self.mark()
        if block is not None:
            self.journal.note(block)
        os.unlink(path)
        self.used -= padded(held[1])
        return held[1]

    def rename(self, source: str, target: str, block: bytes) -> None:
        """Move a file to ``target``, the record of ``block``, in place of what is there."""
        held = pin(target)
        self.mark()
        self.journal.note(block)
        if held is not None:
            self.pins.append(held[0])
        try:
            os.rename(source, target)
        except OSError:
            self.settle()  # nothing changed
            raise
        if held is not None:
            self.used -= padded(held[1])

    def put_aside(self, source: str, target: str, block: bytes) -> None:
        """Move the record of ``block`` to quarantine, where it counts as much as before."""
        if self.journal:
            self.mark()
            self.journal.note(block)
        try:
            os.rename(source, target)
        except FileNotFoundError:
            self.settle()
            raise

    def sweep(self) -> None:
        """Directories of empty namespaces are about to be taken away: see `DiskLedger.sweeps`."""
        data = ((_sweeps(self._fd) + 1) % (1 << 64)).to_bytes(8, "little")
        os.pwrite(self._fd, data, _SWEEPS_AT)

    def _write(self, more: int) -> None:
        # One call within one page: whoever is killed has written all of it or nothing.
        data = _LAYOUT.pack(_MAGIC, not self._marked, max(self.used + more, 0))
        os.pwrite(self._fd, data, 0)


class DiskLedger:
    """The file that holds the count, and its lock.

    Arguments:
        path: the file.
        recount: scans the directory for the bytes used, or says None when it is too large for
            that. It is called with the lock held, before the first use and whenever the count
            cannot be trusted. After a None `wants_count` is set, until a `Recount` is finished.
        restore: makes the file when it is gone.
        replaced: is called when the file is another one than at the last use: somebody emptied or
            exchanged the directory.

    Thread safety: every use opens the file anew, so the lock is between threads as well as
    processes, and a fork inherits nothing that it could hold for ever.
    """

    def __init__(
        self,
        path: str,
        recount: Callable[[Count], int | None],
        restore: Callable[[], None] | None = None,
        replaced: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.counted_at: float | None = None  # seconds of the monotonic clock
        self.wants_count = False
        self._recount = recount
        self._restore = restore
        self._replaced = replaced
        self._id = _NOT_YET
        self._file: tuple[int, int] | None = None  # device and inode at the last use

    @contextmanager
    def held(self, timeout: float) -> Iterator[Count]:
        """Hold the lock around accounting; what is raised while the mark is set leaves it set.

        Raises `BackendFailed` when the lock could not be had in ``timeout`` seconds.
        """
        fd = self._open_locked(timeout)
        pins: list[int] = []
        try:
            count = self._counted(fd)
            pins = count.pins
            yield count
            count.settle()
        finally:
            # Closing is not enough where a process was forked meanwhile: it has the file open too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            for held in (fd, *pins):
                os.close(held)

    def recount(self, count: Count) -> None:
        """Count anew while the lock is held; a large directory is counted by the next listing."""
        count.mark()
        used = self._recount(count)
        if used is None:
            self.wants_count = True
        else:
            count.used = used
            if count.journal:  # of a recount that goes on or was killed: nobody needs it now
                count.journal.end()
        count.settle()
        self.counted_at = time.monotonic()

    def is_there(self) -> bool:
        """Whether the file is the one that was used last. Cost: one look at the directory."""
        return self._file is None or self._file == _file_at(self.path)

    def sweeps(self) -> int:
        """How often somebody took away the directories of empty namespaces; no lock is needed.

        Whoever misses such a directory, and finds this number to be another one than before, need
        not think that records were lost with it.
        """
        try:
            fd, _ = open_known(self.path, os.O_RDONLY)
        except OSError:
            return 0
        try:
            return _sweeps(fd)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """It was seen that the file is not the one of the last use: ask `is_there` no more."""
        self._file = None

    def _open_locked(self, timeout: float) -> int:
        while True:
            try:
                fd, found = open_known(self.path, os.O_RDWR)
            except FileNotFoundError:
                if self._restore is None:
                    raise
                self._restore()
                fd, found = open_known(self.path, os.O_RDWR)
            try:
                waited = self._lock(fd, timeout)
                self._file = found.st_dev, found.st_ino
                if not waited or _file_at(self.path) == self._file:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was taken away while we waited: that lock excludes nobody

    def _counted(self, fd: int) -> Count:
        head = os.pread(fd, HEAD, 0).ljust(HEAD, b"\0")
        used, journal = self._trusted(head), ChangeJournal(fd, head)
        (own,) = _ID.unpack_from(head, _LAYOUT.size)
        replaced = self.counted_at is not None and own != self._id
        if used is not None and self.counted_at is not None and not replaced:
            return Count(fd, used, journal)
        count = Count(fd, self._estimate(head), journal)
        if own == _NOT_YET:
            own = os.urandom(_ID.size)
            os.pwrite(fd, own, _LAYOUT.size)
        self._id = own
        self.recount(count)
        if replaced and self._replaced is not None:
            self._replaced()
        return count

    def _lock(self, fd: int, timeout: float) -> bool:
        """Lock it; whether that took a while, in which the file may have been taken away."""
        until = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise BackendFailed(
                        f"{self.path} was locked for more than {timeout:g} s: one of the "
                        "processes that write there is stopped or hangs"
                    ) from None
            else:
                return pause > _FIRST_PAUSE
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)

    def _trusted(self, head: bytes) -> int | None:
        """The count in the ledger's first bytes; None when it cannot be trusted."""
        magic, unmarked, used = _LAYOUT.unpack_from(head)
        return int(used) if magic == _MAGIC and unmarked == 1 else None

    def _estimate(self, head: bytes) -> int:
        """The count, also of a ledger with a mark: then it is too high by one change at most."""
        magic, _, used = _LAYOUT.unpack_from(head)
        return int(used) if magic == _MAGIC else 0


class Recount:
    """Counts a directory while others write there; see the module's docstring.

    Memory: 16 bytes a record, until `finish`.
    """

    def __init__(self, ledger: DiskLedger, timeout: float) -> None:
        self._ledger = ledger
        self._names: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []
        self._name_buffer: list[int] = []
        self._size_buffer: list[int] = []
        # Not zero, and not likely to be that of another one.
        self._token = int.from_bytes(os.urandom(8), "little") | 1
        with ledger.held(timeout) as count:
            count.journal.begin(self._token)

    def saw(self, block: bytes, size: int) -> None:
        """The scan found the record of ``block``, ``size`` bytes long."""
        self._name_buffer.append(hash(block))
        self._size_buffer.append(padded(size))
        if len(self._name_buffer) >= 1 << 14:
            self._pack()

    def finish(
        self, timeout: float, path: Callable[[bytes], str], beside: Callable[[], int]
    ) -> bool:
        """Write the count; False, and nothing written, without a journal that can be trusted.

        ``path`` says where the record of a block lies, ``beside`` counts what is no record.
        """
        self._pack()
        names = np.concatenate(self._names) if self._names else np.zeros(0, np.int64)
        sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int64)
        # What was replaced meanwhile may have been seen twice; it is in the journal.
        names, first = np.unique(names, return_index=True)
        sizes = sizes[first]
        total = int(sizes.sum())
        with self._ledger.held(timeout) as count:
            changed = count.journal.changed(self._token)
            if changed is None:
                return False
            for block in changed:
                at = int(np.searchsorted(names, hash(block)))
                if at < len(names) and names[at] == hash(block):
                    total -= int(sizes[at])
                total += padded(size_of(path(block)) or 0)
            count.mark()
            count.used = total + beside()
            count.journal.end()
        self._ledger.wants_count = False
        self._ledger.counted_at = time.monotonic()
        return True

    def _pack(self) -> None:
        self._names.append(np.array(self._name_buffer, np.int64))
        self._sizes.append(np.array(self._size_buffer, np.int64))
        self._name_buffer, self._size_buffer = [], []


def _sweeps(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, _SWEEPS_AT), "little")


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino
