"""Making room: rows, checkpoints and pages of tokens compete for the same pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.stored import Checkpoint
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.tables import PageArray
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
    4. all other checkpoints;
    5. runs and checkpoints of prompts with soft pins.
    """
    before = pool.num_free
    while (left := count - (pool.num_free - before)) > 0:
        if board.free_loose(left) or _remove(board, board.order.early()):
            continue
        evicted: list[Node] = []
        choose = partial(_tail, board, left, evicted)
        pages = tree.evict_leaf(choose)
        if pages is None and _remove(board, board.order.late()):
            continue
        if pages is None:
            pages = tree.evict_pinned_leaf(choose)
        if pages is not None:
            if len(pages):
                forget(pages)
            if board.layout.state is not None and evicted:
                _evict_behind(tree, evicted[0], forget)
            continue
        if not _remove(board, board.order.pinned(), pinned=True):
            break
    return pool.num_free - before


def _tail(board: GroupBoard, most: int, parents: list[Node], leaf: Node, portion: int) -> int:
    """Return how many pages to evict from the tail of ``leaf``.

    With states, all that is behind its last checkpoint, as no request can resume there; the
    checkpoint at its end is removed before. Else ``most``, within the policy's ``portion``. Adds
    the parent to ``parents``, as the leaf no longer has one afterwards if it is evicted whole.
    """
    assert leaf.parent is not None
    parents.append(leaf.parent)
    if leaf.extra.last == leaf.end:
        board.remove(leaf.extra.all[-1])
    behind: int = leaf.end - leaf.extra.last
    return behind if board.layout.state is not None else min(behind, most, portion)


def _evict_behind(tree: RunTree, node: Node | None, forget: Callable[[PageArray], None]) -> None:
    """Evict what ``node`` and the runs before it have behind their last checkpoints.

    As long as they are leaves that nothing holds or pins. A policy may find such a run worth
    keeping, as many requests used it, but none can any more: they would need a state.
    """
    while node is not None and node.parent is not None:
        if node.children or node.holders or node.covered:
            return
        behind = node.end - node.extra.last
        if not behind:
            return
        parent = node.parent if behind == node.size else None
        forget(tree.remove(node, behind))
        node = parent


def _remove(board: GroupBoard, order: Iterator[Checkpoint], *, pinned: bool = False) -> bool:
    """Remove the first checkpoint in ``order`` that frees pages; return whether there was one.

    Those met before it are set aside: on paths with pins unless ``pinned``, or with states in use.
    """
    covered: list[Checkpoint] = []
    used: list[Checkpoint] = []
    found = None
    for checkpoint in order:
        if checkpoint.node.covered and not pinned:
            covered.append(checkpoint)
        elif board.frees(checkpoint):
            found = checkpoint
            break
        elif checkpoint.state is not None:
            used.append(checkpoint)
    board.order.set_aside(covered, used)
    if found is not None:
        board.remove(found)
    return found is not None
