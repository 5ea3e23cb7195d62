"""Rows of windows: those that the tree stores (`TreeRows`), and those of a sequence (`RowTables`).

Both refer to pages of the pool. All references to pages of rows and of states are counted in
`TreeRows`, which therefore has the pages that can be freed at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.pages.tables import EMPTY_PAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    import numpy.typing as npt

    from kvkeep.core.groups.plan import GroupLayout
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.tables import PageArray

    Rows = npt.NDArray[np.int32]
    Tokens = npt.NDArray[np.int64]

__all__ = ["RowCopy", "RowTables", "StateCopy", "TreeRows", "live_pages"]


class RowCopy(NamedTuple):
    """Copy the first ``tokens`` tokens of a row: pool pages ``src`` to ``dst``, in all layers.

    ``window`` is the number of the window group.
    """

    window: int
    src: PageArray
    dst: PageArray
    tokens: int


class StateCopy(NamedTuple):
    """Copy a whole state: pool pages ``src`` to ``dst``."""

    src: PageArray
    dst: PageArray


def no_rows(pages: int, width: int) -> Rows:
    """Return ``pages`` missing rows of ``width`` pool pages."""
    return np.full((pages, width), -1, np.int32)


def live_pages(rows: Rows) -> PageArray:
    """Return the pool pages of all rows that are not missing, in one array."""
    pages: PageArray = rows[rows[:, 0] >= 0].ravel()
    return pages


class TreeRows:
    """The rows that the tree stores, by the base page of the same tokens, and their references.

    A base page keeps its id and its position on its path while it is stored, however runs are cut,
    joined or grown. So rows never move, and the rows of a path are read by its page ids, whatever
    runs these are in.

    A page of a row or state that the tree stores and no sequence uses is *idle*: it can be freed at
    any time. A row that no checkpoint needs is *loose*: a request may resume behind it, but it is
    freed before anything else. In a model with states no request can, so it goes at once.

    The KV of a window that `SequenceGroups.load` brings begins where the window does, mostly inside
    a page: the tokens in front of it *lack* in that row. A request that goes on behind the load
    does not attend to them, but one that goes on a little earlier does. This is noted when a row is
    allocated, also for rows that the tree does not store, so freed pages need no update.

    Thread safety: none; under the cache's lock. Memory: 16 bytes a pool page, and 4 for each window
    and each pool page of its rows. Cost: O(pages), vectorised.

    Attributes:
        rows: for each window, int32 [pool pages, pool pages of a row], by base page; -1 where
            missing.
        needs: for each window, int32 [pool pages], by base page: checkpoints that need the row.
        idle: pages that only the tree refers to.
        stored: pages that the tree refers to.
    """

    def __init__(self, layout: GroupLayout, pool: PagePool) -> None:
        num_pages = pool.num_pages
        self._size = layout.page_size
        self._pool = pool
        self._states = layout.state is not None
        self._in_tree = np.zeros(num_pages, np.bool_)
        self.rows = [no_rows(num_pages, width) for width in layout.widths]
        self.needs = [np.zeros(num_pages, np.int32) for _ in layout.windows]
        self.idle = self.stored = 0
        # First pages of loose rows that are idle, and of rows that were: the oldest first.
        self._queue: OrderedDict[int, None] = OrderedDict()
        # By the first pool page of a row:
        self._bases = np.zeros(num_pages, np.int32)
        self._windows = np.zeros(num_pages, np.int16)
        self._loose = np.zeros(num_pages, np.bool_)
        self._lacking = np.zeros(num_pages, np.int32)

    # --- references to pages of rows and states --------------------------------------------------

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
        idle = pages[self.are_idle(pages)]
        if len(idle):
            self.idle += len(idle)
            self._enqueue(idle)

    def are_idle(self, pages: PageArray) -> npt.NDArray[np.bool_]:
        """Return which of ``pages`` only the tree refers to."""
        idle: npt.NDArray[np.bool_] = self._in_tree[pages] & (self._pool.references[pages] == 1)
        return idle

    def count_idle(self, pages: PageArray) -> int:
        """Return how many of ``pages`` only the tree refers to."""
        return int(np.count_nonzero(self.are_idle(pages)))

    def is_sole(self, pages: PageArray) -> bool:
        """Whether there is one reference to each of ``pages``, that of the caller."""
        return not np.count_nonzero(self._pool.references[pages] != 1)

    # --- what the tree stores --------------------------------------------------------------------

    def put(self, window: int, bases: PageArray, rows: Rows) -> None:
        """Store ``rows``, which a sequence refers to, for the base pages ``bases``."""
        firsts = rows[:, 0]
        self.store(rows.ravel())
        self.rows[window][bases] = rows
        self._bases[firsts], self._windows[firsts] = bases, window
        self._loose[firsts] = self.needs[window][bases] == 0

    def remove(self, window: int, bases: PageArray) -> int:
        """Remove the rows of ``bases``; return the pages freed."""
        rows: Rows = self.rows[window][bases]
        self.rows[window][bases] = -1
        self._loose[rows[:, 0]] = False
        return self.drop(rows.ravel())

    def need(self, window: int, bases: PageArray, change: int) -> PageArray:
        """Count one checkpoint more or less that needs rows; return the bases of rows now loose."""
        needs = self.needs[window]
        needs[bases] += change
        turned: PageArray = bases[needs[bases] == (1 if change > 0 else 0)]
        firsts: PageArray = self.rows[window][turned, 0]
        self._loose[firsts] = change < 0
        if change > 0:
            return EMPTY_PAGES
        self._enqueue(firsts[self.are_idle(firsts)])
        return turned

    def _enqueue(self, idle: PageArray) -> None:
        """Queue the loose rows whose first pages are among these ``idle`` pages."""
        self._queue.update(dict.fromkeys(idle[self._loose[idle]].tolist()))

    def oldest_loose(self, most: int) -> list[tuple[int, PageArray]]:
        """Remove ``most`` rows from the queue; return windows and bases of those loose and idle.

        The others are in use, needed or gone. They return to the queue when that ends.
        """
        firsts = np.array(list(islice(self._queue, most)), np.int32)
        for first in firsts.tolist():
            del self._queue[first]
        firsts = firsts[self._loose[firsts] & self.are_idle(firsts)]
        windows = self._windows[firsts]
        return [(at, self._bases[firsts[windows == at]]) for at in range(len(self.rows))]

    @property
    def any_queued(self) -> bool:
        """Whether loose rows are queued."""
        return bool(self._queue)

    @property
    def num_loose(self) -> int:
        """Rows that no checkpoint needs. Cost: the pool's pages, vectorised."""
        return int(np.count_nonzero(self._loose))

    # --- tokens that lack ------------------------------------------------------------------------

    def allocated(self, firsts: PageArray, tokens: int | Tokens = 0) -> None:
        """Note new rows by their first pages, of which ``tokens`` leading tokens lack."""
        self._lacking[firsts] = tokens

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

    def check(self, states: list[PageArray], is_base: npt.NDArray[np.bool_]) -> PageArray:
        """Assert that rows are whole, and recount; return all pages of rows and ``states``.

        ``is_base`` says for each page whether it is a stored base page.
        """
        loose = np.zeros_like(self._loose)
        for window, (rows, needs) in enumerate(zip(self.rows, self.needs, strict=True)):
            missing = rows < 0
            assert (missing.all(axis=1) == missing.any(axis=1)).all(), "half a row"
            assert missing[~is_base].all(), "a row outlives its page"
            assert not needs[missing[:, 0]].any(), "a checkpoint needs a missing row"
            bases = np.flatnonzero(~missing[:, 0])
            firsts = rows[bases, 0]
            assert (self._bases[firsts] == bases).all(), "a row has moved"
            assert (self._windows[firsts] == window).all()
            loose[firsts] = needs[bases] == 0
        assert (loose == self._loose).all(), "the loose rows are not those that nothing needs"
        assert not self._states or not loose.any(), "a loose row, though there are states"
        idle = np.flatnonzero(loose & self._in_tree & (self._pool.references == 1))
        assert set(idle.tolist()) <= self._queue.keys(), "a loose row is not queued"
        stored = np.concatenate([EMPTY_PAGES, *map(live_pages, self.rows), *states])
        assert len(np.unique(stored)) == len(stored), "the tree stores a row or state twice"
        expected = np.zeros_like(self._in_tree)
        expected[stored] = True
        assert (expected == self._in_tree).all(), "a page is marked as the tree's and is not"
        assert (self.stored, self.idle) == (len(stored), self.count_idle(stored))
        return stored


