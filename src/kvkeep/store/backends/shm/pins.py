"""`ArenaPins`: until when records of a shared arena are kept from eviction by request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.store.backends.shm import clock
from kvkeep.store.backends.shm import layout as at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.shm.core import ArenaCore

__all__ = ["ArenaPins"]


class ArenaPins:
    """The pins of all processes: a time in each entry. They outlive the process that made them.

    Thread safety: all methods.
    """

    def __init__(self, arena: ArenaCore) -> None:
        self._arena = arena
        self._books = arena.books

    def pin(self, blocks: Sequence[bytes], until: int, most: int) -> list[bytes]:
        """Pin ``blocks`` in order until then, while pins cover ``most`` bytes at most.

        ``until`` is a time of `clock`. Returns those that are pinned. Cost: a pass over the
        entries, besides the blocks.
        """
        books = self._books
        pinned: list[bytes] = []
        with self._arena:
            now = clock.now()
            covered = self._pinned_bytes(now)
            for block in blocks:
                entry = self._arena.find_here(block)
                if entry < 0:
                    continue
                if books.pinned[entry] <= now:
                    if covered + books.size[entry] > most:
                        break
                    covered += books.size[entry]
                books.pinned[entry] = max(books.pinned[entry], until)
                pinned.append(block)
        return pinned

    def set(self, ends: dict[bytes, int]) -> list[bytes]:
        """Let pins end at these times (see `clock`), 0: now; return the blocks that were pinned."""
        were: list[bytes] = []
        with self._arena:
            now = clock.now()
            for block, end in ends.items():
                entry = self._arena.find_here(block)
                if entry >= 0 and self._books.pinned[entry] > now:
                    self._books.pinned[entry] = end
                    were.append(block)
        return were

    def bytes(self) -> int:
        """Return the bytes that are pinned now. Cost: a pass over the entries."""
        return self._pinned_bytes(clock.now())

    def _pinned_bytes(self, now: int) -> int:
        high = self._books.words[at.HIGH]
        held = np.asarray(self._books.pinned)[:high] > now
        held &= self._books.named_all[:high] != 0
        return int(np.asarray(self._books.size)[:high][held].sum())
