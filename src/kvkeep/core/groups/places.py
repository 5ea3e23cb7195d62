"""`RowPlaces`: where in the tree each stored row lies, by its first pool page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from kvkeep.core.groups.kept import Rows
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node

__all__ = ["RowPlaces"]


class RowPlaces:
    """The node, the window and the page of the path of each row in the tree.

    A page's number on its path never changes, so only the nodes of rows are updated when runs are
    split or joined. Thread safety: none; under the cache's lock. Memory: 14 bytes a pool page.
    Cost: O(rows), vectorised.
    """

    __slots__ = ("_nodes", "_pages", "_windows")

    def __init__(self, num_pages: int) -> None:
        self._nodes = np.full(num_pages, None, object)
        self._windows = np.zeros(num_pages, np.int16)
        self._pages = np.zeros(num_pages, np.int32)

    def put(self, firsts: PageArray, node: Node, window: int, pages: npt.NDArray[np.int64]) -> None:
        """Record rows of ``node``, which lie at ``pages`` of its path."""
        self._nodes[firsts] = node
        self._windows[firsts] = window
        self._pages[firsts] = pages

    def moved(self, tables: Iterable[Rows], node: Node) -> None:
        """Record that ``node`` stores the rows of ``tables`` now."""
        for rows in tables:
            firsts = rows[:, 0]
            self._nodes[firsts[firsts >= 0]] = node

    def of(self, firsts: PageArray) -> Iterator[tuple[Node, int, npt.NDArray[np.int32]]]:
        """Yield neighbours among these rows that have a node and a window in common.

        With the node, the window, and their pages of the path.
        """
        nodes, windows, pages = self._nodes[firsts], self._windows[firsts], self._pages[firsts]
        differ = (nodes[1:] != nodes[:-1]) | (windows[1:] != windows[:-1])
        for some in np.split(np.arange(len(firsts)), np.flatnonzero(differ) + 1):
            yield nodes[some[0]], int(windows[some[0]]), pages[some]

    def forget(self, firsts: PageArray) -> None:
        """Forget rows that leave the tree."""
        self._nodes[firsts] = None

    def check(self, node: Node, window: int, rows: Rows) -> None:
        """Assert that the places of the rows of ``node`` are right."""
        there = np.flatnonzero(rows[:, 0] >= 0)
        firsts = rows[there, 0]
        assert all(one is node for one in self._nodes[firsts]), "a row has moved"
        assert (self._windows[firsts] == window).all()
        assert (self._pages[firsts] == node.depth + there).all()
