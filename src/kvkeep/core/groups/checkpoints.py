"""`SequenceCheckpoints`: the checkpoints that one sequence plans, leaves, and publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.groups.stops import CheckpointPlan
from kvkeep.core.groups.unpublished import UnpublishedCheckpoints

if TYPE_CHECKING:
    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.checkpoint import Checkpoint
    from kvkeep.core.pages.table import PageArray

__all__ = ["SequenceCheckpoints"]


class SequenceCheckpoints:
    """The checkpoints of one sequence.

    Thread safety: none; under the cache's lock.

    Attributes:
        plan: where it should leave some.
        own: those that the tree does not have yet.
        last: the one that it used or stored last.
    """

    __slots__ = ("_board", "last", "own", "plan")

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self.plan = CheckpointPlan(board.layout)
        self.own = UnpublishedCheckpoints(board)
        self.last: Checkpoint | None = None

    def publish(self, path: PageArray, *, states: bool) -> None:
        """Store those on ``path``, of base pages; without ``states``, add some."""
        for checkpoint in self.own.publish(path):
            self._stored(checkpoint, states=states)
        if not states and len(path):
            self._mark_ends(path)

    def _mark_ends(self, path: PageArray) -> None:
        """Add checkpoints that need no state: where it was planned, and at the end."""
        for page, kind in self.plan.passed(len(path)):
            self._stored(self._board.add(path[:page], None, kind), states=False)
        if self.last is None or self.last.page < len(path):
            self._stored(self._board.add(path, None, "end"), states=False)

    def _stored(self, checkpoint: Checkpoint | None, *, states: bool) -> None:
        """Go on from ``checkpoint``; the one before it is extended, unless prompts branch there.

        Without states that one is of no further use: rows that it needs may go any time.
        """
        before = self.last
        if checkpoint is None or (before is not None and before.page >= checkpoint.page):
            return
        self.last = checkpoint
        if before is not None and before.stored and not before.branches:
            self._board.extended(before, checkpoint)
            if not states and not before.node.covered:
                self._board.remove(before, replaced=True)
