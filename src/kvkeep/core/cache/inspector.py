"""Maps of a cache's tree, and single runs by number; `Inspector` makes them.

A walk over many runs takes the lock for a few hundred of them at a time, so that requests pass in
between. Changes made meanwhile may be missing from a map; the next map has them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import NotCached, whole
from kvkeep.core.keys import as_namespace
from kvkeep.core.prefix.node import Root, descend
from kvkeep.core.prefix.render import PrefixRun
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from kvkeep.core.events import CacheLock
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import Tree
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.tokens import TokenArray

    Columns = npt.NDArray[np.int64]

__all__ = ["CacheMap", "Inspector", "MapNode", "NodeView", "runs_of"]

_HIDDEN = 1 << 52
"""Ids of hidden nodes are below minus this; JSON readers know integers up to 2**53."""

_STEP = 512
"""Runs visited under the lock at a time, about half a millisecond: a step of an engine takes the
lock many times, and may wait that long each time."""

_PAUSE_S = 0.0005
"""Pause between two steps, so that a waiting thread gets the lock."""

_HEAD_TOKENS = 80
_KEY_BYTES = 4
_MOST_NODES = 10_000
_BELOW = (1, 2, 5, 7)
"""The rows of a survey's table that are sums over a node and all behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class MapNode:
    """One node of a `CacheMap`: a run, a namespace, or several small siblings (``hidden``).

    ``id`` is a run's number, which no other run ever has. The number belongs to the run's end: it
    stays while that is stored, also when the run grows, is split (the front gets another number),
    or loses its tail. Namespaces have negative ids, stable while they hold pages; ids of hidden
    nodes are valid in this map only. ``parent`` is None for top nodes.

    ``pages`` are the node's own; for a hidden node, those of all runs it stands for, so that
    ``pages`` of all nodes of a map sum up to ``CacheMap.pages``. ``below_pages`` and ``below_runs``
    include everything behind the node. ``group_pages`` are those of rows and states
    beside them, in a cache with groups of layers. ``holders`` are sequences and hard
    pins on the run, and runs behind it that have any; ``pins`` the soft pins that end with it.
    ``hits`` are the requests that reused the run.
    """

    id: int
    parent: int | None
    pages: int
    below_pages: int
    below_runs: int
    holders: int
    pins: int
    hits: int
    count: int = 0
    """Siblings that a hidden node stands for; 0 for all other nodes."""
    head: TokenArray | None = None
    """The first tokens, 80 at most; None if the index keeps no tokens."""
    key: bytes = b""
    """The first bytes of the first block key, if the index keeps no tokens."""
    namespace: Namespace | None = None
    """The namespace that the node stands for; None for other nodes."""
    group_pages: int = 0
    checkpoints: tuple[int, ...] = ()
    """Positions in the run at which requests can resume, in tokens from the prompt's start; empty
    in a plain cache. Without states they may resume elsewhere, too, while the rows are there."""

    @property
    def hidden(self) -> bool:
        """Whether the node stands for several siblings."""
        return self.count > 0


@dataclass(frozen=True, slots=True, eq=False)
class CacheMap:
    """The content of a cache: its largest subtrees one by one, the rest summed up."""

    page_size: int
    runs: int
    """Runs in the mapped part of the cache, hidden ones included."""
    pages: int
    nodes: tuple[MapNode, ...]
    """Parents before children."""
    group_pages: int = 0
    """Pages of rows and states, which ``pages`` does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeView:
    """One run (or namespace), by its number."""

    node: MapNode
    namespace: Namespace
    path: tuple[int, ...]
    """Ids from the namespace down to the parent."""
    start: int
    """Pages before the run."""
    page_ids: PageArray
    tokens: TokenArray | None
    extras: Extras
    """The digests of the bytes that belong to some of ``tokens``."""
    children: int
    state: str
    """The eviction policy's description of the run."""


def runs_of(tree: Tree, namespace: Namespace) -> Iterator[PrefixRun]:
    """Yield the runs behind a root depth first, most recently used branches first."""
    root = tree.roots.get(namespace)
    marks = tree.marks if tree.exact else None
    for node, depth in () if root is None else descend(root):
        if node.parent is not None:
            yield PrefixRun.of(node, depth - 1, tree.describe(node), marks)


