"""`Inspector`: maps of a cache's tree, and single runs by number.

A walk over many runs takes the lock for a few hundred of them at a time, so that requests pass in
between. Changes made meanwhile may be missing from a map; the next map has them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.cache.views import CacheMap, MapNode, NodeView
from kvkeep.core.errors import NotCached, whole
from kvkeep.core.keys import as_namespace
from kvkeep.core.prefix.node import Node, Root, descend
from kvkeep.core.prefix.render import PrefixRun
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from kvkeep.core.events import CacheLock
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.prefix import Tree
    from kvkeep.core.tokens import TokenArray

    Numbers = npt.NDArray[np.int64]
    Head = tuple[TokenArray | None, bytes]

__all__ = ["Inspector", "Survey", "TreeWalk", "runs_of", "walk_tree"]

_children = attrgetter("children")

_HIDDEN = 1 << 52
"""Ids of hidden nodes are below minus this; JSON readers know integers up to 2**53."""


class TreeWalk:
    """A walk over trees in steps, parents before children, level by level.

    ``columns`` names the node fields to record. The tree may change between two steps: nodes
    evicted before they are visited count as `gone`, nodes stored meanwhile may be missing, and so
    may the new front of a run that is split. A front that is joined with its end before the visit
    appears as the joined run. Without such changes, or with a single step, the result is exact.

    Thread safety: `step` and `find` run under the cache's lock, everything else anywhere. The walk
    keeps visited nodes alive: drop it soon. Cost: about 1 µs a node, bound by memory access.
    """

    def __init__(self, tops: list[Node], *columns: str) -> None:
        self.nodes = list(tops)
        self.columns: dict[str, list[Any]] = {name: [] for name in columns}
        self._readers = [(self.columns[name], attrgetter(name)) for name in columns]
        self._tops = len(tops)
        self._next = 0
        self._counts: list[int] = []  # children of each node

    @property
    def done(self) -> bool:
        """Whether all nodes were visited."""
        return self._next == len(self.nodes)

    def step(self, most: int) -> list[Node]:
        """Visit and return the next nodes, ``most`` at most."""
        start = self._next
        chunk = self.nodes[start : start + most]
        for place in range(max(start, self._tops), start + len(chunk)):
            if self.nodes[place].parent is None:
                self.nodes[place] = chunk[place - start] = _now(self.nodes[place])
        self._next += len(chunk)
        for noted, read in self._readers:
            noted.extend(map(read, chunk))
        below = list(map(_children, chunk))
        self._counts.extend(map(len, below))
        self.nodes.extend(chain.from_iterable(map(dict.values, filter(None, below))))
        return chunk

    def find(self, number: int, most: int) -> Node | None:
        """Visit the next nodes, ``most`` at most; return the one with id ``number`` if it is among
        them.
        """
        for node in self.step(most):
            if node.id == number:
                return node
        return None

    def parents(self) -> Numbers:
        """Return the row of each node's parent, -1 for the tops; never decreasing."""
        assert self.done
        parents = np.full(len(self.nodes), -1)
        parents[self._tops :] = np.repeat(
            np.arange(len(self._counts)), np.array(self._counts, np.int64)
        )
        return parents

    def numbers(self, column: str) -> Numbers:
        """Return a recorded column of integers as an array."""
        return np.array(self.columns[column], np.int64)

    def ids(self) -> Numbers:
        """Return the node ids; needs the columns ``serial`` and ``end``."""
        serials = self.numbers("serial")
        return np.where(self.numbers("end") > 0, serials, -serials)

    def gone(self) -> npt.NDArray[np.bool_]:
        """Return which nodes were evicted when visited; needs ``parent`` and ``end``."""
        orphans = np.array([parent is None for parent in self.columns["parent"]], np.bool_)
        return orphans & (self.numbers("end") > 0)


def _now(front: Node) -> Node:
    """Return the run that ``front`` was joined into, still its only child; else ``front``."""
    while front.parent is None and front.children:
        (front,) = front.children.values()
    return front