class RowTables:
    """One table of rows a window, with a reference to each row in it.

    Region map of a table:

        0 … first          freed: no token that is still to be computed attends to these
        first … length     rows of this sequence, some of them shared with the tree or with forks

    Thread safety: none; under the cache's lock.

    Attributes:
        length: pages in the tables.
    """

    __slots__ = ("_first", "_layout", "_rows", "_stored", "length")

    def __init__(self, layout: GroupLayout, stored: TreeRows) -> None:
        self._layout = layout
        self._stored = stored
        self._rows = [no_rows(0, width) for width in layout.widths]
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
        old = list(self.live())
        self.length = len(path)
        self._rows = [no_rows(self.length, width) for width in self._layout.widths]
        for window, first in self._layout.needed(self.length):
            rows = self._stored.rows[window][path[first:]]
            self._stored.retain(live_pages(rows))
            self._rows[window][first:] = rows
            self._first[window] = first
        for pages in old:
            self._stored.release(pages)

    def fork(self, position: int) -> Self:
        """Return tables of the same rows, for a fork that goes on at ``position``."""
        other = type(self)(self._layout, self._stored)
        other.length = self.length
        for window, (rows, spec) in enumerate(zip(self._rows, self._layout.windows, strict=True)):
            first = max(self._first[window], spec.first_needed(position, self._layout.page_size))
            other._rows[window] = copied = no_rows(*rows[: self.length].shape)
            other._first[window] = first = min(first, self.length)
            copied[first:] = rows[first : self.length]
            self._stored.retain(live_pages(copied[first:]))
        return other

    def close(self) -> None:
        """Release all rows."""
        self.cut(0)

    # --- passes ----------------------------------------------------------------------------------

    def free(self, position: int) -> None:
        """Free the rows that no token from ``position`` on attends to."""
        for window, spec in enumerate(self._layout.windows):
            first = min(spec.first_needed(position, self._layout.page_size), self.length)
            if first > self._first[window]:
                gone = self._rows[window][self._first[window] : first]
                self._stored.release(live_pages(gone))
                gone[:] = -1
                self._first[window] = first

    def reach(self, position: int, stop: int, take: Callable[[int], PageArray]) -> list[RowCopy]:
        """Append rows up to token ``stop``, for a pass that begins at ``position``.

        Where a fork uses the row that ``position`` is in, another takes its place: returns the
        copies to make, with a reference to each source. Raises what ``take`` raises, and changes
        nothing then.
        """
        widths, size = self._layout.widths, self._layout.page_size
        at, offset = divmod(position, size)
        fresh = max(0, -(-stop // size) - self.length)
        shared = [
            window
            for window, rows in enumerate(self._rows if offset and stop > position else ())
            if rows[at, 0] >= 0 and not self._stored.is_sole(rows[at])
        ]
        pages = take(fresh * sum(widths) + sum(widths[window] for window in shared))
        copies = []
        for window in shared:
            row, pages = pages[: widths[window]], pages[widths[window] :]
            old: PageArray = self._rows[window][at].copy()
            self._stored.allocated(row[:1], self._stored.lacking(old[:1]))
            self._rows[window][at] = row
            copies.append(RowCopy(window, old, row, offset))
        length = self.length + fresh
        for window, width in enumerate(widths):
            there = self._rows[window]
            if length > len(there):
                grown = np.empty((max(length, self.length * 3 // 2 + 8), width), np.int32)
                grown[: self.length] = there[: self.length]
                self._rows[window] = there = grown
            there[self.length : length] = pages[: fresh * width].reshape(fresh, width)
            self._stored.allocated(there[self.length : length, 0])
            pages = pages[fresh * width :]
        self.length = length
        return copies

    def replace(self, position: int, take: Callable[[int], PageArray]) -> None:
        """Replace all rows by new ones: those that are attended to from ``position`` on.

        The tokens in front of a window lack in the first row of it (`TreeRows`). Raises what
        ``take`` raises, and changes nothing then.
        """
        layout, stored, old = self._layout, self._stored, list(self.live())
        size = layout.page_size
        length = -(-position // size)
        firsts = [spec.first_needed(position, size) for spec in layout.windows]
        counts = [
            (length - first) * width for first, width in zip(firsts, layout.widths, strict=True)
        ]
        pages = take(sum(counts))
        self.length, self._first = length, firsts
        for window, (first, width) in enumerate(zip(firsts, layout.widths, strict=True)):
            self._rows[window] = rows = no_rows(length, width)
            rows[first:] = pages[: counts[window]].reshape(-1, width)
            stored.allocated(rows[first:, 0])
            begin = layout.windows[window].first_token(position)
            stored.allocated(rows[first : first + 1, 0], begin - first * size)
            pages = pages[counts[window] :]
        for gone in old:
            stored.release(gone)

    def has(self, window: int, row: PageArray) -> bool:
        """Whether ``row`` is in the table of a window."""
        return bool((self._rows[window][self._first[window] : self.length, 0] == row[0]).any())

    def begins(self) -> list[int]:
        """Return, for each window, the first token of which there is KV from there on."""
        begins = []
        for rows, first in zip(self._rows, self._first, strict=True):
            lacking = self._stored.lacking(rows[first : self.length][:1, 0])
            begins.append(first * self._layout.page_size + int(lacking.sum()))
        return begins

    def covers(self, position: int) -> bool:
        """Whether the rows hold all tokens to which token ``position`` attends."""
        return all(
            begin <= spec.first_token(position)
            for spec, begin in zip(self._layout.windows, self.begins(), strict=True)
        )

    def cut(self, position: int) -> None:
        """Release the rows behind token ``position``."""
        length = min(self.length, -(-position // self._layout.page_size))
        for rows, first in zip(self._rows, self._first, strict=True):
            self._stored.release(live_pages(rows[max(first, length) : self.length]))
        self.length = length
        self._first = [min(first, length) for first in self._first]
