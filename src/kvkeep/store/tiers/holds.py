"""`Holds`: keeps blocks of a tier from eviction while requests and writes need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from kvkeep.store.tiers.block_table import BlockTable
    from kvkeep.store.tiers.filling import Filling

__all__ = ["Holds"]


class Holds:
    """The holds on blocks of ``table``; a block may be held several times.

    Thread safety: all methods but `added`, by the catalogue's ``lock``.
    """

    def __init__(self, table: BlockTable, filling: Filling, lock: threading.Lock) -> None:
        self._table = table
        self._filling = filling
        self._lock = lock
        self._ahead: dict[bytes, int] = {}  # holds of blocks that are not added yet

    def hold(self, block: bytes) -> bool:
        """Keep ``block`` from eviction until `free` was called as often; False if it is unknown."""
        with self._lock:
            return self._hold(block)

    def ahead(self, block: bytes) -> None:
        """`hold` a block; if it is unknown, from the moment at which it is added."""
        with self._lock:
            if not self._hold(block):
                self._ahead[block] = self._ahead.get(block, 0) + 1

    def hold_all(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """`hold` each of ``blocks``; those that are known are appended to ``held``, one by one.

        So a caller that is interrupted knows what to free.
        """
        with self._lock:
            held.extend(block for block in blocks if self._hold(block))

    def free(self, block: bytes) -> None:
        """Undo one `hold` or `ahead`; does nothing if ``block`` was forgotten meanwhile."""
        with self._lock:
            self._free(block)

    def free_all(self, blocks: Iterable[bytes]) -> None:
        """`free` each of ``blocks``."""
        with self._lock:
            for block in blocks:
                self._free(block)

    def give_up(self, blocks: Iterable[bytes], needed: int) -> list[bytes]:
        """Forget the first of ``blocks`` that together free ``needed`` bytes; return them.

        The caller has held each once. Blocks that others hold too, or that are pinned, are skipped.
        If the rest is smaller than ``needed``, nothing is forgotten.
        """
        gone: list[bytes] = []
        with self._lock:
            for block in blocks:
                known = self._table.blocks.get(block)
                if known is not None and known.held == 1 and not known.pinned:
                    gone.append(block)
                    needed -= self._table.takes(known.size)
                    if needed <= 0:
                        break
            if needed > 0:
                return []
            for block in gone:
                self._filling.forgotten(block)
                self._table.forget(block)
        return gone

    def added(self, block: bytes) -> None:
        """Begin the holds that were taken ahead of ``block``; call it under the lock."""
        for _ in range(self._ahead.pop(block, 0)):
            self._hold(block)

    def _hold(self, name: bytes) -> bool:
        block = self._table.ordered(name)
        if block is None:
            return False
        self._table.order.discard(block)
        block.held += 1
        return True

    def _free(self, name: bytes) -> None:
        ahead = self._ahead.pop(name, 0)
        if ahead:
            if ahead > 1:
                self._ahead[name] = ahead - 1
            return
        block = self._table.blocks.get(name)
        if block is not None and block.held:
            block.held -= 1
            self._table.order.restore(block)
