"""`Kept`: the rows and checkpoints of one run of the prefix tree."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node

    CheckpointKind = Literal["branch", "end", "guess"]
    Rows = npt.NDArray[np.int32]
    Counts = npt.NDArray[np.int32]

__all__ = ["Checkpoint", "Kept", "live_pages", "no_rows"]


def no_rows(pages: int, width: int) -> Rows:
    """Return ``pages`` missing rows of ``width`` pool pages."""
    return np.full((pages, width), -1, np.int32)


def live_pages(rows: Rows) -> PageArray:
    """Return the pool pages of all rows that are not missing, in one array."""
    pages: PageArray = rows[rows[:, 0] >= 0].ravel()
    return pages


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

    def __repr__(self) -> str:
        return f"<checkpoint at page {self.page}{' (guess)' if self.guess else ''}>"


class Kept:
    """What the groups keep of the pages of one node, beside its base pages.

    Attributes:
        rows: for each window, int32 [pages of the node, pool pages of a row]; -1 where missing.
        needs: for each window, int32 [pages of the node]: checkpoints that need the row.
        checkpoints: those inside the node or at its end, by position.
    """

    __slots__ = ("checkpoints", "needs", "rows")

    def __init__(self, rows: list[Rows], needs: list[Counts]) -> None:
        self.rows = rows
        self.needs = needs
        self.checkpoints: list[Checkpoint] = []

    @classmethod
    def empty(cls, pages: int, widths: tuple[int, ...]) -> Kept:
        """Return a `Kept` for a node of ``pages`` pages, of which nothing is kept yet."""
        return cls(
            [no_rows(pages, width) for width in widths],
            [np.zeros(pages, np.int32) for _ in widths],
        )

    @property
    def num_pages(self) -> int:
        """Pool pages of all rows and states. Cost: the pages of the node."""
        states = sum(len(one.state) for one in self.checkpoints if one.state is not None)
        rows = (np.count_nonzero(rows[:, 0] >= 0) * rows.shape[1] for rows in self.rows)
        return states + int(sum(rows))

    @property
    def points(self) -> tuple[int, ...]:
        """The pages of the path behind which the checkpoints are."""
        return tuple(one.page for one in self.checkpoints)

    def grow(self, pages: int) -> None:
        """Add pages at the end, of which nothing is kept yet."""
        for window, rows in enumerate(self.rows):
            self.rows[window] = np.concatenate((rows, no_rows(pages, rows.shape[1])))
            self.needs[window] = np.concatenate((self.needs[window], np.zeros(pages, np.int32)))

    def split(self, at: int, upper: Node, first: int) -> Kept:
        """Cut before page ``at``; return the front part, which is of ``upper``.

        ``first`` is the page of the path with which the node begins.
        """
        front = Kept([rows[:at].copy() for rows in self.rows], [n[:at].copy() for n in self.needs])
        self.rows = [rows[at:].copy() for rows in self.rows]
        self.needs = [needs[at:].copy() for needs in self.needs]
        cut = bisect_right(self.checkpoints, first + at, key=_page)
        front.checkpoints, self.checkpoints = self.checkpoints[:cut], self.checkpoints[cut:]
        for checkpoint in front.checkpoints:
            checkpoint.node = upper
        return front

    def absorb(self, front: Kept, node: Node) -> None:
        """Undo `split`: ``node`` stores the pages of ``front`` again."""
        self.rows = [np.concatenate(pair) for pair in zip(front.rows, self.rows, strict=True)]
        self.needs = [np.concatenate(pair) for pair in zip(front.needs, self.needs, strict=True)]
        for checkpoint in front.checkpoints:
            checkpoint.node = node
        self.checkpoints = front.checkpoints + self.checkpoints

    def trim(self, keep: int) -> list[Rows]:
        """Remove and return the rows behind the first ``keep`` pages; no checkpoint is there."""
        gone = [rows[keep:] for rows in self.rows]
        self.rows = [rows[:keep].copy() for rows in self.rows]
        self.needs = [needs[:keep].copy() for needs in self.needs]
        return gone

    def add(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint at its place in the order."""
        at = bisect_right(self.checkpoints, checkpoint.page, key=_page)
        self.checkpoints.insert(at, checkpoint)

    def at(self, page: int) -> Checkpoint | None:
        """Return the checkpoint at ``page``."""
        at = bisect_right(self.checkpoints, page, key=_page)
        found = self.checkpoints[at - 1] if at else None
        return found if found is not None and found.page == page else None


def _page(checkpoint: Checkpoint) -> int:
    return checkpoint.page
