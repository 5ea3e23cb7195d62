"""`SequenceCheckpoints`: the checkpoints that one sequence plans, leaves, and publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.groups.stored import live_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.stored import Checkpoint, CheckpointKind, Rows
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.tables import PageArray

__all__ = ["CheckpointPlan", "SequenceCheckpoints", "UnpublishedCheckpoints"]


class CheckpointPlan:
    """Pages of planned checkpoints, all on the grid.

    A prompt gets one where it leaves what is cached (a branch), and one at its end. In a long new
    part, guesses at its quarters serve prompts that will branch there. An answer gets one every
    `GroupLayout.answer_tokens`.

    The next turn of a conversation leaves the cached prefix where the last turn ended. This place
    is kept as a branch, too: evicting it first costs 0.05 points of the hit rate on agent sessions
    (`benchmarks/groups.py`).

    Thread safety: none.
    """

    __slots__ = ("_kinds", "_last", "_layout")

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout
        self._kinds: dict[int, CheckpointKind] = {}
        self._last = 0  # the last page that was planned

    def prompt(self, start: int, found: int, tokens: int) -> None:
        """Plan for a prompt that begins at page ``start``, of which ``found`` pages are cached."""
        floor, size = self._layout.floor, self._layout.page_size
        end = floor((tokens - 1) // size)
        new = max(start, found)
        kinds: dict[int, CheckpointKind] = {}
        if (end - new) * size >= self._layout.guess_tokens:
            for part in (1, 2, 3):
                kinds[floor(new + (end - new) * part // 4)] = "guess"
        kinds[end] = "end"
        kinds[floor(found)] = "branch"
        self._kinds = {page: kind for page, kind in kinds.items() if page > start}
        self._last = max(start, end)

    def stops(self, position: int) -> list[int]:
        """Return the positions planned behind token ``position``, rising; one of the answer."""
        size, grid = self._layout.page_size, self._layout.grid
        planned = sorted(page * size for page in self._kinds if page * size > position)
        step = -(-self._layout.answer_tokens // (size * grid)) * grid * size
        passed = max(0, position - self._last * size) // step + 1
        return [*planned, self._last * size + passed * step]

    def branch(self, page: int, position: int) -> None:
        """Plan a branch at ``page``, if it lies behind token ``position`` in the prompt."""
        if position < page * self._layout.page_size and page <= self._last:
            self._kinds[page] = "branch"

    def is_guess(self, page: int) -> bool:
        """Whether a checkpoint that is planned at ``page`` is a mere guess."""
        return self._kinds.get(page) == "guess"

    def reached(self, page: int) -> CheckpointKind:
        """Return the kind of the checkpoint at ``page``, which is no longer planned."""
        return self._kinds.pop(page, "end")

    def passed(self, page: int) -> list[tuple[int, CheckpointKind]]:
        """Return the planned pages up to ``page``, rising, which end with it; no guesses."""
        done = sorted(at for at in self._kinds if at <= page)
        return [(at, kind) for at in done if (kind := self._kinds.pop(at)) != "guess"]

    def cut(self, tokens: int) -> None:
        """Forget what is planned behind token ``tokens``."""
        pages = tokens // self._layout.page_size
        self._kinds = {page: kind for page, kind in self._kinds.items() if page <= pages}
        self._last = min(self._last, self._layout.floor(pages))

    def fork(self) -> Self:
        """Return a plan of its own for a fork."""
        other = type(self)(self._layout)
        other._kinds, other._last = self._kinds.copy(), self._last
        return other


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
