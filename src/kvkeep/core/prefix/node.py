"""`Node`: one run of pages in the tree, and ways to walk from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.base import Entry
from kvkeep.core.prefix.base import EMPTY_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.heads import Heads
    from kvkeep.core.prefix.owners import Owner
    from kvkeep.core.prefix.pinned import Spot

__all__ = ["Node", "Root", "descend"]


class Node(Entry):
    """A run of pages and the symbols they stand for. The root of a namespace has no pages.

    ``serial`` is its name for people: no two nodes of a tree ever have the same. It belongs to the
    *end* of the run, as a hold and a pin do: it stays when the run grows, when its tail is evicted,
    and when it is split, where the new front gets another. ``uses`` are the requests whose reuse
    ended here, and below where that is gone: those that reused the run are these and all further
    down, so a split leaves both halves with what they had.
    """

    __slots__ = (
        "children", "covered", "end", "heads", "holders", "kept", "key", "owner", "pages", "parent",
        "pins", "run", "serial", "sleepers", "spot", "uses",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        run: bytes | memoryview,
        pages: PageArray,
        unit: int,
        serial: int,
    ) -> None:
        super().__init__()
        self.parent = parent
        self.run = run
        self.key = bytes(run[:unit])
        self.pages = pages
        self.size = len(pages)
        self.depth = 0 if parent is None else parent.end
        self.end: int = self.depth + self.size
        self.children: dict[bytes, Node] = {}
        self.heads: Heads | None = None
        self.holders = 0  # holds on this very node, and children that are held
        self.pins = 0  # soft ones at its end
        self.spot: Spot | None = None  # all of them, if there are any
        self.covered = 0  # 1 if a pin stands at its end, and children that are covered
        self.kept = 0  # the same, of hard pins alone
        self.owner: Owner | None = None  # who alone has used it, if that is known
        self.serial = serial
        self.uses = 0
        self.sleepers = 0  # 1 if it is suspended itself, and children that have any

    @property
    def id(self) -> int:
        """Its number for people: that of a root is negative."""
        return self.serial if self.end else -self.serial

    def __repr__(self) -> str:
        return f"<Node …{self.end} pages, {self.size} of its own, {self.holders} holders>"


class Root(Node):
    """Where the paths of one namespace begin: no pages, never evicted, gone when it is empty."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, serial: int) -> None:
        super().__init__(None, b"", EMPTY_PAGES, 0, serial)
        self.namespace = namespace


def descend(root: Node) -> Iterator[tuple[Node, int]]:
    """Every node below and with ``root``, parents first, with its depth; no recursion."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        children = sorted(node.children.values(), key=lambda child: child.last_used)
        stack.extend((child, depth + 1) for child in children)
