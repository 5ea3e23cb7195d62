"""Least recently used goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["LRU"]


class LRU(QueuePolicy):
    """What was used longest ago goes first; a use of a prompt is a use of all its prefixes."""

    name = "lru"
    sized = False
    by_recency = True
    advised = True

    def age(self, entry: Entry) -> int:
        """When it was last used."""
        return entry.last_used
