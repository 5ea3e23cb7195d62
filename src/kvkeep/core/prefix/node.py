"""`Node`: one run of pages in the tree, with the operations that change its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.eviction.base import Entry
from kvkeep.core.keys import Namespace
from kvkeep.core.prefix.results import EMPTY_PAGES, joined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.heads import Heads
    from kvkeep.core.prefix.owners import Owner
    from kvkeep.core.prefix.pinned import Spot
    from kvkeep.core.prefix.tree import RunTrail
    from kvkeep.core.prefix.waits import EvictedWaits

__all__ = ["Node", "Root", "descend", "path_pages"]

_NONE = Namespace()


class Node(Entry):
    """A run of pages and the symbols they were computed from.

    ``serial`` is unique in its tree and belongs to the *end* of the run, as holds and pins do: it
    stays when the run grows, loses its tail, or is cut, where the new front gets a new serial.
    ``uses`` counts the requests whose reuse ended here or in an evicted descendant; the requests
    that reused a run are its own uses and those of all its descendants, so a cut changes nothing.
    ``namespace`` is that of the root, except for private runs behind a public prefix
    (`kvkeep.core.public`): theirs is the tenant's.
    """

    __slots__ = (
        "children", "covered", "end", "extra", "gone", "heads", "holders", "kept", "key",
        "owner", "pages", "parent", "pins", "run", "serial", "spot", "suspended", "trail",
        "uses",
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
        self.namespace: Namespace = _NONE if parent is None else parent.namespace
        self.parent = parent
        self.run = run  # symbols of all pages; a view of them and more once it lost its tail
        self.key = bytes(run[:unit])  # symbols of the first page
        self.pages = pages
        self.size = len(pages)
        self.depth = 0 if parent is None else parent.end
        self.end: int = self.depth + self.size
        self.children: dict[bytes, Node] = {}
        self.heads: Heads | None = None  # the children's keys in order, from two children on
        self.holders = 0  # holds on this node, and children with holders
        self.pins = 0  # soft pins at its end
        self.spot: Spot | None = None  # all pins at its end
        self.covered = 0  # 1 for pins at its end, and 1 for each covered child
        self.kept = 0  # like covered, for hard pins alone
        self.owner: Owner | None = None  # the only user so far, if known
        self.serial = serial
        self.uses = 0
        self.suspended = 0  # 1 if its owner is suspended, and 1 for each child with a count
        self.gone: EvictedWaits | None = None  # of evicted runs behind it, see `Waits`
        self.extra: Any = None  # what the tree's listener keeps beside the pages
        self.trail: RunTrail | None = None  # that has a copy of this run

    @property
    def id(self) -> int:
        """The id that maps show, by which users refer to the node; negative for a root."""
        return self.serial if self.end else -self.serial

    @property
    def in_tree(self) -> bool:
        """Whether it is still in the tree; always true for a root."""
        return self.parent is not None

    @property
    def group_pages(self) -> int:
        """Pool pages that are kept beside its own, of groups of layers."""
        return 0 if self.extra is None else self.extra.num_pages

    @property
    def weight(self) -> int:
        """All pool pages that it stores: its own, and those kept beside them."""
        return self.size if self.extra is None else self.size + self.group_pages

    @property
    def points(self) -> tuple[int, ...]:
        """Its checkpoints, in pages of its path."""
        return () if self.extra is None else self.extra.points

    def before(self) -> tuple[Namespace, bytes]:
        """Return the namespace of its root, and the symbols of all runs before it."""
        runs: list[bytes | memoryview] = []
        node = self
        while node.parent is not None:
            node = node.parent
            runs.append(node.run)
        assert isinstance(node, Root)
        return node.namespace, b"".join(reversed(runs))

    def leave_trail(self) -> None:
        """Leave the trail, as its last run, before the run changes or leaves the tree."""
        if self.trail is not None:
            self.trail.leave(self)

    def grow(self, symbols: bytes, pages: PageArray) -> None:
        """Append pages to the run of a leaf."""
        self.leave_trail()
        self.run = b"".join((self.run, symbols))
        self.pages = np.concatenate((self.pages, pages))
        self.size += len(pages)
        self.end += len(pages)

    def trim(self, count: int, unit: int) -> PageArray:
        """Remove the last ``count`` pages of a leaf and return them.

        Symbols are copied only when half of them are gone, so that trimming page by page is cheap.
        """
        self.leave_trail()
        keep = self.size - count
        gone = self.pages[keep:]
        self.pages = self.pages[:keep]
        self.size = keep
        self.end -= count
        view = memoryview(self.run)
        self.run = view[: keep * unit]
        if isinstance(view.obj, bytes) and len(view.obj) > 2 * len(self.run):
            self.run = bytes(self.run)
            self.pages = self.pages.copy()
        return gone

    def cut_off(self, upper: Node, unit: int) -> None:
        """Give the first pages to ``upper``, a new node that takes this node's place."""
        parent, at = self.parent, upper.size
        assert parent is not None
        if self.trail is not None:
            self.trail.cut_off(upper, self)
        parent.children[upper.key] = upper
        self.run = bytes(self.run[at * unit :])
        self.key = self.run[:unit]
        self.pages = self.pages[at:].copy()
        self.size -= at
        self.depth += at
        self.parent = upper
        upper.children[self.key] = self

    def absorb(self, upper: Node) -> None:
        """Undo `cut_off`: put the pages of ``upper``, the parent, in front again."""
        parent = upper.parent
        assert parent is not None
        if upper.trail is not self.trail:
            upper.leave_trail()
            if self.trail is not None:
                self.trail.behind(1)
        elif upper.trail is not None:
            upper.trail.absorbed(upper)
        self.run = b"".join((upper.run, self.run))
        self.key = upper.key
        self.pages = np.concatenate((upper.pages, self.pages))
        self.size += upper.size
        self.counted += upper.counted
        self.depth = upper.depth
        self.parent = parent
        parent.children[self.key] = self
        upper.parent = None

    def __repr__(self) -> str:
        return f"<Node …{self.end} pages, {self.size} of its own, {self.holders} holders>"


class Root(Node):
    """The start of all paths of one namespace: no pages, removed when it is empty."""

    __slots__ = ()

    def __init__(self, namespace: Namespace, serial: int) -> None:
        super().__init__(None, b"", EMPTY_PAGES, 0, serial)
        self.namespace = namespace

    @property
    def in_tree(self) -> bool:
        """Always true: a root that is removed stays a valid, empty path."""
        return True


def path_pages(node: Node, start: int, stop: int) -> PageArray:
    """Return the pages ``start`` … ``stop`` of the path to ``node``, which has as many.

    Cost: the runs and trails of these pages.
    """
    parts: list[PageArray] = []
    while node.end > start and node.parent is not None:
        first = node if node.trail is None else node.trail.nodes[0]
        if first.depth < stop:
            pages = node.pages if node.trail is None else node.trail.pages
            parts.append(pages[max(0, start - first.depth) : min(stop, node.end) - first.depth])
        assert first.parent is not None
        node = first.parent
    return joined(parts[::-1])


def descend(root: Node) -> Iterator[tuple[Node, int]]:
    """Yield ``root`` and all its descendants with their depth in nodes; parents first.

    Children that were used most recently come first. No recursion.
    """
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        children = sorted(node.children.values(), key=lambda child: child.last_used)
        stack.extend((child, depth + 1) for child in children)
