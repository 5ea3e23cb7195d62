"""How a record gets into the directory: reserve its bytes, fill a temporary file, rename it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvkeep.store.backends.disk.files import create_locked, padded, preallocate, write_whole
from kvkeep.store.backends.disk.opening import restore

if TYPE_CHECKING:
    from kvkeep.store.backends.disk.directory import RecordDirectory
    from kvkeep.store.backends.disk.usage import DiskUsage

__all__ = ["RecordWriter"]


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
