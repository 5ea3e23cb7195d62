"""`Node`: one run of pages in a prefix tree; `TreeObserver`: what is told of every change of it."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.keys import Namespace, root_key
from kvkeep.core.pages.tables import EMPTY_PAGES, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.pages.tables import PageArray

__all__ = ["Coverage", "Entry", "Node", "Root", "TreeObserver", "descend", "path_pages"]

_NONE = Namespace()


class Entry:
    """What may be evicted, as a policy sees it: a run of pages in a tree, or a block of a tier.

    ``last_used`` and ``hits`` are kept by the tree, or the tier: a larger ``last_used`` is later,
    and ``hits`` are the requests that reused the entry. ``rank`` is for the policy alone.
    """

    __slots__ = (
        "counted", "depth", "followers", "hits", "last_used", "namespace", "priority", "rank",
        "size", "wait",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size = 0  # its pages; of a block, its bytes
        self.depth = 0  # pages before it
        self.last_used = 0
        self.hits = 0
        self.priority = 0  # given by its caller
        self.namespace: Namespace | None = None  # whose KV it is; None if nobody tells
        self.rank: Any = None
        self.counted = 0  # of its size, what `kvkeep.core.eviction.shares` has counted
        self.wait: Any = None  # of the conversation that ended here: `kvkeep.core.eviction.returns`
        self.followers = 0  # waiting conversations whose runs behind this one were evicted


class Node(Entry):
    """A run of pages and the symbols that they were computed from.

    ``serial`` is unique in its tree and belongs to the *end* of the run, as holds and pins do: it
    stays when the run grows, loses its tail, or is cut, where the new front gets a new serial.
    ``hits`` counts the requests whose reuse ended here or in an evicted descendant; the requests
    that reused a run are its own hits and those of all its descendants, so a cut changes nothing.
    ``namespace`` is that of the root, except for private runs behind a public prefix
    (`kvkeep.core.public`): theirs is the tenant's.
    """

    __slots__ = (
        "children", "died", "due", "end", "groups", "heads", "holders", "key", "owner", "pages",
        "parent", "place", "returns", "run", "serial", "spot", "trail",
    )  # fmt: skip

    namespace: Namespace

    def __init__(
        self,
        parent: Node | None,
        run: bytes | memoryview,
        pages: PageArray,
        unit: int,
        serial: int,
    ) -> None:
        super().__init__()
        self.namespace = _NONE if parent is None else parent.namespace
        self.parent = parent
        self.run = run  # symbols of all pages; a view of them and more once it lost its tail
        self.key = bytes(run[:unit])  # symbols of the first page
        self.pages = pages
        self.size = len(pages)
        self.depth = 0 if parent is None else parent.end
        self.end: int = self.depth + self.size
        self.children: dict[bytes, Node] = {}
        self.heads: Any = None  # the children's keys in order, from two children on: `Heads`
        self.holders = 0  # holds on this node, and children with holders
        self.serial = serial
        self.place: int | bytes = serial
        """What stands for its end: a new number once that was cut off; of a root, its namespace."""
        self.trail: Any = None  # that has a copy of this run: `RunTrail`
        self.owner: Any = None  # the only user so far, if known
        # Hints of that user, see `Tree.enqueue`:
        self.died = 0  # the number of its death, from 1 on; 0 while it lives
        self.due: float | None = None  # when its owner expects to reuse it
        # A slot for each observer:
        self.spot: Any = None  # pins at its end: `kvkeep.core.cache.pins`
        self.groups: Any = None  # rows and states beside its pages: `kvkeep.core.groups`
        self.returns: Any = None  # waits of evicted runs behind it: `kvkeep.core.eviction.returns`

    @property
    def id(self) -> int:
        """The id that maps show, by which users refer to the node; negative for a root."""
        return self.serial if self.end else -self.serial

    @property
    def in_tree(self) -> bool:
        """Whether it is still in the tree; always true for a root."""
        return self.parent is not None

    @property
    def pins(self) -> int:
        """Soft pins that end here."""
        return 0 if self.spot is None else len(self.spot.soft)

    @property
    def group_pages(self) -> int:
        """Pool pages that are kept beside its own, of groups of layers."""
        pages: int = 0 if self.groups is None else self.groups.pages_beside(self)
        return pages

    @property
    def weight(self) -> int:
        """All pool pages that it stores: its own, and those kept beside them."""
        return self.size if self.groups is None else self.size + self.group_pages

    @property
    def points(self) -> tuple[int, ...]:
        """Its checkpoints, in pages of its path."""
        points: tuple[int, ...] = () if self.groups is None else self.groups.points(self)
        return points

    def before(self) -> tuple[Namespace, bytes]:
        """Return the namespace of its root, and the symbols of all runs before it."""
        runs: list[bytes | memoryview] = []
        node = self
        while node.parent is not None:
            node = node.parent
            runs.append(node.run)
        return node.namespace, b"".join(reversed(runs))

    # --- changes of its shape, by the tree -------------------------------------------------------

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
        self.place = self.key = root_key(namespace)

    @property
    def in_tree(self) -> bool:
        """Always true: a root that is removed stays a valid, empty path."""
        return True


class TreeObserver:
    """Follows the runs of a tree; every method does nothing, and a tree calls those overridden.

    Called in the middle of an operation and under the cache's lock: an observer must not change the
    tree there, nor raise. Each keeps what it notes of a run in a slot of `Node`.
    """

    def born(self, node: Node, pages: int) -> None:
        """The last ``pages`` of ``node`` were stored: all of a new leaf, in no queue yet."""

    def split(self, upper: Node, lower: Node) -> None:
        """``upper``, a new node, took the first pages of ``lower``."""

    def joined(self, upper: Node, lower: Node) -> None:
        """``lower`` took back the pages of ``upper``, which is gone."""

    def used(self, node: Node, owner: Any) -> None:
        """A request reuses ``node`` and all before it; ``owner`` is its user, None if unnamed."""

    def trimmed(self, leaf: Node, keep: int) -> None:
        """``leaf`` is about to lose its pages behind the first ``keep``, 1 at least."""

    def gone(self, leaf: Node, parent: Node) -> None:
        """``leaf`` is about to leave the tree; it is in no queue. Its record goes to ``parent``."""

    def resized(self, node: Node, pages: int) -> None:
        """So many ``pages`` more are kept beside those of ``node``, or less."""


class Coverage:
    """The pages on the paths to marked runs, each counted once.

    A run is counted upwards only to the first run that is covered already, so a mark costs the
    uncovered runs of its path. Thread safety: none; under the cache's lock. Memory: a dictionary
    entry for each covered run.
    """

    __slots__ = ("_counts", "_weigh", "num_pages")

    def __init__(self, weigh: Callable[[Node], int] = attrgetter("size")) -> None:
        self._counts: dict[Node, int] = {}  # marks of a run, and its covered children
        self._weigh = weigh
        self.num_pages = 0

    def __contains__(self, node: object) -> bool:
        return node in self._counts

    def add(self, node: Node) -> None:
        """Mark ``node`` once more."""
        counts = self._counts
        while node.parent is not None:
            count = counts.get(node, 0)
            counts[node] = count + 1
            if count:
                return
            self.num_pages += self._weigh(node)
            node = node.parent

    def remove(self, node: Node) -> None:
        """Undo `add`."""
        counts = self._counts
        while node.parent is not None:
            count = counts[node] - 1
            if count:
                counts[node] = count
                return
            del counts[node]
            self.num_pages -= self._weigh(node)
            node = node.parent

    def more(self, node: Node) -> int:
        """Return how many pages more a mark at ``node`` would cover."""
        pages = 0
        while node.parent is not None and node not in self._counts:
            pages += self._weigh(node)
            node = node.parent
        return pages

    def split(self, upper: Node, lower: Node) -> None:
        """Count for ``upper``, the new front of ``lower``; marks stay at the end."""
        if lower in self._counts:
            self._counts[upper] = 1

    def joined(self, upper: Node) -> None:
        """Forget ``upper``, which has no mark of its own: the run behind it takes its pages."""
        self._counts.pop(upper, None)

    def resized(self, node: Node, pages: int) -> None:
        """Count ``pages`` more of a run, or less."""
        if node in self._counts:
            self.num_pages += pages

    def check(self, nodes: Iterable[Node], marks: Callable[[Node], int]) -> None:
        """Recount from all nodes but the roots, with the ``marks`` of each. Asserts."""
        pages, covered = 0, 0
        for node in nodes:
            below = sum(child in self._counts for child in node.children.values())
            count = self._counts.get(node, 0)
            assert count == marks(node) + below, f"wrong coverage: {node}"
            pages += self._weigh(node) if count else 0
            covered += bool(count)
        assert covered == len(self._counts), "a run is covered that is not in the tree"
        assert pages == self.num_pages, (pages, self.num_pages)


def path_pages(node: Node, start: int, stop: int) -> PageArray:
    """Return the pages ``start`` … ``stop`` of the path to ``node``, which has as many.

    Cost: the runs and trails of these pages.
    """
    parts: list[PageArray] = []
    while node.end > start and node.parent is not None:
        first: Node = node if node.trail is None else node.trail.nodes[0]
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