def walk_tree(
    tree: Tree, columns: Iterable[str] = (), top: Namespace | Node | None = None
) -> TreeWalk:
    """Return a walk over all nodes, those of one namespace, or a node and its descendants."""
    if top is None:
        return TreeWalk([*tree.roots.values()], *columns)
    return TreeWalk([top] if isinstance(top, Node) else tree.tops(top), *columns)


def runs_of(tree: Tree, namespace: Namespace) -> Iterator[PrefixRun]:
    """Yield the runs behind a root depth first, most recently used branches first."""
    root = tree.roots.get(namespace)
    marks = tree.marks if tree.exact else None
    for node, depth in () if root is None else descend(root):
        if node.parent is not None:
            yield PrefixRun.of(node, depth - 1, tree.describe(node), marks)


class Survey:
    """A tree as columns: one row a node, parents first; roots are rows without pages.

    ``parents`` are rows, -1 for the tops. Rows that are ``gone`` count for nothing. Of a run that
    was joined with its front after the front was visited, the front's pages count once. ``below_…``
    are sums over a node and all descendants: of pages, of runs (roots are none), of uses, of pages
    of groups. With the columns `GROUPS`, ``points`` are the checkpoints of each node; else there
    are none.
    """

    COLUMNS = ("parent", "end", "serial", "size", "holders", "pins", "hits")
    GROUPS = ("group_pages", "points")

    def __init__(self, walk: TreeWalk) -> None:
        self.nodes = walk.nodes
        self.parents = walk.parents()
        self.gone = walk.gone()
        self.ids = walk.ids()
        self.holders = walk.numbers("holders")
        self.pins = walk.numbers("pins")
        ends, inner = walk.numbers("end"), self.parents >= 0
        begun = np.where(inner, ends[self.parents], ends - walk.numbers("size"))
        self.sizes = np.where(self.gone, 0, np.clip(ends - begun, 0, walk.numbers("size")))
        self.below_pages = self.sizes.copy()
        self.below_runs = (self.sizes > 0).astype(np.int64)
        self.below_hits = np.where(self.gone, 0, walk.numbers("hits"))
        self.points: list[tuple[int, ...]] | None = walk.columns.get("points")
        grouped = self.points is not None
        self.group_pages = (
            np.where(self.gone, 0, walk.numbers("group_pages"))
            if grouped
            else np.zeros_like(self.sizes)
        )
        self.below_groups = self.group_pages.copy()
        for start, stop in reversed(self._levels()):
            above = self.parents[start:stop]
            summed = [self.below_pages, self.below_runs, self.below_hits]
            for sums in [*summed, self.below_groups] if grouped else summed:
                np.add.at(sums, above, sums[start:stop])

    def _levels(self) -> list[tuple[int, int]]:
        """Return the rows of each level below the tops, as (start, stop)."""
        levels: list[tuple[int, int]] = []
        start, stop = 0, int(np.searchsorted(self.parents, 0))
        while stop < len(self.parents):
            start, stop = stop, int(np.searchsorted(self.parents, stop))
            levels.append((start, stop))
        return levels

    def largest(self, count: int) -> Numbers:
        """Return the rows of the ``count`` largest subtrees, ascending, closed towards the tops.

        A subtree is no larger than the one that contains it, whose row comes first.
        """
        rows = np.argsort(-self.below_pages, kind="stable")[:count]
        rows = rows[~self.gone[rows]]
        rows.sort()
        return rows

    def heads(self, rows: Numbers, size: int) -> list[bytes]:
        """Return the first ``size`` bytes of symbols of some rows; call it under the lock."""
        return [bytes(self.nodes[row].run[:size]) for row in rows.tolist()]

    def namespace(self, row: int) -> Namespace | None:
        """Return the namespace of a row that is a root; None for other rows."""
        node = self.nodes[row]
        return node.namespace if isinstance(node, Root) else None


