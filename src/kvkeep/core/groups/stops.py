"""`CheckpointPlan`: where a sequence should leave checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from kvkeep.core.groups.checkpoint import CheckpointKind
    from kvkeep.core.pages.layout import GroupLayout

__all__ = ["CheckpointPlan"]


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
