"""2Q: blocks used once are evicted before blocks used again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction import POLICIES, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.store.tiers.eviction_order import OrderedBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.eviction import Entry

__all__ = ["TwoQ", "tier_policies"]

_PROBATION: Final = 0.1  # share of all candidates
_REMEMBERED: Final = 4  # ghosts for each candidate


class TwoQ(EvictionPolicy):
    """Two LRU queues: blocks on probation, which were used once, and all others.

    Probation has a tenth of what can be evicted; what exceeds it is evicted first, then the least
    recently used of the others. Ids of evicted blocks are remembered, four for each block that can
    be evicted: a block that comes again is not on probation. (Johnson, Shasha: 2Q, 1994.)

    It is for tiers, since a page of a cache has no id. Memory: 1 KB for each block. Cost: O(1) in
    most cases.
    """

    name = "2q"
    portions = True  # what is put back need not be the next victim

    def __init__(self) -> None:
        super().__init__()
        self._once = AgeQueue[float]()
        self._again = AgeQueue[float]()
        self._once_size = self._again_size = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._most = 0  # candidates at one time

    def stored(self, entry: Entry, priority: int) -> None:
        """Record a new block; one that was evicted lately begins with a hit."""
        super().stored(entry, priority)
        if isinstance(entry, OrderedBlock) and entry.block in self._ghosts:
            del self._ghosts[entry.block]
            entry.hits = 1

    def add(self, entry: Entry) -> None:
        if entry.hits:
            self._again.push(entry, entry.last_used)
            self._again_size += entry.size
        else:
            self._once.push(entry, entry.last_used)
            self._once_size += entry.size
        self._most = max(self._most, len(self))

    def discard(self, entry: Entry) -> None:
        if entry in self._once:
            self._once.remove(entry)
            self._once_size -= entry.size
        else:
            self._again.remove(entry)
            self._again_size -= entry.size

    def pop(self) -> Entry | None:
        """Remove the oldest block on probation if those are too many, else of the others."""
        excess = self._once_size > _PROBATION * (self._once_size + self._again_size)
        entry = None if excess else self._again.pop()
        if entry is not None:
            self._again_size -= entry.size
        else:
            entry = self._once.pop()
            if entry is None:
                return None
            self._once_size -= entry.size
        if isinstance(entry, OrderedBlock):
            self._ghosts[entry.block] = None
            if len(self._ghosts) > _REMEMBERED * self._most:
                self._ghosts.popitem(last=False)
        return entry

    def put_back(self, entry: Entry) -> None:
        """Make the block just popped the oldest of its queue."""
        if isinstance(entry, OrderedBlock):
            self._ghosts.pop(entry.block, None)
        self.add(entry)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)


def tier_policies() -> dict[str, Callable[[], EvictionPolicy]]:
    """Return the policies of tiers by name: those of caches (`POLICIES`), and `2q`."""
    return {**POLICIES, TwoQ.name: TwoQ}
