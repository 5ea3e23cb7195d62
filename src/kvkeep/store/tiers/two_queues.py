"""2Q: blocks used once are evicted before blocks used again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction import POLICIES, AgeQueue, Entry, EvictionPolicy
from kvkeep.store.tiers.tier_shares import IndexedBlock

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def __init__(self) -> None:
        self._queues = (AgeQueue[float](), AgeQueue[float]())  # on probation, others
        self._sizes = [0, 0]
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._most = 0  # candidates at one time

    def add(self, entry: Entry) -> None:
        """Make ``entry`` a candidate; one that was evicted lately begins with a hit."""
        if isinstance(entry, IndexedBlock) and entry.block in self._ghosts:
            del self._ghosts[entry.block]
            entry.hits = entry.hits or 1
        again = entry.hits > 0
        self._queues[again].push(entry, entry.last_used)
        self._sizes[again] += entry.size
        self._most = max(self._most, len(self))

    def discard(self, entry: Entry) -> None:
        again = entry in self._queues[1]
        self._queues[again].remove(entry)
        self._sizes[again] -= entry.size

    def _order(self) -> tuple[int, int]:
        """Return the queues in the order in which they give victims."""
        return (0, 1) if self._sizes[0] > _PROBATION * sum(self._sizes) else (1, 0)

    def peek(self) -> Entry | None:
        queues = [self._queues[again] for again in self._order()]
        queue = queues[0] if len(queues[0]) else queues[1]
        entry = queue.pop()
        if entry is not None:
            queue.put_back(entry, entry.last_used)
        return entry

    def pop(self) -> Entry | None:
        """Remove the oldest block on probation if those are too many, else of the others."""
        for again in self._order():
            entry = self._queues[again].pop()
            if entry is not None:
                self._sizes[again] -= entry.size
                if isinstance(entry, IndexedBlock):
                    self._ghosts[entry.block] = None
                    if len(self._ghosts) > _REMEMBERED * self._most:
                        self._ghosts.popitem(last=False)
                return entry
        return None

    def put_back(self, entry: Entry) -> None:
        """Make the block just popped the oldest of its queue."""
        if isinstance(entry, IndexedBlock):
            self._ghosts.pop(entry.block, None)
        self.add(entry)

    def __len__(self) -> int:
        return sum(map(len, self._queues))


def tier_policies() -> dict[str, Callable[[], EvictionPolicy]]:
    """Return the policies of tiers by name: those of caches (`POLICIES`), and `2q`."""
    return {**POLICIES, TwoQ.name: TwoQ}