def shown_nodes(
    survey: Survey,
    rows: Numbers,
    heads: Sequence[Head],
    *,
    bare: bool,
    size: int,
) -> list[MapNode]:
    """Return a node for each of ``rows``; with ``bare``, the namespace's own is left out.

    ``size`` is that of a page.
    With each row, ``rows`` has the row above it. Rows without parent are tops.
    """
    ids = survey.ids
    above = survey.parents[rows]
    nodes: list[MapNode] = []
    columns: tuple[Any, ...] = (
        rows, ids[rows], np.append(ids, 0)[above], above, survey.sizes[rows],
        survey.below_pages[rows], survey.below_runs[rows], survey.holders[rows],
        survey.pins[rows], survey.below_hits[rows],
        survey.group_pages[rows],
    )  # fmt: skip
    points = survey.points
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    for (row, own, parent, place, *counts), (head, key) in zip(numbers, heads, strict=True):
        if bare and own < 0:
            continue
        pages, below_pages, below_runs, holders, pins, hits, beside = counts
        nodes.append(
            MapNode(
                id=own,
                parent=None if place < 0 or (bare and parent < 0) else parent,
                pages=pages,
                below_pages=below_pages,
                below_runs=below_runs,
                holders=holders,
                pins=pins,
                hits=hits,
                head=head,
                key=key,
                namespace=survey.namespace(row),
                group_pages=beside,
                checkpoints=() if points is None else tuple(page * size for page in points[row]),
            )
        )
    return nodes


def hidden_nodes(survey: Survey, rows: Numbers, *, bare: bool) -> list[MapNode]:
    """Return a hidden node for each of ``rows`` (and the top) with children that are not shown."""
    parents = survey.parents
    shown = np.zeros(len(parents) + 1, np.bool_)
    shown[rows] = shown[-1] = True  # the last stands for "no parent"
    hidden = np.flatnonzero(~shown[:-1] & shown[parents] & ~survey.gone)
    above, groups = np.unique(parents[hidden], return_inverse=True)

    def sums(column: Numbers) -> list[int]:
        totals = np.zeros(len(above), np.int64)
        np.add.at(totals, groups, column[hidden])
        return totals.tolist()

    ids = survey.ids
    pages, runs = sums(survey.below_pages), sums(survey.below_runs)
    beside = sums(survey.below_groups)
    columns = sums(survey.holders), sums(survey.pins), sums(survey.below_hits)
    counts = np.bincount(groups, minlength=len(above)).tolist()
    return [
        MapNode(
            id=-_HIDDEN - (abs(int(ids[place])) if place >= 0 else 0),
            parent=None if place < 0 or (bare and ids[place] < 0) else int(ids[place]),
            pages=pages[i],
            below_pages=pages[i],
            below_runs=runs[i],
            holders=columns[0][i],
            pins=columns[1][i],
            hits=columns[2][i],
            count=counts[i],
            group_pages=beside[i],
        )
        for i, place in enumerate(above.tolist())
    ]


_STEP = 512
"""Runs visited under the lock at a time, about half a millisecond: a step of an engine takes the
lock many times, and may wait that long each time."""

_PAUSE_S = 0.0005
"""Pause between two steps, so that a waiting thread gets the lock."""

_HEAD_TOKENS = 80
_KEY_BYTES = 4
_MOST_NODES = 10_000


