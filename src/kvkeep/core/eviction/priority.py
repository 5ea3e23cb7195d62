"""Priority: the entry with the lowest priority is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import LevelPolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["Priority"]


class Priority(LevelPolicy):
    """Evicts the entry published with the lowest priority; among equals, the least recently used.

    A prefix has the highest priority of everything that was published through it.
    """

    name = "priority"
    sized = False
    by_recency = True

    def level(self, entry: Entry) -> int:
        return entry.priority
