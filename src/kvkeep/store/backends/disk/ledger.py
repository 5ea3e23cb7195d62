"""The bytes used in a directory, counted by all processes that write there.

    lock ─▶ counted, and unmarked? ──no──▶ recount: scan the directory, if it is small
                │ yes                        │
                ▼                            ▼
              is there room? ─▶ mark ─▶ create, rename or unlink ─▶ new count, unmark ─▶ unlock

A process killed while the mark is set leaves the mark, and the next process recounts. Killed at any
other moment it leaves a correct count. The count after a loss of power is not trusted: each process
recounts once, before its first use. The lock is flock's, so the kernel releases it when its holder
dies. It is held for accounting, never while data is written or a large directory is scanned.

A large directory is counted while other processes write there (`recount.Recount`). Until that is
finished, the old count stays in use. It is at most one change too high after a process was killed,
outdated after a loss of power, and 0 after the ledger was removed.

The file, little-endian:

     0  magic, 1 if unmarked, bytes used
    24  zeros
    40  state of the journal, see recount.py
    56  zeros
    64  the journal
"""

from __future__ import annotations

import os
import struct
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.disk.files import open_known, padded, pin
from kvkeep.store.backends.disk.recount import HEAD, ChangeJournal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import fcntl

__all__ = ["LEDGER_MAGIC", "Count", "DiskLedger"]

LEDGER_MAGIC: Final = b"kvledger"
_LAYOUT: Final = struct.Struct("<8sQQ")  # magic, 1 if unmarked, bytes used
_FIRST_PAUSE: Final = 0.0001  # seconds


class Count:
    """The bytes used, while the lock is held. Every change of the directory is made through it.

    Attributes:
        used: bytes, each file in whole units of `ALIGNMENT`. Set it only after `mark`.
        journal: the changes during a recount, if one runs.
        pins: descriptors of unlinked files, closed after the lock is released (see `files.pin`).
    """

    __slots__ = ("_fd", "_marked", "journal", "pins", "used")

    def __init__(self, fd: int, used: int, journal: ChangeJournal) -> None:
        self._fd = fd
        self._marked = False
        self.journal = journal
        self.pins: list[int] = []
        self.used = used

    def mark(self, more: int = 0) -> None:
        """Announce a change of the directory that adds at most ``more`` bytes.

        The larger count is written at once, so a process killed now leaves no count too low.
        """
        if more or not self._marked:
            self._marked = True
            self._write(more)

    def settle(self) -> None:
        """Write ``used``, which now is what the directory has, and clear the mark."""
        # Below zero, files were added by hand, uncounted: the mark stays, so a recount follows.
        if self._marked and self.used >= 0:
            self._marked = False
            self._write(0)

    def remove(self, path: str, block: bytes | None = None) -> int:
        """Unlink a regular file; return its size in bytes, 0 if there is none.

        ``block`` is the id of the record in it, if it is a record.
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
        """Rename a file to ``target``, the record of ``block``, replacing an older one."""
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

    def quarantine(self, source: str, target: str, block: bytes) -> None:
        """Rename the record of ``block`` into quarantine, where its bytes still count as used."""
        if self.journal:
            self.mark()
            self.journal.note(block)
        try:
            os.rename(source, target)
        except FileNotFoundError:
            self.settle()
            raise

    def _write(self, more: int) -> None:
        # One call within one page: a killed process has written all of it or nothing.
        data = _LAYOUT.pack(LEDGER_MAGIC, not self._marked, max(self.used + more, 0))
        os.pwrite(self._fd, data, 0)


class DiskLedger:
    """The file that holds the count, and its lock.

    Arguments:
        path: the file.
        recount: returns the bytes used from a scan, or None if the directory is too large to be
            scanned under the lock. Called with the lock held, before the first use and whenever
            the count cannot be trusted. After None, `wants_count` is set until a `Recount` ends.
        restore: creates the file when it is missing.

    Attributes:
        counted_at: when this process last counted, in seconds of the monotonic clock.
        wants_count: whether the next listing has to count the directory.

    Thread safety: each use opens the file again, so the lock excludes threads as well as processes,
    and a forked child inherits no lock.
    """

    def __init__(
        self,
        path: str,
        recount: Callable[[Count], int | None],
        restore: Callable[[], None],
    ) -> None:
        self.path = path
        self.counted_at: float | None = None
        self.wants_count = False
        self._recount = recount
        self._restore = restore

    @contextmanager
    def held(self, timeout: float) -> Iterator[Count]:
        """Hold the lock around accounting. An exception after `Count.mark` leaves the mark set.

        Raises:
            BackendFailed: another process held the lock for ``timeout`` seconds.
        """
        fd = self._open_locked(timeout)
        pins: list[int] = []
        try:
            count = self._counted(fd)
            pins = count.pins
            yield count
            count.settle()
        finally:
            # Closing alone keeps the lock if this process forked meanwhile: the child has it open.
            fcntl.flock(fd, fcntl.LOCK_UN)
            for held in (fd, *pins):
                os.close(held)

    def recount(self, count: Count) -> None:
        """Recount while the lock is held; a large directory is left to the next listing."""
        count.mark()
        used = self._recount(count)
        if used is None:
            self.wants_count = True
        else:
            count.used = used
            if count.journal:  # of a recount that still runs or was killed: superseded
                count.journal.end()
        count.settle()
        self.counted_at = time.monotonic()

    def counted(self) -> None:
        """Note that a `Recount` has just written the count."""
        self.wants_count = False
        self.counted_at = time.monotonic()

    def _open_locked(self, timeout: float) -> int:
        while True:
            try:
                fd, found = open_known(self.path, os.O_RDWR)
            except FileNotFoundError:
                self._restore()
                fd, found = open_known(self.path, os.O_RDWR)
            try:
                waited = self._lock(fd, timeout)
                if not waited or _file_at(self.path) == (found.st_dev, found.st_ino):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed during the wait: a lock on it excludes no process

    def _counted(self, fd: int) -> Count:
        """Return the count in the locked file, recounted if it cannot be trusted."""
        head = os.pread(fd, HEAD, 0).ljust(HEAD, b"\0")
        magic, unmarked, used = _LAYOUT.unpack_from(head)
        valid = magic == LEDGER_MAGIC
        count = Count(fd, used if valid else 0, ChangeJournal(fd, head))
        if not (valid and unmarked == 1 and self.counted_at is not None):
            self.recount(count)
        return count

    def _lock(self, fd: int, timeout: float) -> bool:
        """Lock the file; return whether that took a wait, during which it may have been removed."""
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


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
