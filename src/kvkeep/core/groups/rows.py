"""`RowTables`: the rows of one sequence, page by page, for each window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.groups.stored import live_pages, no_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.stored import Rows
    from kvkeep.core.pages.tables import PageArray

__all__ = ["RowTables"]


class RowTables:
    """One table of rows a window, with a reference to each row in it.

    Region map of a table:

        0 … first          freed: no token that is still to be computed attends to these
        first … length     rows of this sequence, some of them shared with the tree or with forks

    Thread safety: none; under the cache's lock.

    Attributes:
        length: pages in the tables.
    """

    __slots__ = ("_board", "_first", "_rows", "_size", "length")

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._size = board.layout.page_size
        self._rows = [no_rows(0, width) for width in board.layout.widths]
        self._first = [0] * len(self._rows)
        self.length = 0

    def views(self) -> tuple[Rows, ...]:
        """Return the tables, read-only, valid until the next change."""
        views = []
        for rows in self._rows:
            view = rows[: self.length]
            view.flags.writeable = False
            views.append(view)
        return tuple(views)

    def live(self) -> Iterator[PageArray]:
        """Yield the pool pages of all rows, a window at a time. Cost: the rows."""
        for rows, first in zip(self._rows, self._first, strict=True):
            yield live_pages(rows[first : self.length])

    def between(self, window: int, start: int, stop: int) -> Rows:
        """Return the rows of pages ``start`` … ``stop`` of a window, as a view to change."""
        return self._rows[window][start : min(stop, self.length)]

    # --- begin and end ---------------------------------------------------------------------------

    def hold(self, path: PageArray) -> None:
        """Replace all rows by those that resuming at the end of ``path``, of base pages, reads."""
        board, old = self._board, list(self.live())
        self.length = len(path)
        self._rows = [no_rows(self.length, width) for width in board.layout.widths]
        for window, first in board.needed(self.length):
            rows = board.stored_rows.rows[window][path[first:]]
            board.units.retain(live_pages(rows))
            self._rows[window][first:] = rows
            self._first[window] = first
        for pages in old:
            board.units.release(pages)

    def fork(self, position: int) -> Self:
        """Return tables of the same rows, for a fork that goes on at ``position``."""
        other = type(self)(self._board)
        other.length = self.length
        for window, (rows, spec) in enumerate(
            zip(self._rows, self._board.layout.windows, strict=True)
        ):
            first = max(self._first[window], spec.first_needed(position, self._size))
            other._rows[window] = copied = no_rows(*rows[: self.length].shape)
            other._first[window] = first = min(first, self.length)
            copied[first:] = rows[first : self.length]
            self._board.units.retain(live_pages(copied[first:]))
        return other

    def close(self) -> None:
        """Release all rows."""
        for pages in self.live():
            self._board.units.release(pages)
        self.length = 0

    # --- passes ----------------------------------------------------------------------------------

    def free(self, position: int) -> None:
        """Free the rows that no token from ``position`` on attends to."""
        for window, spec in enumerate(self._board.layout.windows):
            first = min(spec.first_needed(position, self._size), self.length)
            if first > self._first[window]:
                gone = self._rows[window][self._first[window] : first]
                self._board.units.release(live_pages(gone))
                gone[:] = -1
                self._first[window] = first

    def shared(self, position: int) -> list[int]:
        """Return the windows whose row at ``position`` is begun, and is a fork's, too."""
        at, offset = divmod(position, self._size)
        units = self._board.units
        return [
            window
            for window, rows in enumerate(self._rows)
            if offset and rows[at, 0] >= 0 and not units.is_sole(rows[at])
        ]

    def exchange(self, window: int, page: int, row: PageArray) -> PageArray:
        """Put ``row`` in place of the row at ``page``; return that, with its reference."""
        old: PageArray = self._rows[window][page].copy()
        self._board.stored_rows.inherit(row[0], old[0])
        self._rows[window][page] = row
        return old

    def extend(self, pages: PageArray, count: int) -> None:
        """Append ``count`` rows to each table, made of ``pages``."""
        length = self.length + count
        for window, width in enumerate(self._board.layout.widths):
            there = self._rows[window]
            if length > len(there):
                grown = np.empty((max(length, self.length * 3 // 2 + 8), width), np.int32)
                grown[: self.length] = there[: self.length]
                self._rows[window] = there = grown
            there[self.length : length] = pages[: count * width].reshape(count, width)
            self._board.stored_rows.allocated(there[self.length : length, 0])
            pages = pages[count * width :]
        self.length = length

    def replace(self, position: int, take: Callable[[int], PageArray]) -> None:
        """Replace all rows by new ones: those that are attended to from ``position`` on.

        The tokens in front of a window lack in the first row of it (`TreeRows`). Raises what
        ``take`` raises, and changes nothing then.
        """
        layout, old = self._board.layout, list(self.live())
        length = -(-position // self._size)
        firsts = [spec.first_needed(position, self._size) for spec in layout.windows]
        counts = [
            (length - first) * width for first, width in zip(firsts, layout.widths, strict=True)
        ]
        pages, stored = take(sum(counts)), self._board.stored_rows
        self.length, self._first = length, firsts
        for window, (first, width) in enumerate(zip(firsts, layout.widths, strict=True)):
            self._rows[window] = rows = no_rows(length, width)
            rows[first:] = pages[: counts[window]].reshape(-1, width)
            stored.allocated(rows[first:, 0])
            begin = layout.windows[window].first_token(position)
            stored.allocated(rows[first : first + 1, 0], begin - first * self._size)
            pages = pages[counts[window] :]
        for gone in old:
            self._board.units.release(gone)

    def has(self, window: int, row: PageArray) -> bool:
        """Whether ``row`` is in the table of a window."""
        return bool((self._rows[window][self._first[window] : self.length, 0] == row[0]).any())

    def begins(self) -> list[int]:
        """Return, for each window, the first token of which there is KV from there on."""
        begins = []
        for rows, first in zip(self._rows, self._first, strict=True):
            lacking = self._board.stored_rows.lacking(rows[first : self.length][:1, 0])
            begins.append(first * self._size + int(lacking.sum()))
        return begins

    def covers(self, position: int) -> bool:
        """Whether the rows hold all tokens to which token ``position`` attends."""
        return all(
            begin <= spec.first_token(position)
            for spec, begin in zip(self._board.layout.windows, self.begins(), strict=True)
        )

    def cut(self, position: int) -> None:
        """Release the rows behind token ``position``."""
        length = min(self.length, -(-position // self._size))
        for rows, first in zip(self._rows, self._first, strict=True):
            self._board.units.release(live_pages(rows[max(first, length) : self.length]))
        self.length = length
        self._first = [min(first, length) for first in self._first]
