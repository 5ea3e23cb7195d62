"""The nodes of a path, what is kept along it, and where on it a request may resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvkeep.core.groups.fronts import RowFronts
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


def resumable(
    layout: GroupLayout, fronts: RowFronts, node: Node, pages: int
) -> npt.NDArray[np.bool_]:
    """Return whether all windows are complete behind each of the positions 0 … ``pages``.

    The positions are pages of the path to ``node``, which has at least so many. Cost: O(pages).
    """
    size = layout.page_size
    fine = np.ones(pages + 1, np.bool_)
    for window, spec in enumerate(layout.windows):
        ends = np.arange(1, pages + 1, dtype=np.int64) * size  # of what lacks in each page
        for one, kept, inside in kept_between(node, 0, pages):
            at = slice(one.depth + inside.start, one.depth + inside.stop)
            ends[at] = fronts.ends(kept.rows[window][inside], at.start)
        last = np.zeros(pages + 1, np.int64)  # where the last lacking token before a position ends
        np.maximum.accumulate(ends, out=last[1:])
        fine &= last <= spec.first_token_each(pages, size)
    return fine
