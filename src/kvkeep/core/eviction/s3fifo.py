"""S3-FIFO: a small queue for what is new, a large one for what proved itself."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["S3FIFO", "Ghost"]

_MOST = 3  # counters have two bits


class _Turn:
    """What is known of an entry: its queue, since when, and how often it was reused since."""

    __slots__ = ("count", "main", "since")

    def __init__(self, since: int, *, main: bool) -> None:
        self.since = since
        self.main = main
        self.count = 0


class S3FIFO(EvictionPolicy):
    """Two first-in-first-out queues; only when its turn comes, what was reused gets another.

    What is new may have ``small`` of the memory. Whose turn comes there was reused and goes on to
    the main queue if it was reused ``again`` times, or goes. In the main queue it pays for each
    further turn with one of the up to three reuses that are counted. What comes back soon after it
    went from the small queue begins in the main one. (Yang et al.: FIFO queues are all you need for
    cache eviction, SOSP 2023.)

    A prefix is as new as the newest that hung from it, since it could not go before that. What went
    is told from a `Ghost`: the original algorithm over keys alone, as large as the memory it
    serves. Memory: about 400 bytes a block of it. Cost: about 1 µs a block of every prompt.
    """

    name = "s3fifo"
    remembers = True
    advised = True
    portions = True

    def __init__(self, small: float = 0.1, again: int = 2) -> None:
        super().__init__()
        if not 0 <= small <= 1:
            raise InvalidValue(f"the share of the small queue lies in 0 … 1, got {small}")
        self.small = small
        self.again = whole("the reuses that are asked for", again, 1, _MOST)
        self._size = 0
        self._ghost = Ghost(1, small, again)
        self._new = AgeQueue[float]()
        self._main = AgeQueue[float]()
        self._new_size = 0
        self._beyond = 0

    def fit(self, size: int, block: int) -> None:
        """It serves a memory of ``size``, in blocks of ``block``."""
        self._size = size
        self._ghost = Ghost(max(1, size // block), self.small, self.again)

    def asked(self, keys: Sequence[bytes]) -> int:
        """A prompt came; how many of its leading blocks were asked for lately."""
        ghost = self._ghost
        known = next((at for at, key in enumerate(keys) if key not in ghost), len(keys))
        for key in reversed(keys):  # a prompt's end goes before its beginning
            ghost.asked(key)
        return known

    # --- what is known of entries ----------------------------------------------------------------

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """It begins in the small queue, or in the main one if it comes back."""
        super().stored(entry, priority, known=known)
        entry.state = _Turn(self._time, main=known)

    def grown(self, entry: Entry) -> None:
        """Its tail is new, and nothing before that can go first."""
        super().grown(entry)
        _turn_of(entry).since = self._time

    def hit(self, entry: Entry) -> None:
        """One reuse more."""
        super().hit(entry)
        turn = _turn_of(entry)
        turn.count = min(_MOST, turn.count + 1)

    def split(self, upper: Entry, lower: Entry) -> None:
        """Both parts are in the same queue since then; reuses are the end's."""
        super().split(upper, lower)
        turn = _turn_of(lower)
        upper.state = _Turn(turn.since, main=turn.main)

    def inherit(self, parent: Entry, child: Entry) -> None:
        """It had its turns with its child, whose reuses have been counted there."""
        super().inherit(parent, child)
        mine, gone = _turn_of(parent), _turn_of(child)
        mine.since = max(mine.since, gone.since)
        mine.main = mine.main or gone.main

    # --- queues ----------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""
        turn = _turn_of(entry)
        if turn.main:
            self._main.push(entry, turn.since)
        else:
            self._new.push(entry, turn.since)
            self._new_size += entry.size

    def discard(self, entry: Entry) -> None:
        """``entry`` may not be evicted any more."""
        if entry in self._main:
            self._main.remove(entry)
        else:
            self._new.remove(entry)
            self._new_size -= entry.size

    def pop(self) -> Entry | None:
        """Give turns until one has not earned another. Cost: O(log n) for each reuse counted."""
        while True:
            self._beyond = self._new_size - int(self.small * self._size)
            entry = None if self._beyond > 0 else self._main.pop()
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
        """What is too much of it in the small queue; all of it in the main one."""
        if _turn_of(entry).main or self._beyond <= 0:
            return entry.size
        return min(self._beyond, entry.size)

    def put_back(self, entry: Entry) -> None:
        """The entry just popped lost only its tail: it is the oldest of its queue."""
        self.add(entry)

    def __len__(self) -> int:
        return len(self._new) + len(self._main)


def _turn_of(entry: Entry) -> _Turn:
    if entry.state is None:  # never stored: the root of a tree, which has no pages
        entry.state = _Turn(0, main=False)
    assert isinstance(entry.state, _Turn)
    return entry.state


class Ghost:
    """S3-FIFO over keys: which ``size`` blocks it would hold, and some that it held.

    ``new`` and ``main`` are held, each with its reuses; ``gone`` went from ``new`` and is
    remembered, as many as ``main`` may have.
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

    def asked(self, key: bytes) -> bool:
        """``key`` is asked for; whether it was held."""
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
        """One key has its turn: it gets another, or goes."""
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
