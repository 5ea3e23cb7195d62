"""`LRU` and `Priority`: by recency, alone or within a priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import LevelPolicy, QueuePolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["LRU", "Priority"]


class LRU(QueuePolicy):
    """Evicts the entry that was used least recently. A use of a prompt uses all its prefixes."""

    name = "lru"
    sized = False
    by_recency = True
    advised = True

    def age(self, entry: Entry) -> int:
        return entry.last_used


class Priority(LevelPolicy):
    """Evicts the entry published with the lowest priority; among equals, the least recently used.

    A prefix has the highest priority of everything that was published through it.
    """

    name = "priority"
    sized = False
    by_recency = True

    def level(self, entry: Entry) -> int:
        return entry.priority