class _Survey:
    """Nodes as a walk saw them: one column of ``table`` a node, parents first.

    The rows of ``table``: its pages, those behind it, the runs and uses there, and so on: see
    `MapNode`. ``above`` are the columns of the parents, -1 for the tops. Roots have no pages. Nodes
    that were evicted before they were seen are ``gone`` and count for nothing.
    """

    def __init__(self, tops: int, nodes: list[Node], figures: list[tuple[int, ...]]) -> None:
        """``figures`` are those of `_figures`, of ``nodes``, which begin with the ``tops``."""
        columns = np.array(figures, np.int64).reshape(-1, 8).T
        ends, sizes, hits, holders, pins, beside, children, orphans = columns
        self.nodes = nodes
        self.above = np.repeat(np.arange(-1, len(nodes)), [tops, *children])
        self.gone = (orphans > 0) & (ends > 0)
        # A run that was joined with its front after the front was seen: its pages count once.
        begun = np.where(self.above >= 0, ends[self.above], ends - sizes)
        pages = np.clip(ends - begun, 0, sizes) * ~self.gone
        beside = beside * ~self.gone
        self.table = np.array(
            (pages, pages, pages > 0, holders, pins, hits * ~self.gone, beside, beside)
        )
        levels = [0, tops]
        while levels[-1] < len(nodes):
            levels.append(int(np.searchsorted(self.above, levels[-1])))
        for start, stop in reversed(list(pairwise(levels[1:]))):
            for row in _BELOW:
                np.add.at(self.table[row], self.above[start:stop], self.table[row, start:stop])

    def largest(self, count: int) -> Columns:
        """Return the columns of the ``count`` largest subtrees, in order, closed towards the tops.

        A subtree is no larger than the one that contains it, whose column comes first.
        """
        columns = np.argsort(-self.table[1], kind="stable")[:count]
        return np.sort(columns[~self.gone[columns]])

    def parent(self, at: int, *, bare: bool) -> int | None:
        """Return the id of the node above a column, None for a top; ``bare``: or for a root."""
        above = int(self.above[at])
        if above < 0 or (bare and isinstance(self.nodes[above], Root)):
            return None
        return self.nodes[above].id

    def hidden(self, shown: Columns, *, bare: bool) -> list[MapNode]:
        """Return the nodes that stand for all siblings below ``shown`` that are not among them."""
        seen = np.zeros(len(self.nodes) + 1, np.bool_)
        seen[shown] = seen[-1] = True  # the last stands for no parent
        hidden = np.flatnonzero(~seen[:-1] & seen[self.above] & ~self.gone)
        if not len(hidden):
            return []
        first = np.flatnonzero(np.diff(self.above[hidden], prepend=-2))  # of each parent
        sums = np.add.reduceat(self.table[:, hidden], first, axis=1).T.tolist()
        counts = np.diff(first, append=len(hidden)).tolist()
        nodes = []
        for at, figures, count in zip(hidden[first].tolist(), sums, counts, strict=True):
            _, pages, runs, holders, pins, hits, _, beside = figures
            above = int(self.above[at])
            number = -_HIDDEN - (0 if above < 0 else abs(self.nodes[above].id))
            parent = self.parent(at, bare=bare)
            nodes.append(
                MapNode(
                    number, parent, pages, pages, runs, holders, pins, hits, count,
                    group_pages=beside,
                )
            )  # fmt: skip
        return nodes


def _figures(node: Node) -> tuple[int, ...]:
    beside = node.group_pages if node.groups is not None else 0
    return (
        node.end, node.size, node.hits, node.holders, node.pins, beside, len(node.children),
        node.parent is None,
    )  # fmt: skip