class Inspector:
    """Maps and views of one cache. Thread safety: all methods; see the module."""

    def __init__(self, tree: Tree, lock: CacheLock, *, grouped: bool) -> None:
        """``grouped``: rows and states are kept beside the pages."""
        self._tree = tree
        self._lock = lock
        self._grouped = grouped

    # --- maps --------------------------------------------------------------------------------

    def map(
        self,
        namespace: NamespaceLike | None,
        root: int | None,
        nodes: int,
    ) -> CacheMap:
        """See `PagedCache.map`."""
        nodes = whole("nodes", nodes, 1, _MOST_NODES)
        root = None if root is None else whole("root", root)
        space = None if namespace is None else as_namespace(namespace)
        survey = Survey(self._walk(self._columns, space if root is None else self._find(root)))
        if root is not None and survey.gone[0]:
            raise _unknown(root)
        bare = root is None and space is not None  # leave out the top node: the namespace is known
        rows = survey.largest(nodes + (bare and bool((survey.ids < 0).any())))
        heads: list[bytes] = []
        for start in range(0, len(rows), _STEP):
            with self._lock:
                heads += survey.heads(rows[start : start + _STEP], _HEAD_TOKENS * TOKEN_BYTES)
        tops = survey.parents < 0
        return CacheMap(
            page_size=self._tree.page_size,
            runs=int(survey.below_runs[tops].sum()),
            pages=int(survey.below_pages[tops].sum()),
            nodes=(
                *shown_nodes(
                    survey, rows, self._heads(heads), bare=bare, size=self._tree.page_size
                ),
                *hidden_nodes(survey, rows, bare=bare),
            ),
            group_pages=int(survey.below_groups[tops].sum()),
        )

    def _heads(self, heads: list[bytes]) -> list[Head]:
        if not self._tree.exact:
            return [(None, head[:_KEY_BYTES]) for head in heads]
        plain = self._tree.marks.plain
        return [(plain(np.frombuffer(head, TOKEN_DTYPE))[0], b"") for head in heads]

    # --- one node ----------------------------------------------------------------------------

    def node(self, number: int) -> NodeView:
        """See `PagedCache.node`."""
        top = self._find(number)
        survey = Survey(self._walk(self._columns, top))
        row = np.zeros(1, np.int64)
        with self._lock:
            self._check(top, number)
            heads = survey.heads(row, _HEAD_TOKENS * TOKEN_BYTES)
            tokens: TokenArray | None = None
            extras: Extras = ()
            if self._tree.exact:
                tokens, extras = self._tree.marks.plain(np.frombuffer(bytes(top.run), TOKEN_DTYPE))
            path: list[int] = []
            above = top.parent
            while above is not None:
                path.insert(0, above.id)
                above = above.parent
            (node,) = shown_nodes(
                survey, row, self._heads(heads), bare=False, size=self._tree.page_size
            )
            return NodeView(
                node=replace(node, parent=path[-1] if path else None),
                namespace=top.namespace,
                path=tuple(path),
                start=top.depth,
                page_ids=top.pages.copy(),
                tokens=tokens,
                extras=extras,
                children=len(top.children),
                state=self._tree.describe(top) if top.end else "",
            )

    def _check(self, node: Any, number: int) -> None:
        """Raise `NotCached` if the node was evicted since it was found."""
        if not node.in_tree:
            raise _unknown(number)

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns of a survey of this cache."""
        return Survey.COLUMNS + Survey.GROUPS if self._grouped else Survey.COLUMNS

    # --- walking -----------------------------------------------------------------------------

    def _walk(self, columns: Sequence[str], top: Any) -> TreeWalk:
        step = _STEP // 8 if self._grouped else _STEP  # rows are counted, page by page
        with self._lock:
            walk = walk_tree(self._tree, columns, top)
            walk.step(step)
        while not walk.done:
            self._pause()
            with self._lock:
                walk.step(step)
        return walk

    def _pause(self) -> None:
        """Give other threads the lock; a hook holds it in any case."""
        if not self._lock.in_hook:
            time.sleep(_PAUSE_S)

    def _find(self, number: int) -> Any:
        """Return a node by its number, or raise `NotCached`; it may be evicted right afterwards."""
        number = whole("a node's id", number)
        with self._lock:
            walk = walk_tree(self._tree)
        while not walk.done:
            with self._lock:
                node = walk.find(number, _STEP)
            if node is not None:
                return node
            self._pause()
        raise _unknown(number)


def _unknown(number: int) -> NotCached:
    return NotCached(f"node {number} is not cached: it was evicted, or never existed")
