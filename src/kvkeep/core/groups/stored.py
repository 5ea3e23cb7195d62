"""`TreeRows`: the rows of windows by base page, and which of their tokens lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.table import PageArray

    Rows = npt.NDArray[np.int32]
    Tokens = npt.NDArray[np.int64]

__all__ = ["TreeRows", "live_pages", "no_rows"]


def no_rows(pages: int, width: int) -> Rows:
    """Return ``pages`` missing rows of ``width`` pool pages."""
    return np.full((pages, width), -1, np.int32)


def live_pages(rows: Rows) -> PageArray:
    """Return the pool pages of all rows that are not missing, in one array."""
    pages: PageArray = rows[rows[:, 0] >= 0].ravel()
    return pages


class TreeRows:
    """The rows that the tree stores, by the base page of the same tokens.

    A base page keeps its id and its position on its path while it is stored, however runs are cut,
    joined or grown. So rows never move, and the rows of a path are read by its page ids, whatever
    runs these are in.

    The KV of a window that `SequenceGroups.load` brings begins where the window does, mostly inside
    a page: the tokens in front of it *lack* in that row. A request that goes on behind the load
    does not attend to them, but one that goes on a little earlier does. This is noted when a row is
    allocated, also for rows that the tree does not store, so freed pages need no update.

    Thread safety: none; under the cache's lock. Memory: 14 bytes a pool page, and 4 for each window
    and each pool page of its rows. Cost: O(rows), vectorised.

    Attributes:
        rows: for each window, int32 [pool pages, pool pages of a row], by base page; -1 where
            missing.
        needs: for each window, int32 [pool pages], by base page: checkpoints that need the row.
    """

    def __init__(self, layout: GroupLayout, num_pages: int) -> None:
        self._size = layout.page_size
        self.rows = [no_rows(num_pages, width) for width in layout.widths]
        self.needs = [np.zeros(num_pages, np.int32) for _ in layout.windows]
        # By the first pool page of a row:
        self._bases = np.zeros(num_pages, np.int32)
        self._windows = np.zeros(num_pages, np.int16)
        self._lacking = np.zeros(num_pages, np.int32)

    # --- what the tree stores --------------------------------------------------------------------

    def put(self, window: int, bases: PageArray, rows: Rows) -> None:
        """Store ``rows`` for the base pages ``bases``."""
        self.rows[window][bases] = rows
        self._bases[rows[:, 0]] = bases
        self._windows[rows[:, 0]] = window

    def remove(self, window: int, bases: PageArray) -> None:
        """Remove the rows of ``bases``."""
        self.rows[window][bases] = -1

    def places(self, firsts: PageArray) -> Iterator[tuple[int, PageArray]]:
        """Yield the windows of stored rows, given by their first pages, and their base pages."""
        windows = self._windows[firsts]
        for window in np.unique(windows).tolist():
            yield window, self._bases[firsts[windows == window]]

    def count(self, bases: PageArray) -> int:
        """Return how many pool pages the rows of ``bases`` take, of all windows."""
        return sum(int(np.count_nonzero(rows[bases, 0] >= 0)) * rows.shape[1] for rows in self.rows)

    # --- tokens that lack ------------------------------------------------------------------------

    def allocated(self, firsts: PageArray, tokens: int = 0) -> None:
        """Note new rows by their first pages, of which ``tokens`` leading tokens lack."""
        self._lacking[firsts] = tokens

    def inherit(self, first: int, old: int) -> None:
        """Note a new row, by its first page, that becomes a copy of the row ``old``."""
        self._lacking[first] = self._lacking[old]

    def lacking(self, firsts: PageArray) -> Tokens:
        """Return how many leading tokens of each row lack: all of them of a missing row."""
        lacking: Tokens = np.where(firsts < 0, self._size, self._lacking[firsts]).astype(np.int64)
        return lacking

    def ends(self, window: int, bases: PageArray, start: int) -> Tokens:
        """Return where the tokens end that lack in each row of ``bases``; 0 if none does.

        In tokens of the path, of which ``bases`` are the pages from ``start`` on.
        """
        lacking = self.lacking(self.rows[window][bases, 0])
        begins = np.arange(start, start + len(bases), dtype=np.int64) * self._size
        return np.where(lacking > 0, begins + lacking, 0)

    def check(self, window: int) -> None:
        """Assert that rows are whole, and found by their first pages."""
        rows = self.rows[window]
        missing = rows < 0
        assert (missing.all(axis=1) == missing.any(axis=1)).all(), "half a row"
        assert not self.needs[window][missing[:, 0]].any(), "a checkpoint needs a missing row"
        bases = np.flatnonzero(~missing[:, 0])
        assert (self._bases[rows[bases, 0]] == bases).all(), "a row has moved"
        assert (self._windows[rows[bases, 0]] == window).all()
