"""`TreeWalk` and `Survey`: a whole tree as arrays, read in short steps under the lock."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.prefix.node import Root

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Node

    Numbers = npt.NDArray[np.int64]

__all__ = ["Survey", "TreeWalk"]

_children = attrgetter("children")


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


class Survey:
    """A tree as columns: one row a node, parents first; roots are rows without pages.

    ``parents`` are rows, -1 for the tops. Rows that are ``gone`` count for nothing. Of a run that
    was joined with its front after the front was visited, the front's pages count once. ``below_…``
    are sums over a node and all descendants: of pages, of runs (roots are none), of uses, of pages
    of groups. With the columns `GROUPS`, ``points`` are the checkpoints of each node; else there
    are none.
    """

    COLUMNS = ("parent", "end", "serial", "size", "holders", "pins", "uses")
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
        self.below_uses = np.where(self.gone, 0, walk.numbers("uses"))
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
            summed = [self.below_pages, self.below_runs, self.below_uses]
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
