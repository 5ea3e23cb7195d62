"""FIFO: the entry stored first is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["FIFO"]


class FIFO(QueuePolicy):
    """Evicts the entry that was stored first, however often it was used since."""

    name = "fifo"
    sized = False
    by_recency = True

    def age(self, entry: Entry) -> int:
        return entry.stored
