"""Files that changed and still need an fsync."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Final, Literal

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.disk.files import sync_path

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Sync", "SyncQueue"]

Sync = Literal["never", "flush", "always"]

SYNC_FROM: Final = 64
"""Unsynced files from which a background thread syncs them."""
UNSYNCED_AT_MOST: Final = 1 << 15
"""Unsynced files from which each put waits a little for that thread."""
_BATCH: Final = 256  # files synced together, with their directories
_SLOWED: Final = 1.0  # seconds that a put waits at most
_RETRY: Final = 1.0  # seconds after which a failed sync is repeated
_POLL: Final = 0.002


class SyncQueue:
    """Paths of files and directories that changed and are not synced yet.

    In the mode "flush", `add` queues them; a thread that lives until the queue is empty syncs
    them in batches, and `flush` syncs the rest. "always" syncs in `add`, "never" does nothing.

    Attributes:
        last_progress: when something was synced last, in seconds of the monotonic clock.
        failed: background batches that could not be synced; they are repeated.

    The kernel reports a write error once: a second fsync of the same file succeeds although its
    data may be lost. So the next `flush` raises the error that the thread got.

    Thread safety: all methods. A forked child starts with its own thread and lock, and with what
    its parent had not synced.
    """

    def __init__(self, mode: Sync, root: str) -> None:
        self.mode = mode
        self.failed = 0
        self.last_progress = float("-inf")
        self._root = root
        self._waiting: dict[int, str] = {}  # serial number of the change → path
        self._serial = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._syncing = threading.Lock()  # one batch at a time, and `_error`
        self._starting = threading.Lock()  # `_thread`
        self._error: OSError | None = None  # of a batch, until `flush` raises it
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Return the number of unsynced changes."""
        return len(self._waiting)

    def add(self, paths: Collection[str]) -> None:
        """Sync ``paths`` and the directories above them: now, or with the next flush."""
        if self.mode == "always":
            self._sync(set(paths))
        elif self.mode == "flush":
            for path in paths:
                self._waiting[next(self._serial)] = path
            if len(self._waiting) >= SYNC_FROM:
                self._start()

    def throttle(self, timeout: float) -> None:
        """Wait while too much is unsynced, for a second or half of ``timeout`` at most.

        Raises:
            BackendFailed: twice the limit is unsynced: the disk does not finish its syncs.
        """
        if len(self._waiting) < UNSYNCED_AT_MOST:
            return
        until = time.monotonic() + min(_SLOWED, timeout / 2)
        while len(self._waiting) >= UNSYNCED_AT_MOST and time.monotonic() < until:
            time.sleep(_POLL)
        if len(self._waiting) >= 2 * UNSYNCED_AT_MOST:
            raise BackendFailed(f"{len(self._waiting)} files wait for fsync: the disk is too slow")

    def flush(self) -> None:
        """Sync all changes before this call.

        Raises:
            OSError: a sync failed, here or in the thread since the last flush; it is repeated.
        """
        self._check_fork()
        end = next(self._serial)
        try:
            while self._sync_some(end):
                pass
        finally:  # an error raised above already reports the failure
            with self._syncing:
                error, self._error = self._error, None
        if error is not None:
            raise error

    def drain(self, timeout: float) -> bool:
        """Let the thread sync everything; return False if it takes longer than ``timeout``."""
        until = time.monotonic() + timeout
        while self._waiting:
            if time.monotonic() > until:
                return False
            self._start()
            time.sleep(_POLL)
        return True

    def _sync_some(self, end: int) -> bool:
        """Sync a batch of the changes numbered below ``end``; return whether there were any."""
        with self._syncing:
            batch = [serial for serial in list(self._waiting) if serial < end][:_BATCH]
            if batch:
                try:
                    self._sync({self._waiting[serial] for serial in batch})
                except OSError as error:
                    self._error = error
                    raise
                for serial in batch:
                    del self._waiting[serial]
            return bool(batch)

    def _start(self) -> None:
        self._check_fork()
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="kvkeep sync", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while self._waiting:
            try:
                self._sync_some(next(self._serial))
            except OSError:
                self.failed += 1
                time.sleep(_RETRY)

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            self._begin()

    def _sync(self, paths: set[str]) -> None:
        for path in sorted(paths):
            sync_path(path)
            self.last_progress = time.monotonic()
        # Contents before names: after a loss of power no name may refer to lost contents.
        for directory in sorted({os.path.dirname(path) for path in paths} - {self._root}):
            sync_path(directory)
        sync_path(self._root)
