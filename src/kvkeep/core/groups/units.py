"""`TreeUnits`: the rows and states that the tree keeps, and which of them only the tree uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.groups.order import CheckpointOrder, LooseRows

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.groups.stored import Rows
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.tables import PageArray

__all__ = ["TreeUnits"]


class TreeUnits:
    """References to the pages of rows and states, on behalf of the tree and of sequences.

    A page that the tree stores and no sequence uses is *idle*: it can be freed at any time. All
    references to pages of rows and states are taken and dropped here, so that `idle` is right.

    Thread safety: none; under the cache's lock. Cost: O(pages), vectorised.

    Attributes:
        idle: pages that only the tree refers to.
        stored: pages that the tree refers to.
        loose: rows of the tree that no checkpoint needs.
        order: the checkpoints of the tree.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._in_tree = np.zeros(pool.num_pages, np.bool_)
        self.loose = LooseRows()
        self.order = CheckpointOrder()
        self.idle = 0
        self.stored = 0

    def store(self, pages: PageArray) -> None:
        """Add the tree's reference to ``pages``, which sequences refer to."""
        assert not self._in_tree[pages].any(), "the tree stores a row or state twice"
        self._pool.retain(pages)
        self._in_tree[pages] = True
        self.stored += len(pages)

    def drop(self, pages: PageArray) -> int:
        """Drop the tree's reference to ``pages``; return how many became free."""
        self.idle -= self.count_idle(pages)
        self._in_tree[pages] = False
        self.stored -= len(pages)
        return self._pool.release(pages)

    def retain(self, pages: PageArray) -> None:
        """Add a sequence's reference."""
        self.idle -= self.count_idle(pages)
        self._pool.retain(pages)

    def release(self, pages: PageArray) -> None:
        """Drop a sequence's reference."""
        self._pool.release(pages)
        idle = pages[self._in_tree[pages] & (self._pool.references[pages] == 1)]
        self.idle += len(idle)
        self.loose.released(idle)
        self.order.released(idle)

    def is_idle(self, pages: PageArray) -> bool:
        """Whether only the tree refers to each of ``pages``."""
        return self.count_idle(pages) == len(pages)

    def are_idle(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of ``rows`` the tree alone refers to, in all of their pages."""
        idle = self._in_tree[rows] & (self._pool.references[rows] == 1)
        return np.all(idle, axis=1)  # type: ignore[no-any-return]

    def is_sole(self, pages: PageArray) -> bool:
        """Whether there is one reference to each of ``pages``, that of the caller."""
        return not np.count_nonzero(self._pool.references[pages] != 1)

    def count_idle(self, pages: PageArray) -> int:
        """Return how many of ``pages`` only the tree refers to."""
        return int(np.count_nonzero(self._in_tree[pages] & (self._pool.references[pages] == 1)))

    def check(self, stored: PageArray) -> None:
        """Recount from all pages of rows and states in the tree. Asserts."""
        assert len(np.unique(stored)) == len(stored), "the tree stores a row or state twice"
        expected = np.zeros_like(self._in_tree)
        expected[stored] = True
        assert (expected == self._in_tree).all(), "a page is marked as the tree's and is not"
        assert self.stored == len(stored)
        idle = int(np.count_nonzero(self._pool.references[stored] == 1))
        assert self.idle == idle, (self.idle, idle)
