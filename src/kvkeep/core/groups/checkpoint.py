"""`Checkpoint`, and `NodeCheckpoints`: those of one run of the prefix tree."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvkeep.core.groups.stored import TreeRows
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node

    CheckpointKind = Literal["branch", "end", "guess"]

__all__ = ["Checkpoint", "NodeCheckpoints"]

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
    """The checkpoints inside a node or at its end, by position: `Node.extra`.

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