class Inspector:
    """Maps and views of one cache. Thread safety: all methods; see the module."""

    def __init__(self, tree: Tree, lock: CacheLock, *, grouped: bool) -> None:
        """``grouped``: rows and states are kept beside the pages."""
        self._tree = tree
        self._lock = lock
        self._grouped = grouped

    def map(self, namespace: NamespaceLike | None, root: int | None, nodes: int) -> CacheMap:
        """See `PagedCache.map`."""
        nodes = whole("nodes", nodes, 1, _MOST_NODES)
        space = None if namespace is None else as_namespace(namespace)
        if root is None:
            with self._lock:
                tree = self._tree
                tops: list[Node] = [*tree.roots.values()] if space is None else tree.tops(space)
        else:
            tops = [self._find(whole("root", root))]
        survey = self._survey(tops)
        if root is not None and survey.gone[0]:
            raise _unknown(root)
        bare = root is None and space is not None  # leave out the root: the namespace is known
        roots = bare and any(isinstance(top, Root) for top in tops)
        largest = survey.largest(nodes + roots)
        _, pages, runs, *_, beside = survey.table[:, : len(tops)].sum(axis=1).tolist()
        return CacheMap(
            page_size=self._tree.page_size,
            runs=runs,
            pages=pages,
            nodes=(*self._shown(survey, largest, bare=bare), *survey.hidden(largest, bare=bare)),
            group_pages=beside,
        )

    def node(self, number: int) -> NodeView:
        """See `PagedCache.node`."""
        node = self._find(number)
        survey = self._survey([node])
        with self._lock:
            if not node.in_tree:
                raise _unknown(number)
            path: list[int] = []
            above = node.parent
            while above is not None:
                path.insert(0, above.id)
                above = above.parent
            state = self._tree.describe(node) if node.end else ""
            marks = self._tree.marks if self._tree.exact else None
            run = PrefixRun.of(node, len(path), state, marks)
            (shown,) = self._shown(survey, np.zeros(1, np.int64), bare=False)
            return NodeView(
                node=replace(shown, parent=path[-1] if path else None),
                namespace=node.namespace,
                path=tuple(path),
                start=run.start,
                page_ids=run.pages,
                tokens=run.tokens,
                extras=run.extras,
                children=run.children,
                state=state,
            )

    def _shown(self, survey: _Survey, columns: Columns, *, bare: bool) -> Iterator[MapNode]:
        for at, figures in zip(columns.tolist(), survey.table[:, columns].T.tolist(), strict=True):
            pages, below, runs, holders, pins, hits, beside, _ = figures
            node = survey.nodes[at]
            namespace = node.namespace if isinstance(node, Root) else None
            if bare and namespace is not None:
                continue
            head, key = None, b""
            if self._tree.exact:
                run = np.frombuffer(bytes(node.run[: _HEAD_TOKENS * TOKEN_BYTES]), TOKEN_DTYPE)
                head = self._tree.marks.plain(run)[0]
            else:
                key = bytes(node.run[:_KEY_BYTES])
            points: tuple[int, ...] = ()
            if self._grouped:
                with self._lock:  # pages of an evicted run may be those of another by now
                    points = node.points if node.in_tree else ()
            checkpoints = tuple(page * self._tree.page_size for page in points)
            parent = survey.parent(at, bare=bare)
            yield MapNode(
                node.id, parent, pages, below, runs, holders, pins, hits, 0, head, key, namespace,
                beside, checkpoints,
            )  # fmt: skip

    def _survey(self, tops: Sequence[Node]) -> _Survey:
        """Return the nodes from ``tops`` on, with what lies behind each."""
        figures: list[tuple[int, ...]] = []
        nodes = self._walk(tops, lambda seen: figures.extend(map(_figures, seen)))
        return _Survey(len(tops), nodes, figures)

    def _find(self, number: int) -> Node:
        """Return a node by its number, or raise `NotCached`; it may be evicted right afterwards."""
        number = whole("a node's id", number)
        with self._lock:
            tops = list(self._tree.roots.values())
        same: list[Node] = []

        def see(nodes: list[Node]) -> bool:
            same.extend(node for node in nodes if node.id == number)
            return bool(same)

        self._walk(tops, see)
        if not same:
            raise _unknown(number)
        return same[0]

    def _walk(self, tops: Sequence[Node], see: Callable[[list[Node]], bool | None]) -> list[Node]:
        """Return the nodes from ``tops`` on, level by level.

        Under the lock, ``see`` gets some at a time; the walk ends when it returns True.
        The tree may change between two steps: nodes stored meanwhile may be missing, and so may the
        new front of a run that is cut in two. Cost: about 1 µs a node, bound by memory access.
        """
        nodes, at = list(tops), 0
        step = _STEP // 8 if self._grouped else _STEP  # rows of groups are counted, page by page
        while at < len(nodes):
            if at and not self._lock.in_hook:  # a hook holds the lock in any case
                time.sleep(_PAUSE_S)
            with self._lock:
                for place in range(max(at, len(tops)), min(at + step, len(nodes))):
                    while nodes[place].parent is None and nodes[place].children:
                        # It was joined with the run behind it, its only child.
                        (nodes[place],) = nodes[place].children.values()
                seen = nodes[at : at + step]
                if see(seen):
                    break
                nodes.extend(chain.from_iterable(node.children.values() for node in seen))
            at += len(seen)
        return nodes


def _unknown(number: int) -> NotCached:
    return NotCached(f"node {number} is not cached: it was evicted, or never existed")
