"""Least frequently used goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import LevelPolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["LFU"]


class LFU(LevelPolicy):
    """What was reused least often goes first; among equals, what was used longest ago."""

    name = "lfu"
    sized = False

    def level(self, entry: Entry) -> int:
        """How many requests reused it."""
        return entry.hits
