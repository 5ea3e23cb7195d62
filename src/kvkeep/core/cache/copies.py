"""Page copies that an engine must still make, and the states of the sequences that need them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.pages import PageCopy, PagePool
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import Tree

__all__ = ["STEPS", "Claim", "Claims", "Forks", "PendingCopies", "SequenceState", "permit"]


@dataclass(slots=True, eq=False)
class Claim:
    """Keeps a page unchanged until it is copied: one reference, and a hold if the index stores it.

    Forks share the claims of the sequence they were made from: ``sharers`` all need the copy.
    """

    copy: PageCopy
    hold: Any
    sharers: dict[PendingCopies, None]


class _PageClaims:
    """The claims on one page, and how many of its leading tokens they copy."""

    __slots__ = ("claims", "tokens")

    def __init__(self) -> None:
        self.claims: dict[Claim, None] = {}
        self.tokens: dict[int, int] = {}  # tokens to copy → number of claims

    def add(self, claim: Claim) -> None:
        self.claims[claim] = None
        tokens = claim.copy.tokens
        self.tokens[tokens] = self.tokens.get(tokens, 0) + 1

    def remove(self, claim: Claim) -> None:
        del self.claims[claim]
        tokens = claim.copy.tokens
        self.tokens[tokens] -= 1
        if not self.tokens[tokens]:
            del self.tokens[tokens]


class Claims:
    """The claims of a cache, by source page.

    Thread safety: none; under the cache's lock. ``made`` is the number of claims so far.
    """

    __slots__ = ("_pages", "_pool", "_tree", "made")

    def __init__(self, pool: PagePool, tree: Tree) -> None:
        self._pool = pool
        self._tree = tree
        self._pages: dict[int, _PageClaims] = {}
        self.made = 0

    def add(self, copy: PageCopy, hold: Any, sharer: PendingCopies) -> Claim:
        """Keep the source of ``copy`` unchanged; takes over the caller's reference and hold."""
        claim = Claim(copy, hold, {sharer: None})
        on_page = self._pages.get(copy.src)
        if on_page is None:
            on_page = self._pages[copy.src] = _PageClaims()
        on_page.add(claim)
        self.made += 1
        return claim

    def remove(self, claims: list[Claim], sharer: PendingCopies) -> None:
        """Remove ``sharer`` from ``claims``, whose copies it made or does not need."""
        for claim in claims:
            del claim.sharers[sharer]
            if claim.sharers:
                continue
            on_page = self._pages[claim.copy.src]
            on_page.remove(claim)
            if not on_page.claims:
                del self._pages[claim.copy.src]
            if claim.hold is not None:
                # Not a use of the source: the copy, published later, counts as the use.
                self._tree.release(claim.hold, used=False)
            self._pool.release_few([claim.copy.src])

    def now_stored(self, pages: PageArray, hold: Any, start: int) -> None:
        """Give holds to the claims on ``pages``, which the index now stores.

        ``start`` is the index of the first page on its path; ``hold`` protects the path.
        """
        if self._pages:
            for at, page in enumerate(pages.tolist()):
                on_page = self._pages.get(page)
                for claim in () if on_page is None else on_page.claims:
                    assert claim.hold is None
                    claim.hold = self._tree.move(self._tree.retain(hold), hold, start + at + 1)

    def may_write(self, page: int, offset: int) -> bool:
        """Whether a sequence may write to an unpublished ``page`` from ``offset`` on.

        A claim on the page reads only its leading tokens, so writing behind them is allowed.
        """
        references = int(self._pool.references[page])
        if references == 1:
            return True
        on_page = self._pages.get(page)
        if on_page is None or references > 1 + len(on_page.claims):
            return False
        return max(on_page.tokens) <= offset


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


