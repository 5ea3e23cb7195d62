"""Recount rows, checkpoints and references from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.groups.kept import live_pages
from kvkeep.core.prefix.node import descend

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.kept import Checkpoint, Kept
    from kvkeep.core.groups.tables import SequenceGroups
    from kvkeep.core.pages.table import PageArray
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
    loose: set[int] = set()
    for root in tree.roots.values():
        for node, _ in descend(root):
            if node.extra is not None:
                _check_node(board, node, node.extra)
                checkpoints += node.extra.checkpoints
                for rows, needs in zip(node.extra.rows, node.extra.needs, strict=True):
                    stored.append(live_pages(rows))
                    loose |= {int(row) for row in rows[(needs == 0) & (rows[:, 0] >= 0), 0]}
    stored += [one.state for one in checkpoints if one.state is not None]
    assert set(board.order) == set(checkpoints), "a checkpoint without a place in the order"
    assert len(board.order) == len(checkpoints)
    board.order.check(board.units.is_idle)
    assert board.loose.firsts() == loose, "the loose rows are not those that no checkpoint needs"
    for first in board.loose.aside():
        assert not board.units.is_idle(np.array([first])), "a row is set aside and nobody uses it"
    _check_needs(board, tree, checkpoints)
    for sequence in sequences:
        for pages in sequence.references():
            np.add.at(expected, pages, 1)
    counters = board.counters
    rows = sum(
        int(np.count_nonzero(rows[:, 0] >= 0))
        for root in tree.roots.values()
        for node, _ in descend(root)
        for rows in (() if node.extra is None else node.extra.rows)
    )
    assert rows == counters.rows_stored - counters.rows_evicted, "rows are counted wrongly"
    gone = counters.checkpoints_evicted + counters.checkpoints_replaced
    assert len(checkpoints) == counters.checkpoints_stored - gone, "a checkpoint was not counted"
    pages = np.concatenate([np.empty(0, np.int32), *stored])
    np.add.at(expected, pages, 1)
    board.units.check(pages)


def _check_node(board: GroupBoard, node: Node, kept: Kept) -> None:
    layout = board.layout
    for window, width in enumerate(layout.widths):
        rows, needs = kept.rows[window], kept.needs[window]
        assert rows.shape == (node.size, width)
        board.places.check(node, window, rows)
        assert needs.shape == (node.size,)
        missing = rows < 0
        assert (missing.all(axis=1) == missing.any(axis=1)).all(), "half a row"
        assert not (needs[missing[:, 0]]).any(), "a checkpoint needs a row that is missing"
    pages = [one.page for one in kept.checkpoints]
    assert pages == sorted(set(pages)), "two checkpoints at one position"
    for checkpoint in kept.checkpoints:
        assert checkpoint.node is node
        assert checkpoint.stored
        assert node.depth < checkpoint.page <= node.end, "a checkpoint outside its run"
        assert checkpoint.page % layout.grid == 0
        assert (checkpoint.state is None) == (layout.state is None)


def _check_needs(board: GroupBoard, tree: RunTree, checkpoints: Iterable[Checkpoint]) -> None:
    needs: dict[tuple[int, int, int], int] = {}
    for checkpoint in checkpoints:
        for window, first in board.needed(checkpoint.page):
            node: Node | None = checkpoint.node
            while node is not None and node.end > first:
                for page in range(max(first, node.depth), min(node.end, checkpoint.page)):
                    key = window, node.serial, page - node.depth
                    needs[key] = needs.get(key, 0) + 1
                node = node.parent
    for root in tree.roots.values():
        for node, _ in descend(root):
            for window, counted in enumerate(() if node.extra is None else node.extra.needs):
                for at, count in enumerate(counted.tolist()):
                    assert needs.pop((window, node.serial, at), 0) == count, "wrong needs"
    assert not needs, "a checkpoint needs rows of a node without any"
