"""`RowFronts`: rows of which the first tokens were never written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.groups.kept import Rows
    from kvkeep.core.pages.layout import WindowSpec

    Tokens = npt.NDArray[np.int64]

__all__ = ["RowFronts"]


class RowFronts:
    """How many leading tokens of each row lack, by its first pool page.

    The KV of a window that `SequenceGroups.load` brings begins where the window does, mostly inside
    a page. A request that goes on behind the load does not attend to the tokens in front of it, but
    one that goes on a little earlier does. Each row is noted when it is allocated, so freed pages
    need no update.

    Thread safety: none; under the cache's lock. Memory: 4 bytes a pool page. Cost: O(rows),
    vectorised.
    """

    __slots__ = ("_lacking", "_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._lacking = np.zeros(num_pages, np.int32)
        self._size = page_size

    def note(self, rows: Rows, tokens: int = 0) -> None:
        """Note that ``tokens`` leading tokens of newly allocated ``rows`` lack."""
        self._lacking[rows[:, 0]] = tokens

    def inherit(self, row: Rows, old: Rows) -> None:
        """Note that the newly allocated ``row`` becomes a copy of ``old``."""
        self._lacking[row[:, 0]] = self._lacking[old[:, 0]]

    def lacking(self, rows: Rows) -> Tokens:
        """Return how many leading tokens of each row lack: all of them of a missing row."""
        firsts = rows[:, 0]
        found: Tokens = np.where(firsts < 0, self._size, self._lacking[firsts]).astype(np.int64)
        return found

    def ends(self, rows: Rows, start: int) -> Tokens:
        """Return where the tokens end that lack in each row; 0 if none does.

        In tokens of the sequence, of which ``rows`` hold the pages from ``start`` on.
        """
        lacking = self.lacking(rows)
        begins = np.arange(start, start + len(rows), dtype=np.int64) * self._size
        return np.where(lacking > 0, begins + lacking, 0)

    def are_complete(self, rows: Rows, start: int, window: WindowSpec, position: int) -> bool:
        """Whether ``rows``, of the pages from ``start`` on, hold what computing needs there on.

        ``start`` is the first page that is needed to go on at token ``position``, and the rows
        reach up to it.
        """
        return bool((self.ends(rows, start) <= window.first_token(position)).all())
