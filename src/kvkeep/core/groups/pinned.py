"""`PinnedGroups`: what pins keep of rows and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.groups.path import up
from kvkeep.core.groups.tables import SequenceGroups

if TYPE_CHECKING:
    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.tables import PageSource
    from kvkeep.core.prefix.node import Node

__all__ = ["PinnedGroups"]


class PinnedGroups:
    """Rows and checkpoints on the paths of a cache's pins.

    Thread safety: `resumable` takes the cache's lock; the others are called under it.
    """

    __slots__ = ("_board", "_pages")

    def __init__(self, board: GroupBoard, pages: PageSource) -> None:
        self._board = board
        self._pages = pages

    def keep(self, node: Node) -> SequenceGroups:
        """Return references to what resuming on the path to ``node`` needs, for a hard pin."""
        board = self._board
        kept = SequenceGroups(board, self._pages)
        page, checkpoint = board.resume(node, node.end)
        kept.hold(node, page, checkpoint)
        kept.state = None if checkpoint is None else checkpoint.state
        return kept

    @staticmethod
    def pages(kept: SequenceGroups) -> list[int]:
        """Return the pool pages that a hard pin keeps."""
        return [page for pages in kept.references() for page in pages.tolist()]

    def mark(self, node: Node) -> None:
        """Add a checkpoint for a soft pin that ends at ``node``, if it needs no state.

        Where there is none, rows that resuming needs would be freed before anything else.
        """
        board = self._board
        if board.layout.state is None:
            page, there = board.resume(node, node.end)
            if page and there is None:
                board.add(node, page, None, "end")

    def unpinned(self, node: Node) -> None:
        """Let checkpoints go again that a pin at ``node``, which ended, kept."""
        for one in up(node):
            if one.covered:
                return
            if one.extra is not None:
                self._board.order.unpinned(one.extra.checkpoints)

    def resumable(self, node: Node) -> int:
        """Return the last position on the path to ``node`` where a request can resume, in pages."""
        with self._pages:
            return self._board.resume(node, node.end)[0] if node.in_tree else 0
