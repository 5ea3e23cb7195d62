"""`TierPins`: until when blocks of a tier are kept from eviction by request."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.store.tiers.eviction_order import EvictionOrder, OrderedBlock

__all__ = ["TierPins"]

_MANY: Final = 1024  # heap entries, beyond which stale ones are dropped


class TierPins:
    """Pins of blocks, and the bytes they protect.

    Thread safety: none; the catalogue calls it under its lock.
    """

    def __init__(
        self,
        blocks: Mapping[bytes, OrderedBlock],
        order: EvictionOrder,
    ) -> None:
        self.bytes = 0
        self._blocks = blocks
        self._order = order
        self._ends: list[tuple[float, bytes]] = []  # a heap of (end, block); some are stale
        self._many = _MANY

    def __len__(self) -> int:
        return len(self._ends)

    def pin(self, block: OrderedBlock, until: float, most: int) -> bool:
        """Pin ``block``; return False if all pins would cover more than ``most`` bytes."""
        if not block.pinned:
            if self.bytes + block.size > most:
                return False
            self._order.discard(block)
            self.bytes += block.size
        block.pinned = max(block.pinned, until)
        heapq.heappush(self._ends, (until, block.block))
        return True

    def unpin(self, block: OrderedBlock) -> None:
        """End the pin of ``block``."""
        self.bytes -= block.size
        block.pinned = 0.0
        self._order.restore(block)

    def shorten(self, block: OrderedBlock, until: float) -> None:
        """Let the pin of ``block`` end at ``until``; 0: now."""
        if not until:
            self.unpin(block)
        elif until < block.pinned:
            block.pinned = until
            heapq.heappush(self._ends, (until, block.block))

    def unpin_expired(self, now: float) -> None:
        """End all pins whose time is over at ``now``."""
        while self._ends and self._ends[0][0] <= now:
            block = self._blocks.get(heapq.heappop(self._ends)[1])
            if block is not None and block.pinned and block.pinned <= now:
                self.unpin(block)

    def compact(self) -> None:
        """Drop the stale entries of extended and ended pins from the heap, once there are many."""
        if len(self._ends) <= self._many:
            return
        names = {block for _, block in self._ends}
        pinned = (found for name in names if (found := self._blocks.get(name)) and found.pinned)
        self._ends = [(block.pinned, block.block) for block in pinned]
        heapq.heapify(self._ends)
        self._many = max(_MANY, 2 * len(self._ends))
