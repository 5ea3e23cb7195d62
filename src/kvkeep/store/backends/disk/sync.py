"""What is still to be made to last through a loss of power."""

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

__all__ = ["Sync", "Syncing"]

Sync = Literal["never", "flush", "always"]

SYNC_FROM: Final = 64
"""Files that wait to be synced; from so many on a thread syncs them in the background."""
UNSYNCED_AT_MOST: Final = 1 << 15
"""Files that may wait to be synced; from so many on each put waits a little for that thread."""
_BATCH: Final = 256  # files that are synced at once, with the directories they are in
_SLOWED: Final = 1.0  # seconds that a put waits at most
_RETRY: Final = 1.0  # seconds after which a sync that failed is tried again
_POLL: Final = 0.002


class Syncing:
    """Files and directories that changed and are not synced yet, by their paths.

    With the mode "flush", `changed` only remembers them. A thread of its own, which lives while
    there is something to do, syncs them in batches; `flush` syncs what is left.

    Attributes:
        slowed: calls of `slow_down` that had to wait.
        last_progress: when something was synced last, in seconds of the monotonic clock.
        failed: background batches that could not be synced; they are tried again.

    The system reports an error of writing once: a second fsync of the same file succeeds, though
    its data may be lost. So the next `flush` raises what the thread was told.

    Thread safety: all methods. A fork begins with a thread and a lock of its own, and with what
    its parent had not synced.
    """

    def __init__(self, mode: Sync, root: str) -> None:
        self.mode = mode
        self.slowed = 0
        self.failed = 0
        self.last_progress = float("-inf")
        self._root = root
        self._waiting: dict[int, str] = {}  # serial number of the change → path
        self._serial = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._taken: set[int] = set()  # serial numbers of what somebody syncs now
        self._error: OSError | None = None  # of the thread, until a flush raises it
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Changes that are not synced."""
        return len(self._waiting)

    def changed(self, paths: Collection[str]) -> None:
        """``paths`` and the directories above are to last: from now on or from the next flush."""
        if self.mode == "always":
            self._sync(set(paths))
        elif self.mode == "flush":
            for path in paths:
                self._waiting[next(self._serial)] = path
            if len(self._waiting) >= SYNC_FROM:
                self._start()

    def slow_down(self, timeout: float) -> None:
        """Wait while more is unsynced than may be, a second or half of ``timeout`` at most.

        Raises:
            BackendFailed: twice as much is unsynced: the disk does not sync any more.
        """
        if len(self._waiting) < UNSYNCED_AT_MOST:
            return
        self.slowed += 1
        until = time.monotonic() + min(_SLOWED, timeout / 2)
        while len(self._waiting) >= UNSYNCED_AT_MOST and time.monotonic() < until:
            time.sleep(_POLL)
        if len(self._waiting) >= 2 * UNSYNCED_AT_MOST:
            raise BackendFailed(f"{len(self._waiting)} files wait for fsync, which does not end")

    def flush(self) -> None:
        """Have all that changed before this call last. OSError: it may not, and is tried again.

        What the thread failed to sync since the last flush is raised as well.
        """
        self._check_fork()
        end = next(self._serial)
        try:
            while not self._sync_some(end):
                pass
        finally:  # what this raises itself tells of it as well
            with self._lock:
                error, self._error = self._error, None
        if error is not None:
            raise error

    def drain(self, timeout: float) -> bool:
        """Have the thread sync all that waits; whether that took no longer than ``timeout``."""
        until = time.monotonic() + timeout
        while self._waiting:
            if time.monotonic() > until:
                return False
            self._start()
            time.sleep(_POLL)
        return True

    def _sync_some(self, end: int) -> bool:
        """Sync a batch of the changes before ``end``; True when none of them is left."""
        with self._lock:
            waiting = [serial for serial in list(self._waiting) if serial < end]
            batch = [serial for serial in waiting if serial not in self._taken][:_BATCH]
            self._taken.update(batch)
        if not batch:
            if waiting:
                time.sleep(_POLL)  # others are about to sync these
            return not waiting
        try:
            self._sync({self._waiting[serial] for serial in batch})
            for serial in batch:
                del self._waiting[serial]
        finally:
            with self._lock:
                self._taken.difference_update(batch)
        return False

    def _start(self) -> None:
        self._check_fork()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="kvkeep sync", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while self._waiting:
            try:
                self._sync_some(next(self._serial))
            except OSError as error:
                self.failed += 1
                with self._lock:
                    self._error = error
                time.sleep(_RETRY)

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            self._begin()

    def _sync(self, paths: set[str]) -> None:
        for path in sorted(paths):
            sync_path(path)
            self.last_progress = time.monotonic()
        # Names after contents: a name that lasts must not name what does not.
        for directory in sorted({os.path.dirname(path) for path in paths} - {self._root}):
            sync_path(directory)
        sync_path(self._root)
