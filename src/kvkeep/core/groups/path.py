"""The nodes of a path, what is kept along it, and where on it a request may resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvkeep.core.groups.kept import Kept
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.prefix.node import Node

__all__ = ["kept_between", "resumable", "up"]


def up(node: Node | None) -> Iterator[Node]:
    """Yield ``node`` and all nodes before it, except the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def kept_between(node: Node, start: int, stop: int) -> Iterator[tuple[Node, Kept, slice]]:
    """Yield the nodes of the path to ``node`` that have pages ``start`` … ``stop``, last first.

    With what they keep, and the pages inside each. Nodes of which nothing is kept are left out.
    """
    for one in up(node):
        if one.end <= start:
            return
        if one.extra is not None and one.depth < stop:
            inside = slice(max(start, one.depth) - one.depth, min(stop, one.end) - one.depth)
            yield one, one.extra, inside


def resumable(layout: GroupLayout, node: Node, pages: int) -> npt.NDArray[np.bool_]:
    """Return whether all windows are complete behind each of the positions 0 … ``pages``.

    The positions are pages of the path to ``node``, which has at least so many. Cost: O(pages).
    """
    fine = np.ones(pages + 1, np.bool_)
    for window, spec in enumerate(layout.windows):
        missing = np.ones(pages, np.bool_)
        for one, kept, inside in kept_between(node, 0, pages):
            at = slice(one.depth + inside.start, one.depth + inside.stop)
            missing[at] = kept.rows[window][inside, 0] < 0
        last = np.full(pages + 1, -1, np.int64)  # the last missing page before each position
        np.maximum.accumulate(np.where(missing, np.arange(pages), -1), out=last[1:])
        fine &= last < spec.first_needed_each(pages, layout.page_size)
    return fine
