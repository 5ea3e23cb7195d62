"""LRU: the least recently used entry is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["LRU"]


class LRU(QueuePolicy):
    """Evicts the entry that was used least recently. A use of a prompt uses all its prefixes."""

    name = "lru"
    sized = False
    by_recency = True
    advised = True

    def age(self, entry: Entry) -> int:
        return entry.last_used
