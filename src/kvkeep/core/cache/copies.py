"""`PendingCopies`: the page copies of one sequence that the engine has still to make, its state."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.cache.core import Claim, Core
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.pages import PageCopy
    from kvkeep.core.pages.tables import PageArray

__all__ = ["STEPS", "Forks", "PendingCopies", "SequenceState", "permit"]


class Forks:
    """Groups of sequences with the same first unpublished page, two or more in each.

    A sequence reports when that page changes. Thread safety: none; under the cache's lock. Cost: a
    dictionary lookup a call, and one for each member when a group is taken or made.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[int, dict[Sequence, None]] = {}

    def __bool__(self) -> bool:
        """Whether any sequences share an unpublished page."""
        return bool(self._groups)

    def join(self, page: int, sequence: Sequence, other: Sequence) -> None:
        """Note that ``other`` was forked from ``sequence``; ``page`` is the first unpublished."""
        self._groups.setdefault(page, {sequence: None})[other] = None

    def leave(self, page: int, sequence: Sequence) -> None:
        """Note that ``page`` is no longer the first unpublished page of ``sequence``."""
        group = self._groups.get(page)
        if group is not None:
            del group[sequence]
            if len(group) == 1:
                del self._groups[page]

    def take(self, page: int) -> Iterable[Sequence]:
        """Remove and return the group of ``page``, which is being published; then `regroup` it."""
        return self._groups.pop(page, ())

    def regroup(self, sequences: Iterable[Sequence]) -> None:
        """Group sequences that shared a page by their present first unpublished pages."""
        groups: dict[int, dict[Sequence, None]] = {}
        for sequence in sequences:
            page = sequence.first_unpublished
            if page is not None:
                groups.setdefault(page, {})[sequence] = None
        self._groups.update((page, group) for page, group in groups.items() if len(group) > 1)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the groups are those of all running ``sequences``."""
        found: dict[int, set[Sequence]] = {}
        for sequence in sequences:
            page = sequence.first_unpublished
            if page is not None:
                found.setdefault(page, set()).add(sequence)
        shared = {page: group for page, group in found.items() if len(group) > 1}
        assert shared == {page: set(group) for page, group in self._groups.items()}
        pages: dict[int, int] = {}  # each unpublished page → first page of its group
        for first, group in found.items():
            for sequence in group:
                for page in sequence.unpublished:
                    assert pages.setdefault(page, first) == first, "a page in two groups"


class PendingCopies:
    """Claims that wait to be taken, and claims that the engine took and may be copying.

    Thread safety: none; under the cache's lock.

    Attributes:
        state: of the sequence: COPYING while claims wait, else READY. The sequence sets CLOSED.
    """

    __slots__ = ("_core", "_made", "state", "waiting")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.waiting: list[Claim] = []
        """Claims whose copies were not taken yet, in the order in which to make them."""
        self._made: list[Claim] = []
        self.state = SequenceState.READY

    def claims(self) -> list[Claim]:
        """Return all claims."""
        return self.waiting + self._made

    def add(self, copy: PageCopy, hold: Any) -> None:
        """Claim the source of ``copy``; takes over the caller's reference and hold."""
        self.waiting.append(self._core.claim(copy, hold, self))
        self.state = SequenceState.COPYING

    def take(self) -> list[PageCopy]:
        """Return the waiting copies; those taken before are made."""
        self.finish()
        self._made, self.waiting = self.waiting, []
        self.state = SequenceState.READY
        for claim in self._made:
            if len(claim.sharers) > 1:
                # A second copy could overwrite what was computed on the page after the first.
                for other in claim.sharers:
                    if other is not self:
                        other.waiting.remove(claim)
                        other._update()
                claim.sharers = {self: None}
        return [claim.copy for claim in self._made]

    def finish(self) -> None:
        """Release the source pages of all copies taken so far; the caller has made them."""
        if self._made:
            self._core.unclaim(self._made, self)
            self._made = []

    def drop_needless(self, unpublished: PageArray) -> None:
        """Drop waiting claims whose target is not among the ``unpublished`` pages of the sequence.

        Such a target left the table or was published, and so is complete.
        """
        if not self.waiting:
            return
        wanted = set(unpublished.tolist())
        kept: list[Claim] = []
        for claim in reversed(self.waiting):
            if claim.copy.dst in wanted:
                wanted.add(claim.copy.src)
                kept.append(claim)
            else:
                self._core.unclaim([claim], self)
        self.waiting = kept[::-1]
        self._update()

    def _update(self) -> None:
        self.state = SequenceState.COPYING if self.waiting else SequenceState.READY

    def share_with(self, fork: PendingCopies) -> None:
        """Let a fork wait for the same copies."""
        fork.waiting, fork.state = self.waiting.copy(), self.state
        for claim in self.waiting:
            claim.sharers[fork] = None

    def check(self) -> None:
        """Assert that the state is that of the waiting claims."""
        assert self.state is (SequenceState.COPYING if self.waiting else SequenceState.READY)

    def end(self) -> None:
        """End all claims."""
        if self.waiting or self._made:
            self._core.unclaim(self.claims(), self)
            self.waiting, self._made = [], []


class SequenceState(Enum):
    """State of a sequence."""

    COPYING = auto()
    READY = auto()
    CLOSED = auto()


STEPS: dict[SequenceState, dict[str, frozenset[SequenceState]]] = {
    SequenceState.COPYING: {
        "copies": frozenset({SequenceState.READY}),
        "append": frozenset({SequenceState.COPYING}),
        "fork": frozenset({SequenceState.COPYING}),
        "truncate": frozenset({SequenceState.COPYING, SequenceState.READY}),
        "close": frozenset({SequenceState.CLOSED}),
    },
    SequenceState.READY: {
        "copies": frozenset({SequenceState.READY}),
        "append": frozenset({SequenceState.READY, SequenceState.COPYING}),
        "fork": frozenset({SequenceState.READY}),
        "truncate": frozenset({SequenceState.READY}),
        "publish": frozenset({SequenceState.READY}),
        "close": frozenset({SequenceState.CLOSED}),
    },
    SequenceState.CLOSED: {},
}


_WHY = {
    (
        SequenceState.COPYING,
        "publish",
    ): "its page copies were not taken; call copies(), make them, then publish",
}


_VERBS = {"copies": "take the copies of"}


def permit(state: SequenceState, step: str) -> None:
    """Raise `IllegalStep` unless ``step`` is legal in ``state``."""
    if step not in STEPS[state]:
        why = _WHY.get((state, step), f"it is {state.name.lower()}")
        raise IllegalStep(f"cannot {_VERBS.get(step, step)} this sequence: {why}")
