"""`Inspector`: maps of a cache's tree, and single runs by number.

A walk over many runs takes the lock for a few hundred of them at a time, so that requests pass in
between. Changes made meanwhile may be missing from a map; the next map has them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.cache.views import CacheMap, MapNode, NodeView
from kvkeep.core.errors import NotCached, whole
from kvkeep.core.keys import as_namespace
from kvkeep.core.prefix.base import Survey
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.cache.core import Core
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.prefix.base import Numbers, TreeWalk
    from kvkeep.core.tokens import TokenArray

    Head = tuple[TokenArray | None, bytes]

__all__ = ["Inspector", "hidden_nodes", "shown_nodes"]

_HIDDEN = 1 << 52
"""Ids of hidden nodes are below minus this; JSON readers know integers up to 2**53."""


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
        survey.pins[rows], survey.below_uses[rows],
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
    columns = sums(survey.holders), sums(survey.pins), sums(survey.below_uses)
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


_ALL = 1 << 20
"""Runs visited in one step where the lock is not released in between."""

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

    def __init__(self, core: Core) -> None:
        self._core = core

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
        core = self._core
        bare = root is None and space is not None  # leave out the top node: the namespace is known
        rows = survey.largest(nodes + (bare and bool((survey.ids < 0).any())))
        heads: list[bytes] = []
        for start in range(0, len(rows), _STEP):
            with core:
                heads += survey.heads(rows[start : start + _STEP], _HEAD_TOKENS * TOKEN_BYTES)
        tops = survey.parents < 0
        return CacheMap(
            page_size=core.page_size,
            runs=int(survey.below_runs[tops].sum()),
            pages=int(survey.below_pages[tops].sum()),
            nodes=(
                *shown_nodes(survey, rows, self._heads(heads), bare=bare, size=core.page_size),
                *hidden_nodes(survey, rows, bare=bare),
            ),
            group_pages=int(survey.below_groups[tops].sum()),
        )

    def _heads(self, heads: list[bytes]) -> list[Head]:
        if not self._core.index.exact:
            return [(None, head[:_KEY_BYTES]) for head in heads]
        plain = self._core.marks.plain
        return [(plain(np.frombuffer(head, TOKEN_DTYPE))[0], b"") for head in heads]

    # --- one node ----------------------------------------------------------------------------

    def node(self, number: int) -> NodeView:
        """See `PagedCache.node`."""
        top = self._find(number)
        survey = Survey(self._walk(self._columns, top))
        core = self._core
        row = np.zeros(1, np.int64)
        with core:
            self._check(top, number)
            heads = survey.heads(row, _HEAD_TOKENS * TOKEN_BYTES)
            tokens: TokenArray | None = None
            extras: Extras = ()
            if core.index.exact:
                tokens, extras = core.marks.plain(np.frombuffer(bytes(top.run), TOKEN_DTYPE))
            path: list[int] = []
            above = top.parent
            while above is not None:
                path.insert(0, above.id)
                above = above.parent
            (node,) = shown_nodes(survey, row, self._heads(heads), bare=False, size=core.page_size)
            return NodeView(
                node=replace(node, parent=path[-1] if path else None),
                namespace=top.namespace,
                path=tuple(path),
                start=top.depth,
                page_ids=top.pages.copy(),
                tokens=tokens,
                extras=extras,
                children=len(top.children),
                state=core.index.policy.describe(top) if top.end else "",
            )

    def evict_family(self, top: Any) -> tuple[int, int]:
        """Drop a run and all runs behind it; return the pages freed and the pages still in use."""
        core = self._core
        with core:
            for pin in core.pins.soft_below(top):
                core.pins.end(pin)
            pages = core.drop_below(top, "asked")
            if not top.in_tree:
                return pages, 0
            rest = core.index.walk(["size", "group_pages"], top)
            while not rest.done:
                rest.step(_ALL)
            return pages, int((rest.numbers("size") + rest.numbers("group_pages")).sum())

    def _check(self, node: Any, number: int) -> None:
        """Raise `NotCached` if the node was evicted since it was found."""
        if not node.in_tree:
            raise _unknown(number)

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns of a survey of this cache."""
        return Survey.COLUMNS if self._core.groups is None else Survey.COLUMNS + Survey.GROUPS

    # --- walking -----------------------------------------------------------------------------

    def _walk(self, columns: Sequence[str], top: Any) -> TreeWalk:
        core = self._core
        step = _STEP if core.groups is None else _STEP // 8  # rows are counted, page by page
        with core:
            core.pins.expire()
            walk = core.index.walk(columns, top)
            walk.step(step)
        while not walk.done:
            self._pause()
            with core:
                walk.step(step)
        return walk

    def _pause(self) -> None:
        """Give other threads the lock; a hook holds it in any case."""
        if not self._core.in_hook:
            time.sleep(_PAUSE_S)

    def _find(self, number: int) -> Any:
        """Return a node by its number, or raise `NotCached`; it may be evicted right afterwards."""
        number = whole("a node's id", number)
        core = self._core
        with core:
            walk = core.index.walk(())
        while not walk.done:
            with core:
                node = walk.find(number, _STEP)
            if node is not None:
                return node
            self._pause()
        raise _unknown(number)


def _unknown(number: int) -> NotCached:
    return NotCached(f"node {number} is not cached: it was evicted, or never existed")
