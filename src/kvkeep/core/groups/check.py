"""Recount rows, checkpoints and references from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.groups.stored import live_pages
from kvkeep.core.prefix.node import descend, path_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.stored import Checkpoint
    from kvkeep.core.groups.tables import SequenceGroups
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import RunTree

__all__ = ["check_groups"]


def check_groups(
    board: GroupBoard,
    tree: RunTree,
    sequences: Iterable[SequenceGroups],
    expected: npt.NDArray[np.int64],
) -> None:
    """Assert every invariant; add the references of all groups to ``expected``, by page."""
    stored: list[PageArray] = []
    checkpoints: list[Checkpoint] = []
    nodes: list[Node] = []
    for root in tree.roots.values():
        for node, _ in descend(root):
            if node.parent is not None:
                _check_node(board, node)
                checkpoints += node.extra.all
                nodes.append(node)
    board.check(nodes, checkpoints)
    loose: set[int] = set()
    for rows, needs in zip(board.stored_rows.rows, board.stored_rows.needs, strict=True):
        stored.append(live_pages(rows))
        loose |= {int(row) for row in rows[(needs == 0) & (rows[:, 0] >= 0), 0]}
    stored += [one.state for one in checkpoints if one.state is not None]
    assert set(board.order) == set(checkpoints), "a checkpoint without a place in the order"
    assert len(board.order) == len(checkpoints)
    board.order.check(board.units.is_idle)
    assert board.loose.firsts() == loose, "the loose rows are not those that no checkpoint needs"
    for first in board.loose.aside():
        assert not board.units.is_idle(np.array([first])), "a row is set aside and nobody uses it"
    _check_needs(board, checkpoints)
    for sequence in sequences:
        for pages in sequence.references():
            np.add.at(expected, pages, 1)
    counters = board.counters
    count = sum(int(np.count_nonzero(rows[:, 0] >= 0)) for rows in board.stored_rows.rows)
    assert count == counters.rows_stored - counters.rows_evicted, "rows are counted wrongly"
    gone = counters.checkpoints_evicted + counters.checkpoints_replaced
    assert len(checkpoints) == counters.checkpoints_stored - gone, "a checkpoint was not counted"
    pages = np.concatenate([np.empty(0, np.int32), *stored])
    np.add.at(expected, pages, 1)
    board.units.check(pages)


def _check_node(board: GroupBoard, node: Node) -> None:
    layout, checkpoints = board.layout, node.extra.all
    pages = [each.page for each in checkpoints]
    assert pages == sorted(set(pages)), "two checkpoints at one position"
    for checkpoint in checkpoints:
        assert checkpoint.node is node
        assert checkpoint.stored
        assert node.depth < checkpoint.page <= node.end, "a checkpoint outside its run"
        assert checkpoint.page % layout.grid == 0
        assert (checkpoint.state is None) == (layout.state is None)
    path: list[Node] = []
    above: Node | None = node
    while above is not None:
        path.append(above)
        above = above.parent
    every = np.concatenate([each.pages for each in path[::-1]])
    for start in {0, node.depth, node.end // 2}:
        assert (path_pages(node, start, node.end) == every[start:]).all(), "wrong pages of a path"


def _check_needs(board: GroupBoard, checkpoints: Iterable[Checkpoint]) -> None:
    expected = [np.zeros_like(needs) for needs in board.stored_rows.needs]
    for checkpoint in checkpoints:
        path = path_pages(checkpoint.node, 0, checkpoint.page)
        for window, first in board.needed(checkpoint.page):
            expected[window][path[first:]] += 1
    for needs, right in zip(board.stored_rows.needs, expected, strict=True):
        assert (needs == right).all(), "wrong needs"
