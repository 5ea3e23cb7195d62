"""What the tree stores of groups: rows (`TreeRows`), and the checkpoints of each run."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node

    Rows = npt.NDArray[np.int32]
    Tokens = npt.NDArray[np.int64]
    CheckpointKind = Literal["branch", "end", "guess"]

__all__ = ["Checkpoint", "NodeCheckpoints", "TreeRows", "live_pages", "no_rows"]


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


_page = attrgetter("page")


class Checkpoint:
    """A position at which requests may resume: the end of page ``page - 1`` of its path.

    It needs the rows that its windows reach back to, and keeps ``state``, the pool pages of the
    state at the position (None for a model without states). ``node`` stores it.
    """

    __slots__ = ("branch", "extended", "guess", "node", "page", "state", "stored")

    def __init__(
        self, node: Node, page: int, state: PageArray | None, kind: CheckpointKind
    ) -> None:
        self.node = node
        self.page = page
        self.state = state
        self.stored = True
        """Whether the tree still has it."""
        self.branch = kind == "branch"
        """Whether prompts branched here when it was made."""
        self.guess = kind == "guess"
        """Whether nothing is known to end or branch here, and no request has resumed here."""
        self.extended = False
        """Whether the request that used or made it last has left a later checkpoint."""

    @property
    def early(self) -> bool:
        """Whether it goes before any KV of tokens."""
        return self.guess or self.extended

    @property
    def branches(self) -> bool:
        """Whether several prompts go on behind it."""
        return self.branch or (self.page == self.node.end and len(self.node.children) > 1)

    @property
    def base(self) -> int:
        """The base page at whose end it is."""
        return int(self.node.pages[self.page - self.node.depth - 1])

    def __repr__(self) -> str:
        return f"<checkpoint at page {self.page}{' (guess)' if self.guess else ''}>"


class NodeCheckpoints:
    """The checkpoints inside a node or at its end, by position: `Node.groups`.

    Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_node", "_rows", "all")

    def __init__(self, node: Node, rows: TreeRows) -> None:
        self._node = node
        self._rows = rows
        self.all: list[Checkpoint] = []

    @property
    def num_pages(self) -> int:
        """Pool pages of the node's states and rows. Cost: the pages of the node."""
        states = sum(len(each.state) for each in self.all if each.state is not None)
        return states + self._rows.count(self._node.pages)

    @property
    def points(self) -> tuple[int, ...]:
        """The pages of the path behind which the checkpoints are."""
        return tuple(each.page for each in self.all)

    @property
    def last(self) -> int:
        """The page of the path behind which the last one is; that before the node for none."""
        return self.all[-1].page if self.all else self._node.depth

    def add(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint at its place in the order."""
        self.all.insert(bisect_right(self.all, checkpoint.page, key=_page), checkpoint)

    def at(self, page: int) -> Checkpoint | None:
        """Return the checkpoint at ``page``."""
        at = bisect_right(self.all, page, key=_page)
        before = self.all[at - 1] if at else None
        return before if before is not None and before.page == page else None

    def split(self, upper: Node) -> NodeCheckpoints:
        """Return those of ``upper``, the new front of the node, which loses them."""
        front = NodeCheckpoints(upper, self._rows)
        cut = bisect_right(self.all, upper.end, key=_page)
        front.all, self.all = self.all[:cut], self.all[cut:]
        for checkpoint in front.all:
            checkpoint.node = upper
        return front

    def absorb(self, front: NodeCheckpoints) -> None:
        """Undo `split`: the node stores what ``front`` has again."""
        for checkpoint in front.all:
            checkpoint.node = self._node
        self.all = front.all + self.all
