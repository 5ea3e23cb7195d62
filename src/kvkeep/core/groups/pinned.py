"""`PinnedGroups`: what pins keep of rows and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.groups.tables import SequenceGroups
from kvkeep.core.prefix.node import path_pages

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
        path = path_pages(node, 0, node.end)
        page, checkpoint = board.resume(path)
        kept.hold(path[:page], checkpoint)
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
            path = path_pages(node, 0, node.end)
            page, there = board.resume(path)
            if page and there is None:
                board.add(path[:page], None, "end")

    def unpinned(self, node: Node) -> None:
        """Let checkpoints go again that a pin at ``node``, which ended, kept."""
        above: Node | None = node
        while above is not None and above.parent is not None and not above.covered:
            self._board.order.unpinned(above.extra.all)
            above = above.parent

    def resumable(self, node: Node) -> int:
        """Return the last position on the path to ``node`` where a request can resume, in pages."""
        with self._pages:
            return self._board.resume(path_pages(node, 0, node.end))[0] if node.in_tree else 0
