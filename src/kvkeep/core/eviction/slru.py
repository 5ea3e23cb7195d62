"""Segmented LRU: entries that were never reused are evicted before those that were."""

from __future__ import annotations

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

__all__ = ["SLRU"]


class SLRU(EvictionPolicy):
    """Two LRU queues: entries on probation are evicted before protected ones, which were reused.

    Protected entries hold at most ``protected`` of the evictable pages; beyond that, the least
    recently used of them return to probation. (Karedla, Love, Wherry: Caching strategies to improve
    disk system performance, 1994.)
    """

    name = "slru"

    def __init__(self, protected: float = 0.8) -> None:
        super().__init__()
        if not 0 <= protected <= 1:
            raise InvalidValue(f"protected is a share in 0 … 1, got {protected}")
        self.protected = protected
        self._probation = AgeQueue[float]()
        self._protected = AgeQueue[float]()
        self._protected_pages = 0
        self._pages = 0

    def add(self, entry: Entry) -> None:
        """Make ``entry`` a candidate, protected if it was reused."""
        self._pages += entry.size
        if not entry.hits:
            self._probation.push(entry, entry.last_used)
            return
        self._protected.push(entry, entry.last_used)
        self._protected_pages += entry.size
        while self._protected_pages > self.protected * self._pages:
            oldest = self._protected.pop()
            assert oldest is not None
            self._protected_pages -= oldest.size
            oldest.hits = 0
            self._time += 1
            oldest.last_used = self._time  # a full round on probation
            self._probation.push(oldest, oldest.last_used)

    def discard(self, entry: Entry) -> None:
        self._pages -= entry.size
        if entry in self._protected:
            self._protected.remove(entry)
            self._protected_pages -= entry.size
        else:
            self._probation.remove(entry)

    def pop(self) -> Entry | None:
        """Remove the oldest entry on probation, else the oldest protected one."""
        entry = self._probation.pop()
        if entry is None:
            entry = self._protected.pop()
            if entry is None:
                return None
            self._protected_pages -= entry.size
        self._pages -= entry.size
        return entry

    def put_back(self, entry: Entry) -> None:
        """Put the entry just popped at the front of probation."""
        self._pages += entry.size
        self._probation.push(entry, entry.last_used)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)
