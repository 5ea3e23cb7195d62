"""The bytes used in a directory, counted by all the processes that write there.

    lock ─▶ counted, and unmarked? ──no──▶ recount: a scan of the directory
                │ yes                        │
                ▼                            ▼
              is there room? ─▶ mark ─▶ create, rename or unlink ─▶ new count, unmark ─▶ unlock

Who is killed while the mark is set leaves it there, and the next to come recounts. Who is killed
elsewhere leaves a right count. What power loss leaves is not trusted: everybody recounts once,
before the first use. The lock is flock's, so it ends with its holder; it is held for accounting,
never while data is written.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.backends.disk_files import padded, pin
from kvkeep.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import fcntl

__all__ = ["Count", "DiskLedger"]

_LAYOUT: Final = struct.Struct("<8sQQ")  # magic, 1 when unmarked, bytes used
_MAGIC: Final = b"kvledger"


class Count:
    """The bytes used, while the lock is held: every change of the directory goes through here.

    ``used`` is set after `mark`. It is in bytes, each file counted in whole units of `ALIGNMENT`.
    """

    __slots__ = ("_fd", "_marked", "pins", "used")

    def __init__(self, fd: int, used: int) -> None:
        self._fd = fd
        self._marked = False
        self.pins: list[int] = []  # what is unlinked already, and freed when the lock is
        self.used = used

    def mark(self) -> None:
        """The directory is about to change, and ``used`` with it."""
        if not self._marked:
            self._marked = True
            self._write()

    def settle(self) -> None:
        """``used`` is what is in the directory: write it down and take the mark away."""
        # Below zero somebody put files here by hand, which nobody counted: the mark stays.
        if self._marked and self.used >= 0:
            self._marked = False
            self._write()

    def remove(self, path: str) -> int:
        """Unlink a file; how long it was, in bytes, 0 when it is not there or no regular file."""
        held = pin(path)
        if held is None:
            return 0
        self.pins.append(held[0])
        self.mark()
        os.unlink(path)
        self.used -= padded(held[1])
        return held[1]

    def rename(self, source: str, target: str) -> None:
        """Move a file to ``target``, in place of what is there."""
        held = pin(target)
        self.mark()
        if held is not None:
            self.pins.append(held[0])
        try:
            os.rename(source, target)
        except OSError:
            self.settle()  # nothing changed
            raise
        if held is not None:
            self.used -= padded(held[1])

    def _write(self) -> None:
        # One call within one page: whoever is killed has written all of it or nothing.
        data = _LAYOUT.pack(_MAGIC, not self._marked, max(self.used, 0))
        os.pwrite(self._fd, data, 0)


class DiskLedger:
    """The file that holds the count, and its lock.

    ``recount`` scans the directory for the bytes used; it is called with the lock held, before
    the first use and whenever the count cannot be trusted.

    Thread safety: every use opens the file anew, so the lock is between threads as well as
    processes, and a fork inherits nothing that it could hold for ever.
    """

    def __init__(self, path: str, recount: Callable[[], int]) -> None:
        self.path = path
        self.counted_at: float | None = None  # seconds of the monotonic clock
        self._recount = recount

    @contextmanager
    def held(self, timeout: float, recount: Callable[[], int] | None = None) -> Iterator[Count]:
        """Hold the lock around accounting; what is raised while the mark is set leaves it set.

        ``recount`` stands in for the ledger's own, this time. Raises `BackendFailed` when the lock
        could not be had in ``timeout`` seconds.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        pins: list[int] = []
        try:
            self._lock(fd, timeout)
            count = self._counted(fd, recount or self._recount)
            pins = count.pins
            yield count
            count.settle()
        finally:
            # Closing is not enough where a process was forked meanwhile: it has the file open too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            for held in (fd, *pins):
                os.close(held)

    def recount(self, count: Count) -> None:
        """Count anew while the lock is held."""
        count.mark()
        count.used = self._recount()
        count.settle()
        self.counted_at = time.monotonic()

    def _counted(self, fd: int, recount: Callable[[], int]) -> Count:
        used = self._read(fd) if self.counted_at is not None else None
        count = Count(fd, used or 0)
        if used is None:
            count.mark()
            count.used = recount()
            count.settle()
            self.counted_at = time.monotonic()
        return count

    def _lock(self, fd: int, timeout: float) -> None:
        until = time.monotonic() + timeout
        pause = 0.0001
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
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)

    def _read(self, fd: int) -> int | None:
        """The count; None when it cannot be trusted."""
        data = os.pread(fd, _LAYOUT.size, 0)
        if len(data) < _LAYOUT.size:
            return None
        magic, unmarked, used = _LAYOUT.unpack(data)
        return int(used) if magic == _MAGIC and unmarked == 1 else None
