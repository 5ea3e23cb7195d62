"""Claims: the pages that engines must still copy from, and the steps that a sequence allows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from kvkeep.core.pages import PageCopy, PagePool
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import Tree

__all__ = [
    "CLOSED", "COPYING", "READY", "STEPS", "Claim", "Claims", "SequenceState", "permit",
]  # fmt: skip


@dataclass(slots=True, eq=False)
class Claim:
    """Keeps a page unchanged until it is copied: one reference, and a hold if the index stores it.

    ``sharers`` are the sequences that need the copy: one and, until it is taken, its forks.
    """

    copy: PageCopy
    hold: Any
    sharers: set[Any]


class Claims:
    """The claims of a cache, by source page, and there by the tokens that they copy.

    Thread safety: none; under the cache's lock. ``made`` is the number of claims so far.
    """

    __slots__ = ("_pages", "_pool", "_tree", "made")

    def __init__(self, pool: PagePool, tree: Tree) -> None:
        self._pool = pool
        self._tree = tree
        self._pages: dict[int, dict[int, set[Claim]]] = {}
        self.made = 0

    def add(self, copy: PageCopy, hold: Any, sharer: Any) -> Claim:
        """Keep the source of ``copy`` unchanged; takes over the caller's reference and hold."""
        claim = Claim(copy, hold, {sharer})
        self._pages.setdefault(copy.src, {}).setdefault(copy.tokens, set()).add(claim)
        self.made += 1
        return claim

    def remove(self, claims: list[Claim], sharer: Any) -> None:
        """Remove ``sharer`` from ``claims``, whose copies it made or does not need."""
        for claim in claims:
            claim.sharers.remove(sharer)
            if claim.sharers:
                continue
            page, _, tokens = claim.copy
            on_page = self._pages[page]
            on_page[tokens].remove(claim)
            if not on_page[tokens]:
                del on_page[tokens]
                if not on_page:
                    del self._pages[page]
            if claim.hold is not None:
                # Not a use of the source: the copy, published later, counts as the use.
                self._tree.release(claim.hold, used=False)
            self._pool.release_few([page])

    def now_stored(self, pages: PageArray, hold: Any, start: int) -> None:
        """Give holds to the claims on ``pages``, which the index now stores.

        ``start`` is the index of the first page on its path; ``hold`` protects the path.
        """
        if self._pages:
            for end, page in enumerate(pages.tolist(), start + 1):
                for claim in chain.from_iterable(self._pages.get(page, {}).values()):
                    assert claim.hold is None
                    claim.hold = self._tree.move(self._tree.retain(hold), hold, end)

    def may_write(self, page: int, offset: int) -> bool:
        """Whether a sequence may write to an unpublished ``page`` from ``offset`` on.

        Only if all other references are claims: these read the leading tokens, and writing behind
        them is allowed.
        """
        others = int(self._pool.references[page]) - 1
        if not others:
            return True
        on_page = self._pages.get(page)
        if on_page is None or max(on_page) > offset:
            return False
        return sum(map(len, on_page.values())) == others


class SequenceState(StrEnum):
    """State of a sequence: COPYING while copies wait to be taken, else READY, until CLOSED."""

    COPYING = auto()
    READY = auto()
    CLOSED = auto()


COPYING, READY, CLOSED = SequenceState  # an attribute of an enum is slow to read

STEPS: dict[SequenceState, dict[str, frozenset[SequenceState]]] = {
    COPYING: {
        "copies": frozenset({READY}),
        "append": frozenset({COPYING}),
        "fork": frozenset({COPYING}),
        "truncate": frozenset({COPYING, READY}),
        "close": frozenset({CLOSED}),
    },
    READY: {
        "copies": frozenset({READY}),
        "append": frozenset({READY, COPYING}),
        "fork": frozenset({READY}),
        "truncate": frozenset({READY}),
        "publish": frozenset({READY}),
        "close": frozenset({CLOSED}),
    },
    CLOSED: {},
}
"""By state: the steps that are legal, and the states to which they lead."""


def permit(state: SequenceState, step: str) -> None:
    """Raise `IllegalStep` unless ``step`` is legal in ``state``."""
    if step not in STEPS[state]:
        why = "it is closed"
        if state is COPYING:
            why = "its page copies were not taken; call copies(), make them, then publish"
        verb = "take the copies of" if step == "copies" else step
        raise IllegalStep(f"cannot {verb} this sequence: {why}")
