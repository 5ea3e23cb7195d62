"""S3-FIFO: a small queue for new entries, a large one for reused ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.history import leading
from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["S3FIFO", "Ghost"]

_MOST = 3  # counters have two bits


class _Turn:
    """The record of an entry: its queue, when it entered, and its reuses since."""

    __slots__ = ("count", "main", "since")

    def __init__(self, since: int, *, main: bool) -> None:
        self.since = since
        self.main = main
        self.count = 0


class S3FIFO(EvictionPolicy):
    """Two FIFO queues. An entry that reaches the front is evicted unless it was reused.

    New entries enter the small queue, which has a share ``small`` of the memory. At its front, an
    entry with ``again`` reuses moves to the main queue; others are evicted. At the front of the
    main queue, an entry pays one of its counted reuses (three at most) for another round. What
    returns soon after its eviction from the small queue enters the main queue. (Yang et al.: FIFO
    queues are all you need for cache eviction, SOSP 2023.)

    A prefix counts as new as the newest entry that followed it, since it could not be evicted
    before. Evicted blocks are recognised by a `Ghost`: the original algorithm over keys alone, for
    a memory of the same size. Memory: about 400 bytes a block of the memory. Cost: about 1 µs a
    block of every prompt.
    """

    name = "s3fifo"
    remembers = True
    advised = True
    portions = True

    def __init__(self, small: float = 0.1, again: int = 2) -> None:
        super().__init__()
        if not 0 <= small <= 1:
            raise InvalidValue(f"small is a share in 0 … 1, got {small}")
        self.small = small
        self.again = whole("again", again, 1, _MOST)
        self._size = 0
        self._ghost = Ghost(1, small, again)
        self._new = AgeQueue[float]()
        self._main = AgeQueue[float]()
        self._new_size = 0
        self._excess = 0

    def fit(self, size: int, block: int) -> None:
        self._size = size
        self._ghost = Ghost(max(1, size // block), self.small, self.again)

    def requested(self, keys: Sequence[bytes]) -> int:
        ghost = self._ghost
        known = leading(keys, ghost)
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            ghost.requested(key)
        return known

    # --- events ------------------------------------------------------------------------------

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """Record a new entry: in the small queue, or in the main one if it returns."""
        super().stored(entry, priority, known=known)
        entry.state = _Turn(self._time, main=known)

    def grown(self, entry: Entry) -> None:
        """Record new pages: the tail is new, and nothing before it can be evicted earlier."""
        super().grown(entry)
        _turn_of(entry).since = self._time

    def hit(self, entry: Entry) -> None:
        super().hit(entry)
        turn = _turn_of(entry)
        turn.count = min(_MOST, turn.count + 1)

    def split(self, upper: Entry, lower: Entry) -> None:
        """Initialise the new front in the same queue; the reuses stay with ``lower``."""
        super().split(upper, lower)
        turn = _turn_of(lower)
        upper.state = _Turn(turn.since, main=turn.main)

    def inherit(self, parent: Entry, child: Entry) -> None:
        """Take over the child's queue and time; its reuses were spent on its own rounds."""
        super().inherit(parent, child)
        mine, gone = _turn_of(parent), _turn_of(child)
        mine.since = max(mine.since, gone.since)
        mine.main = mine.main or gone.main

    # --- queues ------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        turn = _turn_of(entry)
        if turn.main:
            self._main.push(entry, turn.since)
        else:
            self._new.push(entry, turn.since)
            self._new_size += entry.size

    def discard(self, entry: Entry) -> None:
        if entry in self._main:
            self._main.remove(entry)
        else:
            self._new.remove(entry)
            self._new_size -= entry.size

    def pop(self) -> Entry | None:
        """Remove the next entry without reuses; reused ones before it move on.

        Cost: O(log n) per reuse counted.
        """
        while True:
            self._excess = self._new_size - int(self.small * self._size)
            entry = None if self._excess > 0 else self._main.pop()
            if entry is None:
                entry = self._new.pop()
                if entry is None:
                    entry = self._main.pop()
                    if entry is None:
                        return None
                else:
                    self._new_size -= entry.size
            turn = _turn_of(entry)
            if turn.main:
                if not turn.count:
                    return entry
                turn.count -= 1
            elif turn.count < self.again:
                return entry
            else:
                turn.main = True
                turn.count = 0
            self._time += 1
            turn.since = self._time
            self._main.push(entry, turn.since)

    def portion(self, entry: Entry) -> int:
        """Return the excess of the small queue; for an entry of the main queue, its size."""
        if _turn_of(entry).main or self._excess <= 0:
            return entry.size
        return min(self._excess, entry.size)

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped the oldest of its queue."""
        self.add(entry)

    def __len__(self) -> int:
        return len(self._new) + len(self._main)


def _turn_of(entry: Entry) -> _Turn:
    if entry.state is None:  # never stored: the root of a tree, which has no pages
        entry.state = _Turn(0, main=False)
    assert isinstance(entry.state, _Turn)
    return entry.state


class Ghost:
    """S3-FIFO over keys: the ``size`` blocks it would hold, and some that it evicted.

    ``new`` and ``main`` are held, with their reuses; ``gone`` was evicted from ``new``, as many
    keys as ``main`` may have.
    """

    def __init__(self, size: int, small: float, again: int) -> None:
        self.size = size
        self.small = int(small * size)
        self.again = again
        self.new: OrderedDict[bytes, int] = OrderedDict()
        self.main: OrderedDict[bytes, int] = OrderedDict()
        self.gone: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self.new or key in self.main or key in self.gone

    def __len__(self) -> int:
        return len(self.new) + len(self.main) + len(self.gone)

    def requested(self, key: bytes) -> bool:
        """Request ``key``; return whether it was held."""
        for queue in (self.new, self.main):
            count = queue.get(key)
            if count is not None:
                queue[key] = min(_MOST, count + 1)
                return True
        while len(self.new) + len(self.main) >= self.size:
            self._turn()
        if key in self.gone:
            del self.gone[key]
            self.main[key] = 0
        else:
            self.new[key] = 0
        return False

    def _turn(self) -> None:
        """Evict the key at the front of a queue, or move it on if it was reused."""
        if self.new and (len(self.new) >= self.small or not self.main):
            key, count = self.new.popitem(last=False)
            if count >= self.again:
                self.main[key] = 0
                return
            self.gone[key] = None
            while len(self.gone) > self.size - self.small:
                self.gone.popitem(last=False)
        else:
            key, count = self.main.popitem(last=False)
            if count:
                self.main[key] = count - 1
