"""What is still to be made to last through a loss of power."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Final, Literal

from kvkeep.backends.disk_files import sync_path

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Sync", "Syncing"]

Sync = Literal["never", "flush", "always"]

UNSYNCED_AT_MOST: Final = 4096
"""Files that are remembered until the next `Syncing.flush`; then one is made."""


class Syncing:
    """Files and directories that changed since the last `flush`, by their paths.

    Thread safety: only single steps that are atomic touch what is remembered, so there is no lock
    that a fork could find held.
    """

    def __init__(self, mode: Sync, root: str) -> None:
        self.mode = mode
        self._root = root
        self._waiting: dict[int, str] = {}  # serial number of the change → path
        self._serial = itertools.count()

    def changed(self, paths: Collection[str]) -> None:
        """``paths`` and the directories above are to last: from now on or from the next flush."""
        if self.mode == "always":
            self._sync(set(paths))
        elif self.mode == "flush":
            for path in paths:
                self._waiting[next(self._serial)] = path
            if len(self._waiting) > UNSYNCED_AT_MOST:
                self.flush()

    def flush(self) -> None:
        """Have all that changed before this call last. OSError: it may not, and is tried again."""
        waiting = dict(self._waiting)
        if not waiting:
            return
        self._sync(set(waiting.values()))
        # Only now: a flush at the same time does the same work, rather than return too early.
        for serial in waiting:
            self._waiting.pop(serial, None)

    def _sync(self, paths: set[str]) -> None:
        for path in sorted(paths):
            sync_path(path)
        # Names after contents: a name that lasts must not name what does not.
        for directory in sorted({os.path.dirname(path) for path in paths} - {self._root}):
            sync_path(directory)
        sync_path(self._root)
