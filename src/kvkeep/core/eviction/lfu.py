"""LFU: the least frequently used entry is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import LevelPolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["LFU"]


class LFU(LevelPolicy):
    """Evicts the entry with the fewest hits; among equals, the least recently used."""

    name = "lfu"
    sized = False

    def level(self, entry: Entry) -> int:
        return entry.hits
