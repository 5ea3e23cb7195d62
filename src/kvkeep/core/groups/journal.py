"""`GroupJournal`: rows and checkpoints that were stored or lost since the last report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.events import GroupsLost, GroupsStored, ResumePoint, frozen
from kvkeep.core.prefix.results import joined

if TYPE_CHECKING:
    from kvkeep.core.groups.stored import Checkpoint
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.tables import PageArray

__all__ = ["GroupJournal"]


class GroupJournal:
    """Collects changes of rows and checkpoints for the next event; nothing unless it is ``on``.

    Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_freed", "_lost", "_lost_rows", "_size", "_stored", "_stored_rows", "on")

    def __init__(self, layout: GroupLayout) -> None:
        self.on = False
        self._size = layout.page_size
        self._freed = 0
        self._stored: list[ResumePoint] = []
        self._lost: list[ResumePoint] = []
        self._stored_rows: list[list[PageArray]] = [[] for _ in layout.windows]
        self._lost_rows: list[list[PageArray]] = [[] for _ in layout.windows]

    def stored_rows(self, window: int, bases: PageArray) -> None:
        """Note that rows of the base pages ``bases`` were stored."""
        if self.on:
            self._stored_rows[window].append(bases)

    def stored(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint was stored."""
        if self.on:
            self._stored.append(self._point(checkpoint))

    def lost_rows(self, window: int, bases: PageArray, freed: int) -> None:
        """Note that rows of ``bases`` went, and ``freed`` pool pages with them."""
        if self.on:
            self._lost_rows[window].append(bases)
            self._freed += freed

    def lost(self, checkpoint: Checkpoint, freed: int) -> None:
        """Note that a checkpoint went, and ``freed`` pool pages with it."""
        if self.on:
            self._lost.append(self._point(checkpoint))
            self._freed += freed

    def _point(self, checkpoint: Checkpoint) -> ResumePoint:
        return ResumePoint(checkpoint.base, checkpoint.page * self._size)

    def take_stored(self, sequence: int | None) -> GroupsStored | None:
        """Return the rows and checkpoints stored for a sequence since the last call; None: none."""
        if not self._stored and not any(self._stored_rows):
            return None
        event = GroupsStored(
            sequence, tuple(self._stored), tuple(frozen(joined(rows)) for rows in self._stored_rows)
        )
        self._stored = []
        self._stored_rows = [[] for _ in self._stored_rows]
        return event

    def take_lost(self) -> GroupsLost | None:
        """Return the rows and checkpoints lost since the last call; None: none."""
        if not self._lost and not any(self._lost_rows):
            return None
        lost = GroupsLost(
            tuple(self._lost),
            tuple(frozen(joined(rows)) for rows in self._lost_rows),
            self._freed,
        )
        self._lost, self._freed = [], 0
        self._lost_rows = [[] for _ in self._lost_rows]
        return lost
