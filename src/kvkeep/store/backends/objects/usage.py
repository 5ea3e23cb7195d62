"""How many bytes lie in a place that does not count them itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.store.backends.base import Listed

__all__ = ["Move", "UsageLedger"]


class Move:
    """A put or delete that is on its way: bytes that count as held until it is over."""

    __slots__ = ("blocks", "clear", "listing", "new", "size")

    def __init__(self, blocks: Sequence[bytes], size: int, new: int, listing: int) -> None:
        self.blocks = blocks
        self.size = size
        self.new = new  # bytes of each block afterwards
        self.listing = listing  # the last listing that had begun before
        self.clear = True  # no other move of the same blocks at the same time


class UsageLedger:
    """Bytes held, from a listing and from what is put and deleted by us.

    What is on its way in or out counts as held: the sum errs to the safe side. When a call failed,
    or two were about one block at once, nobody knows what is there, and the place is listed again
    before the next put.

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
        self._moves: dict[bytes, list[Move]] = {}
        self._known = False
        self._doubts = 0
        self._listings = 0
        self._since: dict[bytes, int] | None = None  # what changed while a listing runs
        self._lock = threading.Lock()
        self._only_lister = threading.Lock()

    def putting(self, block: bytes, size: int) -> Move:
        """Count ``size`` bytes that are about to be put, or raise `OutOfRoom`.

        `done` or `failed` must follow.
        """
        self._know()
        with self._lock:
            before = self._sizes.get(block, 0)
            if self._held - before + self._moving + size > self._capacity:
                raise OutOfRoom(size, self._where)
            return self._begin([block], size, size)

    def deleting(self, blocks: Sequence[bytes]) -> Move:
        """These are about to be deleted; `done` or `failed` must follow."""
        with self._lock:
            return self._begin(blocks, sum(self._write(block, 0) for block in blocks), 0)

    def done(self, move: Move) -> None:
        """It was done as asked."""
        with self._lock:
            self._end(move)
            # A listing since the delete began may be from before it, or after.
            if not move.clear or (move.new == 0 and move.listing != self._listings):
                self._doubt()
            for block in move.blocks:
                if move.new:
                    self._write(block, move.new)

    def failed(self, move: Move) -> None:
        """It failed, and may have been done all the same."""
        with self._lock:
            self._end(move)
            self._doubt()

    def used(self) -> int:
        """Bytes held; lists the place if that must be."""
        self._know()
        with self._lock:
            return self._held + self._moving

    def _begin(self, blocks: Sequence[bytes], size: int, new: int) -> Move:
        move = Move(blocks, size, new, self._listings)
        self._moving += size
        for block in blocks:
            others = self._moves.setdefault(block, [])
            others.append(move)
            if len(others) > 1:
                for one in others:
                    one.clear = False
        return move

    def _end(self, move: Move) -> None:
        self._moving -= move.size
        for block in move.blocks:
            others = self._moves[block]
            others.remove(move)
            if not others:
                del self._moves[block]

    def _doubt(self) -> None:
        self._known = False
        self._doubts += 1

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
                self._listings += 1
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
