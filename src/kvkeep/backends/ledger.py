"""How many bytes lie in a place that does not count them itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.errors import OutOfRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.backends.base import Listed

__all__ = ["Ledger"]


class Ledger:
    """Bytes held, from a listing and from what is put and deleted by us.

    What is on its way in or out counts as held: the sum errs to the safe side. When a call failed,
    nobody knows what it did, and the place is listed again before the next put.

    Notes:
        Thread safe. ``listing`` is called outside of the lock that the others need.
    """

    def __init__(self, capacity: int, where: str, listing: Callable[[], Iterable[Listed]]) -> None:
        self._capacity = capacity
        self._where = where
        self._listing = listing
        self._sizes: dict[bytes, int] = {}
        self._held = 0
        self._moving = 0
        self._known = False
        self._doubts = 0
        self._since: dict[bytes, int] | None = None  # what changed while a listing runs
        self._lock = threading.Lock()
        self._only_lister = threading.Lock()

    def reserve(self, block: bytes, size: int) -> None:
        """Count ``size`` bytes that are about to be put, or raise `OutOfRoom`.

        `settle` or `unknown` must follow.
        """
        self._know()
        with self._lock:
            before = self._sizes.get(block, 0)
            if self._held - before + self._moving + size > self._capacity:
                raise OutOfRoom(size, self._where)
            self._moving += size

    def settle(self, block: bytes, size: int) -> None:
        """What was reserved is there now, in place of what was."""
        with self._lock:
            self._moving -= size
            self._write(block, size)

    def going(self, blocks: Sequence[bytes]) -> int:
        """These are about to be deleted: bytes to give to `gone` or `unknown` afterwards."""
        with self._lock:
            size = sum(self._write(block, 0) for block in blocks)
            self._moving += size
            return size

    def gone(self, size: int) -> None:
        """What was `going` is deleted."""
        with self._lock:
            self._moving -= size

    def unknown(self, size: int) -> None:
        """A put or delete of so many bytes failed, and may have been done all the same."""
        with self._lock:
            self._moving -= size
            self._known = False
            self._doubts += 1

    def used(self) -> int:
        """Bytes held; lists the place if that must be."""
        self._know()
        with self._lock:
            return self._held + self._moving

    def _write(self, block: bytes, size: int) -> int:
        """Note that ``block`` has ``size`` bytes, 0 for none; how many it had."""
        before = self._sizes.pop(block, 0)
        if size:
            self._sizes[block] = size
        self._held += size - before
        if self._since is not None:
            self._since[block] = size
        return before

    def _know(self) -> None:
        """List the place, unless it is known. One thread does it for all."""
        with self._only_lister:
            with self._lock:
                if self._known:
                    return
                doubts, self._since = self._doubts, {}
            try:
                listed = {one.block: one.size for one in self._listing()}
            except BaseException:
                with self._lock:
                    self._since = None
                raise
            with self._lock:
                changed, self._since = self._since, None
                self._sizes = listed
                self._held = sum(listed.values())
                for block, size in changed.items():
                    self._write(block, size)
                self._known = self._doubts == doubts  # else what failed meanwhile is in doubt
