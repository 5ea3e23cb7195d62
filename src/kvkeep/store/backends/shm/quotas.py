"""`Quotas`: bytes of the namespaces that have a quota, counted for all processes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.shm import layout as at

if TYPE_CHECKING:
    from kvkeep.store.backends.shm.books import Books

__all__ = ["Quotas"]


class Quotas:
    """The quotas in ``books``, for all processes. A process that sets one sets it for all.

    Thread safety: `limit`, `held` and `over` take no lock; call the others under the arena's lock.
    Cost: nothing where no namespace has a quota, else a microsecond for a record put or deleted.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._at: dict[bytes, int] = {}  # space → its words

    def _of(self, space: bytes) -> int:
        """Return where the words of a namespace's quota are, -1 if it has none."""
        words = self._books.words
        while len(self._at) < min(words[at.QUOTA_COUNT], at.QUOTAS):
            where = at.QUOTA_AT + 4 * len(self._at)
            self._at[bytes(words[where : where + 2].cast("B"))] = where
        return self._at.get(space, -1)

    def limit(self, space: bytes) -> int | None:
        """Return the bytes that a namespace may hold, None without a quota."""
        where = self._of(space)
        return None if where < 0 else self._books.words[where + 2]

    def over(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits."""
        where = self._of(space)
        if where < 0:
            return 0
        limit, held = self._books.words[where + 2], self._books.words[where + 3]
        return -1 if more > limit else max(0, held + more - limit)

    def set(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes. Cost: a new one takes a pass over the entries."""
        words = self._books.words
        where = self._of(space)
        if where < 0:
            count = words[at.QUOTA_COUNT]
            if count >= at.QUOTAS:
                raise InvalidValue(f"a shared arena has room for {at.QUOTAS} quotas, all are taken")
            where = at.QUOTA_AT + 4 * count
            words[where : where + 2] = memoryview(space).cast("q")
            words[where + 2], words[where + 3] = limit, self._count(space)
            words[at.QUOTA_COUNT] = count + 1
        words[where + 2] = limit

    def count(self, block: bytes, more: int) -> None:
        """Count ``more`` bytes, negative for fewer, to the namespace of ``block``."""
        if self._books.words[at.QUOTA_COUNT]:
            where = self._of(block[:SPACE_BYTES])
            if where >= 0:
                self._books.words[where + 3] += more

    def recount(self) -> None:
        """Count the bytes of all namespaces with a quota anew, after a repair."""
        for number in range(min(self._books.words[at.QUOTA_COUNT], at.QUOTAS)):
            where = at.QUOTA_AT + 4 * number
            space = bytes(self._books.words[where : where + 2].cast("B"))
            self._books.words[where + 3] = self._count(space)

    def clear(self) -> None:
        """Forget all quotas: nobody else has the arena open."""
        self._books.words[at.QUOTA_COUNT] = 0
        self._at.clear()

    def _count(self, space: bytes) -> int:
        mine = in_space(self._books, space, self._books.words[at.HIGH])
        mine &= self._books.named_all[: len(mine)] != 0
        return int(np.asarray(self._books.size)[: len(mine)][mine].sum())


def in_space(books: Books, space: bytes, high: int) -> np.ndarray:
    """Return which of the first ``high`` entries have an id in ``space``."""
    wanted = np.frombuffer(space, np.int64)
    ids = books.ids_all[:high]
    same: np.ndarray = (ids[:, 0] == wanted[0]) & (ids[:, 1] == wanted[1])
    return same