class PendingCopies:
    """The claims of one sequence: those that wait to be taken, and those that the engine copies.

    Thread safety: none; under the cache's lock.

    Attributes:
        state: of the sequence: COPYING while claims wait, else READY. The sequence sets CLOSED.
    """

    __slots__ = ("_claims", "_taken", "state", "waiting")

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.waiting: list[Claim] = []
        """Claims whose copies were not taken yet, in the order in which to make them."""
        self._taken: list[Claim] = []
        self.state = SequenceState.READY

    def claims(self) -> list[Claim]:
        """Return all claims."""
        return self.waiting + self._taken

    def add(self, copy: PageCopy, hold: Any) -> None:
        """Claim the source of ``copy``; takes over the caller's reference and hold."""
        self.waiting.append(self._claims.add(copy, hold, self))
        self.state = SequenceState.COPYING

    def take(self) -> list[PageCopy]:
        """Return the waiting copies; the engine has made those taken before."""
        self.finish()
        self._taken, self.waiting = self.waiting, []
        self.state = SequenceState.READY
        for claim in self._taken:
            if len(claim.sharers) > 1:
                # A second copy could overwrite what was computed on the page after the first.
                for other in claim.sharers:
                    if other is not self:
                        other.waiting.remove(claim)
                        other._update()
                claim.sharers = {self: None}
        return [claim.copy for claim in self._taken]

    def finish(self) -> None:
        """Release the source pages of all copies taken so far; the caller has made them."""
        if self._taken:
            self._claims.remove(self._taken, self)
            self._taken = []

    def drop_needless(self, unpublished: PageArray) -> None:
        """Drop waiting claims whose target is not among the ``unpublished`` pages of the sequence.

        Such a target left the table, or was published and is complete.
        """
        if not self.waiting:
            return
        wanted = set(unpublished.tolist())
        needed: list[Claim] = []
        for claim in reversed(self.waiting):
            if claim.copy.dst in wanted:
                wanted.add(claim.copy.src)
                needed.append(claim)
            else:
                self._claims.remove([claim], self)
        self.waiting = needed[::-1]
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
        if self.waiting or self._taken:
            self._claims.remove(self.claims(), self)
            self.waiting, self._taken = [], []


class Forks:
    """Groups of sequences with the same first unpublished page, two or more in each.

    A sequence calls `leave` before that page changes. Thread safety: none; under the cache's lock.
    Cost: a dictionary lookup a call, and one for each member when a group is removed or made.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[int, dict[Any, None]] = {}

    def __bool__(self) -> bool:
        """Whether any sequences share an unpublished page."""
        return bool(self._groups)

    def join(self, page: int, sequence: Any, other: Any) -> None:
        """Record that ``other`` was forked from ``sequence``; ``page`` is the first unpublished."""
        self._groups.setdefault(page, {sequence: None})[other] = None

    def leave(self, page: int, sequence: Any) -> None:
        """Record that ``page`` is no longer the first unpublished page of ``sequence``."""
        group = self._groups.get(page)
        if group is not None:
            del group[sequence]
            if len(group) == 1:
                del self._groups[page]

    def take(self, page: int) -> Iterable[Any]:
        """Remove and return the group of ``page``, which is being published; `regroup` it then."""
        return self._groups.pop(page, ())

    def regroup(self, sequences: Iterable[Any]) -> None:
        """Group sequences that shared a page by their present first unpublished pages."""
        groups: dict[int, dict[Any, None]] = {}
        for sequence in sequences:
            page = sequence.first_unpublished
            if page is not None:
                groups.setdefault(page, {})[sequence] = None
        self._groups.update((page, group) for page, group in groups.items() if len(group) > 1)

    def check(self, sequences: Iterable[Any]) -> None:
        """Assert that the groups are those of all running ``sequences``."""
        expected: dict[int, set[Any]] = {}
        for sequence in sequences:
            page = sequence.first_unpublished
            if page is not None:
                expected.setdefault(page, set()).add(sequence)
        shared = {page: group for page, group in expected.items() if len(group) > 1}
        assert shared == {page: set(group) for page, group in self._groups.items()}
        pages: dict[int, int] = {}  # each unpublished page → first page of its group
        for first, group in expected.items():
            for sequence in group:
                for page in sequence.unpublished:
                    assert pages.setdefault(page, first) == first, "a page in two groups"
