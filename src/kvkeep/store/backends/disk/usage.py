"""Bytes used below a directory by all processes, and space for new records."""

from __future__ import annotations

import errno
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import OutOfRoom
from kvkeep.store.backends.disk.files import CANNOT_WRITE
from kvkeep.store.backends.disk.ledger import DiskLedger
from kvkeep.store.backends.disk.opening import restore
from kvkeep.store.backends.disk.recount import Recount

if TYPE_CHECKING:
    from kvkeep.store.backends.disk.directory import RecordDirectory
    from kvkeep.store.backends.disk.ledger import Count

__all__ = ["DiskUsage"]

RECOUNT_AFTER: Final = 300.0
"""Seconds after which a full store is recounted, in case files were deleted by hand."""
SMALL: Final = 8192
"""Files that are counted under the lock; a larger directory is counted by the next listing."""


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
