"""`UnpublishedCheckpoints`: checkpoints of one sequence that the tree does not have yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.groups.stored import live_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.checkpoint import Checkpoint, CheckpointKind
    from kvkeep.core.groups.stored import Rows
    from kvkeep.core.pages.table import PageArray

__all__ = ["UnpublishedCheckpoints"]


@dataclass(slots=True, eq=False)
class _Unpublished:
    page: int
    kind: CheckpointKind
    state: PageArray
    rows: list[Rows]  # of each window, up to `page`


class UnpublishedCheckpoints:
    """Checkpoints with references to their states and to the rows that they need.

    The rows may leave the windows of the sequence before the checkpoints are published.

    Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_board", "_waiting")

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._waiting: list[_Unpublished] = []

    def __contains__(self, page: object) -> bool:
        return any(one.page == page for one in self._waiting)

    def add(self, page: int, kind: CheckpointKind, state: PageArray, rows: list[Rows]) -> None:
        """Add a checkpoint at ``page``; takes over the reference to ``state``."""
        for part in rows:
            self._board.units.retain(live_pages(part))
        self._waiting.append(_Unpublished(page, kind, state, rows))

    def publish(self, path: PageArray) -> list[Checkpoint | None]:
        """Store those on ``path``, of base pages; return them, None for one without rows."""
        stored: list[Checkpoint | None] = []
        for one in [one for one in self._waiting if one.page <= len(path)]:
            needed = self._board.needed(one.page)
            for rows, (window, first) in zip(one.rows, needed, strict=True):
                self._board.store(window, path[first : one.page], rows)
            stored.append(self._board.add(path[: one.page], one.state, one.kind))
            self._drop(one)
        return stored

    def cut(self, page: int) -> None:
        """Drop those behind ``page``."""
        for one in [one for one in self._waiting if one.page > page]:
            self._drop(one)

    def close(self) -> None:
        """Drop all."""
        self.cut(0)

    def _drop(self, one: _Unpublished) -> None:
        self._waiting.remove(one)
        for rows in one.rows:
            self._board.units.release(live_pages(rows))
        self._board.units.release(one.state)

    def references(self) -> Iterator[PageArray]:
        """Yield the pages of all references, for `check`."""
        for one in self._waiting:
            yield one.state
            yield from (live_pages(rows) for rows in one.rows)
