"""`Node`: one run of pages in a prefix tree; `TreeObserver`: is called at each change."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.keys import Namespace, root_key
from kvkeep.core.pages.pool import EMPTY_PAGES, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.pages.pool import PageArray

__all__ = ["Coverage", "Entry", "Node", "Root", "TreeObserver", "descend", "path_pages"]

_NONE = Namespace()


class Entry:
    """A unit of eviction, as a policy sees it: a run of pages in a tree, or a block of a tier.

    The tree or the tier sets ``last_used`` (larger is later) and ``hits`` (requests that reused the
    entry). ``rank`` is for the policy alone.
    """

    __slots__ = (
        "depth", "followers", "hits", "last_used", "namespace", "priority", "rank",
        "size", "wait",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size = 0  # pages of a run, or bytes of a block
        self.depth = 0  # pages before it
        self.last_used = 0
        self.hits = 0
        self.priority = 0  # given by the request that published it
        self.namespace: Any = None  # of its KV, or the tenant of a block; None if unknown
        self.rank: Any = None
        self.wait: Any = None  # of a conversation that ended here: `kvkeep.core.eviction.returns`
        self.followers = 0  # waiting conversations whose runs behind this one were evicted


class Node(Entry):
    """A run of pages and the symbols that they were computed from.

    ``serial`` is unique in its tree and belongs to the *end* of the run, as holds and pins do: the
    run keeps it when it grows or loses its tail. If the run is cut, its front gets a new serial.
    ``hits`` counts the requests whose reuse ended here or in an evicted descendant; the requests
    that reused a run are its own hits and those of all its descendants, so a cut changes nothing.
    ``namespace`` is that of the root, except for private runs behind a public prefix
    (`kvkeep.core.public`): theirs is the tenant's.
    """

    __slots__ = (
        "children", "end", "groups", "heads", "holders", "key", "owner", "pages",
        "parent", "pin_set", "returns", "run", "serial", "stable_id", "trail",
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
        self.run = run  # symbols of all pages; a view of longer bytes once it lost its tail
        self.key = bytes(run[:unit])  # symbols of the first page
        self.pages = pages
        self.size = len(pages)
        self.depth = 0 if parent is None else parent.end
        self.end: int = self.depth + self.size
        self.children: dict[bytes, Node] = {}
        self.heads: Any = None  # `Heads`: the sorted keys of the children, if there are two or more
        self.holders = 0  # holds on this node, and children with holders
        self.serial = serial
        self.stable_id: int | bytes = serial
        """An id of its end, new once that was cut off; of a root, the namespace's key."""
        self.trail: Any = None  # `RunTrail`: has a copy of this run
        self.owner: Any = None  # its only user so far; None: several, or one without a name
        # A slot for each observer:
        self.pin_set: Any = None  # soft pins at its end: `kvkeep.core.cache.pins`
        self.groups: Any = None  # rows and states beside its pages: `kvkeep.core.groups`
        self.returns: Any = None  # waits of evicted runs behind it: `kvkeep.core.eviction.returns`

    @property
    def id(self) -> int:
        """The id that maps show and `PagedCache.node` takes; negative for a root."""
        return self.serial if self.end else -self.serial

    @property
    def in_tree(self) -> bool:
        """Whether it is still in the tree. A root that is removed stays a valid, empty path."""
        return self.parent is not None or not self.end

    @property
    def pins(self) -> int:
        """Soft pins that end here."""
        return 0 if self.pin_set is None else len(self.pin_set.pins)

    @property
    def group_pages(self) -> int:
        """Pool pages of rows and states that are stored beside its own pages."""
        pages: int = 0 if self.groups is None else self.groups.pages_beside(self)
        return pages

    @property
    def weight(self) -> int:
        """All pool pages that it stores: its own, and those beside them."""
        return self.size if self.groups is None else self.size + self.group_pages

    @property
    def points(self) -> tuple[int, ...]:
        """The positions of its checkpoints, in pages from the root."""
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
        removed = self.pages[keep:]
        self.pages = self.pages[:keep]
        self.size = keep
        self.end -= count
        view = memoryview(self.run)
        self.run = view[: keep * unit]
        if isinstance(view.obj, bytes) and len(view.obj) > 2 * len(self.run):
            self.run = bytes(self.run)
            self.pages = self.pages.copy()
        return removed

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
    """The start of all paths of one namespace. It has no pages and is removed when it is empty."""

    __slots__ = ()

    def __init__(self, namespace: Namespace, serial: int) -> None:
        super().__init__(None, b"", EMPTY_PAGES, 0, serial)
        self.namespace = namespace
        self.stable_id = self.key = root_key(namespace)


class TreeObserver:
    """Follows the runs of a tree, which calls the methods that a subclass overrides.

    They are called in the middle of an operation and under the cache's lock: an observer must not
    change the tree there, nor raise. What it records of a run is in a slot of `Node`.
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
        """``leaf`` is about to leave the tree; it is in no queue. ``parent`` inherits its hits."""

    def resized(self, node: Node, pages: int) -> None:
        """Rows and states beside the pages of ``node`` take ``pages`` more; fewer if negative."""


class Coverage(TreeObserver):
    """The pages on the paths to a set of runs, each counted once.

    It observes the tree, but for leaves: who adds one removes it before it is `gone`. `add` and
    `remove` walk up only to the first run that stays covered. Thread safety: none; under the
    cache's lock. Memory: a dictionary entry for each covered run.
    """

    def __init__(self, *, beside: bool = False) -> None:
        """``beside``: rows and states beside the pages of a run count, too."""
        self._counts: dict[Node, int] = {}  # times that a run was added, and its covered children
        self._beside = beside
        self._weigh = attrgetter("weight" if beside else "size")
        self.num_pages = 0

    def __contains__(self, node: object) -> bool:
        return node in self._counts

    def add(self, node: Node) -> None:
        """Cover the path to ``node``. Each call needs a `remove`."""
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
        """Return how many more pages `add` would cover."""
        pages = 0
        while node.parent is not None and node not in self._counts:
            pages += self._weigh(node)
            node = node.parent
        return pages

    def split(self, upper: Node, lower: Node) -> None:
        if lower in self._counts:
            self._counts[upper] = 1

    def joined(self, upper: Node, lower: Node) -> None:
        self._counts.pop(upper, None)

    def trimmed(self, leaf: Node, keep: int) -> None:
        if leaf in self._counts:
            self.num_pages += keep - leaf.size

    def resized(self, node: Node, pages: int) -> None:
        if self._beside and node in self._counts:
            self.num_pages += pages

    def check(self, nodes: Iterable[Node], added: Callable[[Node], int]) -> None:
        """Recount from all nodes but the roots, of which each was ``added`` so often. Asserts."""
        pages, covered = 0, 0
        for node in nodes:
            below = sum(child in self._counts for child in node.children.values())
            count = self._counts.get(node, 0)
            assert count == added(node) + below, f"wrong coverage: {node}"
            pages += self._weigh(node) if count else 0
            covered += bool(count)
        assert covered == len(self._counts), "a run is covered that is not in the tree"
        assert pages == self.num_pages, (pages, self.num_pages)


def path_pages(node: Node, start: int, stop: int) -> PageArray:
    """Return pages ``start`` … ``stop`` of the path to ``node``. Cost: their runs and trails."""
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
    """Yield ``root`` and its descendants with their depth in nodes: parents and late uses first."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        children = sorted(node.children.values(), key=lambda child: child.last_used)
        stack.extend((child, depth + 1) for child in children)
