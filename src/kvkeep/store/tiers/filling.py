"""`Filling`: takes over listings of a backend into the catalogue's table."""

from __future__ import annotations

import threading
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.store.tiers.block_table import BlockTable

__all__ = ["Filling"]

_AT_ONCE: Final = 1024  # blocks of a listing that are taken over under one lock
_ROUNDS: Final = 1 << 16


class Filling:
    """Takes over listings into ``table``, under ``lock``, for at most 1,024 blocks at a time.

    Thread safety: `fill`, of which one call runs at a time; call `forgotten` under the lock.
    """

    def __init__(self, table: BlockTable, lock: threading.Lock) -> None:
        self._table = table
        self._lock = lock
        self._running = threading.Lock()
        self._gone: set[bytes] | None = None  # blocks forgotten while a listing goes on

    def forgotten(self, block: bytes) -> None:
        """Record that ``block`` was forgotten: a listing that goes on must not add it again."""
        if self._gone is not None:
            self._gone.add(block)

    def fill(self, found: Iterable[tuple[bytes, int, float]]) -> list[bytes]:
        """Take over a listing of the backend: (block, bytes, last use). Return the blocks it lacks.

        Known blocks keep their place in the order and get the later time of use. New blocks follow
        them, ordered by last use. Known blocks that are not listed are forgotten. Blocks added
        during the listing stay; blocks forgotten during it stay forgotten. If ``found`` raises, the
        blocks before that are taken over and none are forgotten.

        Listed blocks are known, and may be evicted, before ``found`` ends. Concurrent calls wait.
        """
        with self._running:
            with self._lock:
                self._table.round = (self._table.round + 1) % _ROUNDS
                self._table.packed.begin_listing()
                self._gone = set()
            try:
                items = iter(found)
                while some := sorted(islice(items, _AT_ONCE), key=lambda item: item[2]):
                    with self._lock:
                        for block, size, used in some:
                            self._table.list(
                                block, size, used, forgotten=block in (self._gone or ())
                            )
            finally:
                with self._lock:
                    self._gone = None
                self._order_listed()
            return self._not_listed()

    def _order_listed(self) -> None:
        """Unpack the newest listed blocks, as many as may be ordered."""
        with self._lock:
            self._table.packed.end_listing()
            newest = self._table.packed.newest(self._table.most_ordered)
        for start in range(0, len(newest), _AT_ONCE):
            with self._lock:
                for block in newest[start : start + _AT_ONCE]:
                    self._table.ordered(block)

    def _not_listed(self) -> list[bytes]:
        """Forget and return the blocks that the last listing did not find."""
        with self._lock:
            gone = [
                one.block for one in self._table.blocks.values() if one.round != self._table.round
            ]
            for block in gone:
                self._table.forget(block)
        for part in self._table.packed.parts():
            with self._lock:
                rows = self._table.packed.sweep(part, lambda row: row.round != self._table.round)
                for row in rows:
                    self._table.forget(row.block)
            gone += (row.block for row in rows)
        return gone
