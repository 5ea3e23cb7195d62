"""`TierWaits`: orders the blocks of a catalogue by when conversations return."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from kvkeep.store.tiers.block_table import BlockTable
    from kvkeep.store.tiers.block_waits import BlockWaits

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

    def least(self, space: bytes | None = None) -> float | None:
        """Return what the next victim is worth, in returns a second; None if there is none.

        Of the namespace ``space``, if it is given and has a quota. Else, as quotas let policies
        differ, the most that the next victim of one is worth.
        """
        order = self._table.order
        with self._lock:
            found = [policy.least() for policy in order.policies(space)]
        return max((worth for worth in found if worth is not None), default=None)

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return the bytes of each record, None where it is not here."""
        with self._lock:
            found = [self._table.get(block) for block in blocks]
        return [None if block is None else block.size for block in found]

    def evictable(self, blocks: Sequence[bytes]) -> list[bytes]:
        """Return those of ``blocks`` that are here and neither held nor pinned."""
        known = self._table.blocks
        with self._lock:
            return [name for name in blocks if name in known and known[name].evictable]

    def fetched(self, block: bytes) -> None:
        """Record that ``block`` was fetched back, if it is here."""
        with self._lock:
            known = self._table.blocks.get(block)
            if known is not None:
                known.fetched = True
                self._table.fetched += 1

    def fetches(self) -> dict[str, float]:
        """Return how many blocks were fetched back, and what became of them, as of `TierCounters`.

        Those that are here and wait for a read are in ``fetched`` only.
        """
        table = self._table
        with self._lock:
            return {
                "fetched": table.fetched,
                "fetched_hits": table.fetched_hits,
                "fetched_evicted": table.fetched_evicted,
            }

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
