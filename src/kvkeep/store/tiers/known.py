"""`KnownBlocks`: which blocks a tier is known to hold, and which of them it must not serve."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvkeep.store.tiers.index import Index

__all__ = ["KnownBlocks"]

_HIDDEN_KEPT = 1 << 16
_ANEW_KEPT = 1 << 16
_DELETED_KEPT = 1 << 14
_UNDELETED_KEPT = 1 << 16


Hidden = Literal["refused", "removed", "rewriting"]
"""Why a block is hidden: its record is not for this tier; it may be left after a removal; or that,
and a write that began afterwards replaces it now."""
REFUSED: Final = "refused"
REMOVED: Final = "removed"
REWRITING: Final = "rewriting"


@dataclass(slots=True)
class _Cleared:
    """A cleared namespace: all its blocks are hidden, but those that were written since."""

    number: int
    anew: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class KnownBlocks:
    """The catalogue of an indexed tier, the blocks hidden from it, and those being deleted.

    A hidden block counts as missing, whatever the backend holds, until it is written anew: this
    tier must not serve its record, or could not delete it. A namespace is hidden while it is being
    cleared, and stays so if that fails; only writes that begin afterwards are served.

    Memory has a bound, beyond which more is hidden rather than less: of more than 65,536 removed
    blocks that may be left, the namespace of the oldest is hidden; and of more than 65,536 blocks
    written since a namespace was cleared, the oldest are.

    Thread safety: all methods. Memory: about 300 bytes for each namespace whose clearance failed.

    Attributes:
        indexed: whether the backend has a budget; its blocks are then listed once and tracked.
    """

    def __init__(self, catalogue: Index, *, indexed: bool) -> None:
        self.catalogue = catalogue
        self.indexed = indexed
        self._hidden: OrderedDict[bytes, Hidden] = OrderedDict()
        self._cleared: dict[bytes, _Cleared] = {}  # by namespace
        self._clears = 0
        self._deleted_one = threading.Condition()
        self._deleting: dict[bytes, int] = {}  # block → deletions that run
        self._deletions = 0  # ended so far
        self._deleted: OrderedDict[bytes, int] = OrderedDict()  # block → number of its last one
        self._deleted_before = 0  # the last deletion of any block that is not in `_deleted`
        self._undeleted: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._replacing: set[bytes] = set()  # were undeleted, and are being written

    def __contains__(self, block: object) -> bool:
        if not self.indexed or block not in self.catalogue:
            return False
        assert isinstance(block, bytes)
        return not self._hides(block)

    @property
    def any_hidden(self) -> bool:
        """Whether there may be hidden blocks."""
        return bool(self._hidden or self._cleared)

    def is_hidden(self, block: bytes) -> bool:
        """Whether ``block`` counts as missing, whatever the backend holds."""
        return self._hides(block)

    def _hides(self, block: bytes) -> bool:
        if block in self._hidden:
            return True
        cleared = self._cleared.get(block[:SPACE_BYTES]) if self._cleared else None
        return cleared is not None and block not in cleared.anew

    def hide(self, blocks: Iterable[bytes], why: Hidden = REMOVED) -> None:
        """Treat ``blocks`` as missing until a write that begins later has ended."""
        with self._deleted_one:
            hidden = self._hidden
            for block in blocks:
                hidden[block] = why
                if len(hidden) > _HIDDEN_KEPT:
                    oldest, reason = hidden.popitem(last=False)
                    if reason != REFUSED:
                        space = oldest[:SPACE_BYTES]
                        anew = self._hide_space(space, self._cleared.get(space)).anew
                        anew.pop(oldest, None)

    def hide_space(self, space: bytes) -> int:
        """Hide all blocks of a namespace but those that are written from now on.

        Returns the number of this clearance, for `removal` and `reveal`.
        """
        with self._deleted_one:
            return self._hide_space(space).number

    def _hide_space(self, space: bytes, before: _Cleared | None = None) -> _Cleared:
        self._clears += 1  # `reveal` of an earlier clearance does nothing from now on
        cleared = self._cleared[space] = _Cleared(self._clears)
        if before is not None:
            cleared.anew = before.anew
        return cleared

    def reveal(self, space: bytes, number: int) -> bool:
        """End the clearance ``number``, as none of the namespace's old blocks is left.

        False if a later clearance has taken its place, which then says what is left.
        """
        with self._deleted_one:
            cleared = self._cleared.get(space)
            if cleared is None or cleared.number != number:
                return False
            del self._cleared[space]
            return True

    def written(self, block: bytes) -> None:
        """Record that a write begun by `wait_deleted` has ended: ``block`` is hidden no longer.

        It stays hidden if it was hidden after the write began.
        """
        if block in self._hidden:
            with self._deleted_one:
                if self._hidden.get(block) == REWRITING:
                    del self._hidden[block]
        self._replacing.discard(block)

    def not_written(self, block: bytes, *, maybe: bool) -> None:
        """Record that a write, begun by `wait_deleted`, failed.

        ``maybe``: the backend may have the record nevertheless, so it has to be deleted.
        """
        if block in self._hidden:
            self.hide([block])
        if maybe or block in self._replacing:
            self._replacing.discard(block)
            self.keep_undeleted([block])

    def before_query(self) -> int:
        """Return a mark for `learn`; take it before the query to the backend."""
        return self._deletions

    def learn(self, block: bytes, size: int, mark: int) -> None:
        """Add ``block``, which a query begun after ``mark`` found in the backend.

        Does nothing if the block is being deleted, or was deleted since ``mark``.
        """
        if self.indexed and block not in self.catalogue:
            with self._deleted_one:
                deleted = self._deleted.get(block, self._deleted_before)
                if block not in self._deleting and deleted <= mark:
                    self.catalogue.add(block, size)

    # --- deletions -------------------------------------------------------------------------------

    def take_victims(self, needed: int, space: bytes | None = None) -> list[bytes]:
        """`Index.victims`, for a `deletion` that follows at once."""
        with self._deleted_one:
            victims = self.catalogue.victims(needed, space)
            self._begin(victims)
            return victims

    def give_up(self, blocks: Iterable[bytes], needed: int) -> list[bytes]:
        """`Index.give_up`, for a `deletion` that follows at once."""
        with self._deleted_one:
            gone = self.catalogue.give_up(blocks, needed)
            self._begin(gone)
            return gone

    @contextmanager
    def deletion(self, blocks: Sequence[bytes]) -> Iterator[None]:
        """The backend deletes ``blocks``, which are marked as such, in the ``with`` block."""
        try:
            yield
        finally:
            with self._deleted_one:
                self._end(blocks)

    @contextmanager
    def removal(
        self, blocks: Sequence[bytes], cleared: int | None = None
    ) -> Iterator[Sequence[bytes]]:
        """Forget ``blocks``, which the backend deletes within the ``with`` block.

        Yields those to delete. For the clearance of that number they are of one namespace, and
        those that were written since are left out: all, if it was cleared again.
        """
        old: list[bytes] = []
        with self.deletion(old):
            with self._deleted_one:
                old += blocks if cleared is None else self._not_anew(blocks, cleared)
                self._begin(old)
            for block in old:
                self.catalogue.forget(block)
            yield old

    def _not_anew(self, blocks: Sequence[bytes], number: int) -> list[bytes]:
        """Return those of ``blocks`` that were not written since a clearance, under the lock."""
        cleared = self._cleared.get(blocks[0][:SPACE_BYTES]) if blocks else None
        if cleared is None or cleared.number != number:
            return []
        return [block for block in blocks if block not in cleared.anew]

    def wait_deleted(self, block: bytes, timeout: float) -> bool:
        """Wait until no deletion of ``block`` runs, so that it can be written; False if one does.

        Otherwise the deletion could remove the new record. For the same reason, a failed deletion
        of an older record is not repeated from then on. Call `written` or `not_written` at the end.
        """
        hidden = self._hides(block)
        if block not in self._deleting and block not in self._undeleted and not hidden:
            return True
        with self._deleted_one:
            if not self._deleted_one.wait_for(lambda: block not in self._deleting, timeout):
                return False
            if block in self._undeleted:
                del self._undeleted[block]
                self._replacing.add(block)
            if self._hides(block):
                self._hidden[block] = REWRITING
                cleared = self._cleared.get(block[:SPACE_BYTES])
                if cleared is not None:
                    cleared.anew[block] = None
                    while len(cleared.anew) > _ANEW_KEPT:
                        cleared.anew.popitem(last=False)
            return True

    def keep_undeleted(self, blocks: Iterable[bytes]) -> None:
        """Remember forgotten ``blocks`` that the backend failed to delete, to try again.

        Their records take room in the backend and are in no catalogue. Of very many, the oldest
        are dropped; the next listing finds their records.
        """
        if not self.indexed:
            return
        with self._deleted_one:
            self._undeleted.update(dict.fromkeys(blocks))
            while len(self._undeleted) > _UNDELETED_KEPT:
                self._undeleted.popitem(last=False)

    def take_undeleted(self, limit: int) -> list[bytes]:
        """Take ``limit`` blocks of `keep_undeleted`, oldest first, for a `deletion` at once.

        Blocks that a listing or a query has found again are left to the catalogue.
        """
        taken: list[bytes] = []
        if self._undeleted:
            with self._deleted_one:
                while self._undeleted and len(taken) < limit:
                    block, _ = self._undeleted.popitem(last=False)
                    if block not in self.catalogue:
                        taken.append(block)
                self._begin(taken)
        return taken

    @property
    def undeleted(self) -> list[bytes]:
        """Blocks whose deletion failed, which is tried again when room is needed."""
        with self._deleted_one:
            return list(self._undeleted)

    def _begin(self, blocks: Iterable[bytes]) -> None:
        deleting = self._deleting
        for block in blocks:
            deleting[block] = deleting.get(block, 0) + 1

    def _end(self, blocks: Iterable[bytes]) -> None:
        self._deletions += 1
        for block in blocks:
            if self._deleting.get(block, 0) > 1:
                self._deleting[block] -= 1
            else:
                self._deleting.pop(block, None)  # missing if `_begin` was interrupted
            self._deleted.pop(block, None)
            self._deleted[block] = self._deletions
        while len(self._deleted) > _DELETED_KEPT:
            self._deleted_before = self._deleted.popitem(last=False)[1]
        self._deleted_one.notify_all()
