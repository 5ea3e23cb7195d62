"""`UsageLedger`: counts the bytes held in a store that does not count them itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.store.backends.base import Listed

__all__ = ["PendingChange", "UsageLedger"]


class PendingChange:
    """A put or delete under way; its bytes count as held until it has ended."""

    __slots__ = ("alone", "blocks", "listing", "new", "size")

    def __init__(self, blocks: Sequence[bytes], size: int, new: int, listing: int) -> None:
        self.blocks = blocks
        self.size = size
        self.new = new  # bytes of each block afterwards, 0 for a delete
        self.listing = listing  # number of listings begun before it
        self.alone = True  # no other change of these blocks at the same time


class UsageLedger:
    """Counts the bytes held, from a listing and from this process's puts and deletes.

    Changes under way count as held, so the sum is never too low. After a failed call, or two
    concurrent changes of one block, the content is uncertain: the place is listed again before the
    next put.

    Thread safety: all methods. ``listing`` is called without the lock.
    """

    def __init__(self, capacity: int, where: str, listing: Callable[[], Iterable[Listed]]) -> None:
        self._capacity = capacity
        self._where = where
        self._listing = listing
        self._sizes: dict[bytes, int] = {}
        self._held = 0
        self._pending_bytes = 0
        self._pending: dict[bytes, list[PendingChange]] = {}
        self._known = False
        self._doubts = 0
        self._listings = 0
        self._changed: dict[bytes, int] | None = None  # sizes changed while a listing runs
        self._lock = threading.Lock()
        self._only_lister = threading.Lock()

    def putting(self, block: bytes, size: int) -> PendingChange:
        """Begin a put of ``size`` bytes, or raise `OutOfRoom`. Call `done` or `failed` after it."""
        self._know()
        with self._lock:
            before = self._sizes.get(block, 0)
            if self._held - before + self._pending_bytes + size > self._capacity:
                raise OutOfRoom(size, self._where)
            return self._begin([block], size, size)

    def deleting(self, blocks: Sequence[bytes]) -> PendingChange:
        """Begin a delete. Call `done` or `failed` after it."""
        with self._lock:
            return self._begin(blocks, sum(self._write(block, 0) for block in blocks), 0)

    def done(self, change: PendingChange) -> None:
        """End ``change``, which succeeded."""
        with self._lock:
            self._end(change)
            # A listing that began during a delete may contain the deleted blocks or not.
            if not change.alone or (change.new == 0 and change.listing != self._listings):
                self._doubt()
            for block in change.blocks:
                if change.new:
                    self._write(block, change.new)

    def failed(self, change: PendingChange) -> None:
        """End ``change``, which failed, but may have taken effect."""
        with self._lock:
            self._end(change)
            self._doubt()

    def used(self) -> int:
        """Return the bytes held; list the store first if its content is uncertain."""
        self._know()
        with self._lock:
            return self._held + self._pending_bytes

    def _begin(self, blocks: Sequence[bytes], size: int, new: int) -> PendingChange:
        change = PendingChange(blocks, size, new, self._listings)
        self._pending_bytes += size
        for block in blocks:
            others = self._pending.setdefault(block, [])
            others.append(change)
            if len(others) > 1:
                for one in others:
                    one.alone = False
        return change

    def _end(self, change: PendingChange) -> None:
        self._pending_bytes -= change.size
        for block in change.blocks:
            others = self._pending[block]
            others.remove(change)
            if not others:
                del self._pending[block]

    def _doubt(self) -> None:
        self._known = False
        self._doubts += 1

    def _write(self, block: bytes, size: int) -> int:
        """Set the size of ``block``, 0 if deleted; return the size before."""
        before = self._sizes.pop(block, 0)
        if size:
            self._sizes[block] = size
        self._held += size - before
        if self._changed is not None:
            self._changed[block] = size
        return before

    def _know(self) -> None:
        """List the store if its content is uncertain; one thread does this for all."""
        with self._only_lister:
            with self._lock:
                if self._known:
                    return
                doubts, self._changed = self._doubts, {}
                self._listings += 1
            try:
                listed = {one.block: one.size for one in self._listing()}
            except BaseException:
                with self._lock:
                    self._changed = None
                raise
            with self._lock:
                changed, self._changed = self._changed, None
                self._sizes = listed
                self._held = sum(listed.values())
                for block, size in changed.items():
                    self._write(block, size)
                self._known = self._doubts == doubts  # not if a change failed meanwhile
