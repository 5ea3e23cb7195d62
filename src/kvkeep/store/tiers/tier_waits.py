"""`TierWaits`: orders the blocks of a catalogue by when conversations return."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from kvkeep.store.tiers.block_table import BlockTable
    from kvkeep.store.tiers.tier_returns import BlockWaits

__all__ = ["TierWaits"]


class TierWaits:
    """Tells the policies of a tier of conversations that wait, if they order by that.

    Thread safety: all methods, by the catalogue's ``lock``.
    """

    def __init__(self, table: BlockTable, lock: threading.Lock) -> None:
        self._table = table
        self._lock = lock

    @property
    def awaits(self) -> bool:
        """Whether the policies order by waits."""
        return self._table.order.awaits

    def attend(self, waits: BlockWaits) -> None:
        """Order blocks by ``waits``; call it before any block is added."""
        if self.awaits:
            with self._lock:
                self._table.order.attend(waits)

    def changed(self, blocks: Sequence[bytes]) -> None:
        """Order ``blocks`` of a prompt anew: waits at them began or are over.

        Cost: two to three microseconds a block that is here.
        """
        known = self._table.blocks
        with self._lock:
            for name in reversed(blocks):
                block = known.get(name)
                if block is not None:
                    self._table.order.awaited(block)
