"""`TreeWalk` and `Survey`: a whole tree as arrays, taken in steps that hold nobody up."""

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
    """A walk over trees in steps, parents before children, all of one depth together.

    ``columns`` are the fields of nodes that are noted in passing. Between two steps the tree may
    change: what is evicted meanwhile is known to be gone if it was not looked at yet, what is
    stored meanwhile may be missing, and of a run that is split meanwhile the new front is. A front
    that is joined with its end before it was looked at is that longer run here too. Without such
    changes, or with a single step, all is as it is.

    Thread safety: `step` and `find` run under the cache's lock, all else anywhere. It keeps the
    nodes that it saw alive: let go of it soon. Cost: about 1 µs a node, as memory goes.
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
        """Nothing is left to look at."""
        return self._next == len(self.nodes)

    def step(self, most: int) -> list[Node]:
        """Look at the next nodes, ``most`` at most; these are they."""
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
        """The node with that id, if it is among the next ``most``, which are looked at."""
        for node in self.step(most):
            if node.id == number:
                return node
        return None

    def parents(self) -> Numbers:
        """The row of each node's parent, -1 for the tops; never falling."""
        assert self.done
        parents = np.full(len(self.nodes), -1)
        parents[self._tops :] = np.repeat(
            np.arange(len(self._counts)), np.array(self._counts, np.int64)
        )
        return parents

    def numbers(self, column: str) -> Numbers:
        """A column of whole numbers."""
        return np.array(self.columns[column], np.int64)

    def ids(self) -> Numbers:
        """Ids of nodes; needs ``serial`` and ``end``."""
        serials = self.numbers("serial")
        return np.where(self.numbers("end") > 0, serials, -serials)

    def gone(self) -> npt.NDArray[np.bool_]:
        """Which nodes had been evicted when they were looked at; needs ``parent`` and ``end``."""
        orphans = np.array([parent is None for parent in self.columns["parent"]], np.bool_)
        return orphans & (self.numbers("end") > 0)

    def unknown(self) -> list[int]:
        """Rows that are gone, or follow what the walk has not seen, since it came later.

        Needs ``parent``, ``end`` and ``depth``.
        """
        ends, depths, parents = self.numbers("end"), self.numbers("depth"), self.parents()
        inner = np.flatnonzero(parents >= 0)
        unknown = self.gone()
        unknown[inner] |= ends[parents[inner]] != depths[inner]
        if unknown.any():
            for row in inner.tolist():  # parents first
                unknown[row] |= unknown[parents[row]]
        rows: list[int] = np.flatnonzero(unknown).tolist()
        return rows


def _now(front: Node) -> Node:
    """The run that a front was joined into, which it still has as its child; else itself."""
    while front.parent is None and front.children:
        (front,) = front.children.values()
    return front


class Survey:
    """What a tree was like: one row a node, parents first; roots are rows without pages.

    ``parents`` are rows, -1 for the tops. Rows of what was evicted meanwhile are ``gone`` and count
    for nothing; of a run that was joined with its front after that was looked at, the front counts
    once. ``below_…`` are sums over a node and all behind it: of pages, of runs (roots are
    none), of uses; and of ``last_used`` the latest.
    """

    COLUMNS = ("parent", "end", "serial", "size", "holders", "pins", "uses", "last_used")

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
        self.below_last = walk.numbers("last_used")
        for start, stop in reversed(self._levels()):
            above = self.parents[start:stop]
            for sums in (self.below_pages, self.below_runs, self.below_uses):
                np.add.at(sums, above, sums[start:stop])
            np.maximum.at(self.below_last, above, self.below_last[start:stop])

    def _levels(self) -> list[tuple[int, int]]:
        """Rows of one depth each, but for the tops: the children of a level are the next one."""
        levels: list[tuple[int, int]] = []
        start, stop = 0, int(np.searchsorted(self.parents, 0))
        while stop < len(self.parents):
            start, stop = stop, int(np.searchsorted(self.parents, stop))
            levels.append((start, stop))
        return levels

    def largest(self, count: int) -> Numbers:
        """The rows of the ``count`` largest subtrees, rising; with each, all that it hangs from.

        A subtree is no larger than the one it is part of, whose row comes first.
        """
        rows = np.argsort(-self.below_pages, kind="stable")[:count]
        rows = rows[~self.gone[rows]]
        rows.sort()
        return rows

    def heads(self, rows: Numbers, size: int) -> list[bytes]:
        """The first symbols of some rows, ``size`` bytes of them at most; under the lock."""
        return [bytes(self.nodes[row].run[:size]) for row in rows.tolist()]

    def namespace(self, row: int) -> Namespace | None:
        """Of a row that is a root."""
        node = self.nodes[row]
        return node.namespace if isinstance(node, Root) else None
