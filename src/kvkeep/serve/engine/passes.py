"""`GroupPasses`: prepares and ends the passes of sequences that have rows and states.

    stop ──▶ prepare (mark, rows) ──▶ copies ──▶ a forward pass ──▶ ended ──▶ checkpoint

Models in which every layer keeps every token need none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.groups import GroupPlan, RowCopy, SequenceGroups, StateCopy
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.serve.engine.answer import Answer

__all__ = ["GroupPasses"]


class GroupPasses:
    """The passes of an engine over a cache with groups of layers.

    The scheduler prepares each chunk; the step makes the `copies`, in order, before it computes.
    Thread safety: none.
    """

    def __init__(self, plan: GroupPlan, layout: GroupLayout) -> None:
        self._plan = plan
        self._layout = layout
        self._size = layout.page_size
        self._grid = layout.grid * layout.page_size if layout.state is not None else 1
        self._copies: list[RowCopy | StateCopy] = []

    # --- room ------------------------------------------------------------------------------------

    @property
    def fork_pages(self) -> int:
        """Pages that a fork takes at once."""
        return self._layout.state_pages

    def row_pages(self, tokens: int) -> int:
        """Return how many pages the rows of a sequence of ``tokens`` tokens take at most."""
        base = -(-tokens // self._size)
        return self._plan.pages_for(tokens) - base - self._layout.state_pages

    # --- before a pass ---------------------------------------------------------------------------

    def resumable(self, tokens: int) -> int:
        """Return the last position, ``tokens`` at most, at which a checkpoint can be."""
        return self._layout.floor(tokens // self._size) * self._size

    def expect(self, answer: Answer, position: int) -> None:
        """Plan a checkpoint of ``answer`` at ``position``, where another prompt will go on."""
        _groups(answer).expect(position)

    def stop(self, answer: Answer, stop: int) -> int:
        """Return where a pass up to ``stop`` should end: at a checkpoint, or else on the grid."""
        ends = _groups(answer).stops if answer.request.store else ()
        if ends and ends[0] <= stop:
            return ends[0]
        if stop < answer.num_tokens and (floored := stop // self._grid * self._grid):
            return floored if floored > answer.computed else stop
        return stop

    def shorter(self, answer: Answer, stop: int) -> int | None:
        """Return a shorter pass than up to ``stop``, for less room; None: it fills one page."""
        start, size = answer.computed, self._size
        half = (start + stop) // 2 // size * size
        least = min(stop, (start // size + 1) * size)
        shorter = max(half, least)
        return shorter if shorter < stop else None

    def most_drafts(self, answer: Answer, spare: int) -> int:
        """Return how many of ``spare`` drafts the next pass may verify: none past a checkpoint."""
        if answer.computed != answer.running_sequence.num_tokens:
            return 0  # tokens before are computed again
        ends = _groups(answer).stops if answer.request.store else ()
        return min(spare, ends[0] - answer.computed - 1) if ends else spare

    def is_prepared(self, answer: Answer) -> bool:
        """Whether the pass over all tokens of its sequence is prepared."""
        return _groups(answer).position >= answer.running_sequence.num_tokens

    def prepare(self, answer: Answer, stop: int) -> None:
        """Allocate rows for the tokens up to ``stop``, and note the copies to make before.

        If there are drafts, the position before them is marked. Raises `OutOfPages`.
        """
        groups = _groups(answer)
        ends = groups.stops if answer.request.store else ()
        self._copies += groups.copies()
        if answer.drafts and (copy := groups.mark()) is not None:
            self._copies.append(copy)
        groups.reach(stop)
        self._copies += groups.copies()
        answer.checkpoint = stop if stop in ends else None

    def copies(self) -> list[RowCopy | StateCopy]:
        """Return the copies to make before the pass, in order, once."""
        copies, self._copies = self._copies, []
        return copies

    # --- after a pass ----------------------------------------------------------------------------

    def ended(self, answer: Answer) -> StateCopy | None:
        """Leave the planned checkpoint of the pass that ended; return the copy to make for it."""
        planned, answer.checkpoint = answer.checkpoint, None
        if planned is None or planned != answer.computed:
            return None
        groups = _groups(answer)
        if not groups.is_guess(planned):  # guesses are not worth writing to a store
            answer.trail.checkpoint = planned
        return groups.checkpoint(planned)

    def verified(self, answer: Answer) -> int:
        """Forget the mark before the drafts; return how many tokens are still computed."""
        groups = _groups(answer)
        groups.unmark()
        return groups.position


def _groups(answer: Answer) -> SequenceGroups:
    groups = answer.running_sequence.groups
    assert groups is not None
    return groups
