"""Making room: rows, checkpoints and pages of tokens compete for the same pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.groups.kept import live_pages
from kvkeep.core.groups.path import kept_between

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.kept import Checkpoint, Kept
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import RunTree

__all__ = ["make_room"]


def make_room(
    board: GroupBoard,
    tree: RunTree,
    pool: PagePool,
    count: int,
    forget: Callable[[PageArray], None],
) -> int:
    """Free up to ``count`` pages; return how many became free. ``forget`` gets evicted base pages.

    In this order:

    1. loose rows, which no checkpoint needs;
    2. checkpoints that are worth least (`CheckpointOrder`);
    3. the run that the policy names, from its tail: the checkpoint at its end, and the KV back to
       the one before. With states that is freed at once, as no request can resume in between, and
       so is what the runs before it have behind their last checkpoint, if no other run follows;
    4. all other checkpoints. Those of pinned prompts go last.
    """
    before = pool.num_free
    while (left := count - (pool.num_free - before)) > 0:
        if board.free_loose(left):
            continue
        if _remove(board, board.order.early()):
            continue
        evicted: list[Node] = []
        pages = tree.evict_leaf(partial(_tail, board, left, evicted))
        if pages is not None:
            if len(pages):
                forget(pages)
            if board.layout.state is not None and evicted:
                _evict_behind(tree, evicted[0], forget)
            continue
        if not _remove(board, iter(board.order), pinned=True):
            break
    return pool.num_free - before


def _tail(board: GroupBoard, most: int, parents: list[Node], leaf: Node) -> int:
    """Return how many pages to evict from the tail of ``leaf``.

    With states, all that is behind its last checkpoint, as no request can resume there; the
    checkpoint at its end is removed before. Else ``most``. Adds the parent to ``parents``, as the
    leaf no longer has one afterwards if it is evicted whole.
    """
    assert leaf.parent is not None
    parents.append(leaf.parent)
    checkpoints: list[Checkpoint] = [] if leaf.extra is None else leaf.extra.checkpoints
    if checkpoints and checkpoints[-1].page == leaf.end:
        board.remove(checkpoints[-1])
    behind = leaf.end - checkpoints[-1].page if checkpoints else leaf.size
    return behind if board.layout.state is not None else min(behind, most)


def _evict_behind(tree: RunTree, node: Node | None, forget: Callable[[PageArray], None]) -> None:
    """Evict what ``node`` and the runs before it have behind their last checkpoints.

    As long as they are leaves that nothing holds or pins. A policy may find such a run worth
    keeping, as many requests used it, but none can any more: they would need a state.
    """
    while node is not None and node.parent is not None:
        if node.children or node.holders or node.covered:
            return
        kept: Kept | None = node.extra
        checkpoints = [] if kept is None else kept.checkpoints
        behind = node.end - checkpoints[-1].page if checkpoints else node.size
        if not behind:
            return
        parent = node.parent
        forget(tree.remove(node, behind))
        if checkpoints:
            return
        node = parent


def _remove(board: GroupBoard, order: Iterator[Checkpoint], *, pinned: bool = False) -> bool:
    """Remove the first checkpoint in ``order`` that frees pages; return whether there was one.

    Those on paths with pins are skipped, or come last if ``pinned``.
    """
    last = None
    for checkpoint in order:
        if checkpoint.state is not None and not board.units.is_idle(checkpoint.state):
            continue  # a sequence copies it now, or a hard pin keeps it
        if checkpoint.state is None and not _has_idle_rows(board, checkpoint):
            continue
        if checkpoint.node.covered:
            last = last or checkpoint
            continue
        board.remove(checkpoint)
        return True
    if pinned and last is not None:
        board.remove(last)
        return True
    return False


def _has_idle_rows(board: GroupBoard, checkpoint: Checkpoint) -> bool:
    """Whether ``checkpoint`` needs any row that the tree alone uses."""
    return any(
        board.units.count_idle(live_pages(kept.rows[window][inside]))
        for window, first in board.needed(checkpoint.page)
        for _, kept, inside in kept_between(checkpoint.node, first, checkpoint.page)
    )
