"""Lowest priority goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import LevelPolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["Priority"]


class Priority(LevelPolicy):
    """What was published with the lowest priority goes first; among equals, the oldest.

    A prefix has the highest priority of all that was ever published through it.
    """

    name = "priority"
    sized = False
    by_recency = True
    needs_priorities = True

    def level(self, entry: Entry) -> int:
        """The priority that the caller gave."""
        return entry.priority
