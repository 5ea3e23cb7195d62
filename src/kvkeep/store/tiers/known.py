"""`KnownBlocks`: which blocks a tier is known to hold, and which of them it must not serve."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvkeep.store.tiers.catalogue import Catalogue

__all__ = ["KnownBlocks"]

_HIDDEN_KEPT = 1 << 16
_DELETED_KEPT = 1 << 14
_UNDELETED_KEPT = 1 << 16


class KnownBlocks:
    """The catalogue of an indexed tier, the blocks hidden from it, and those being deleted.

    A hidden block counts as missing, whatever the backend holds, until it is written anew: this
    tier must not serve its record, or could not delete it.

    Thread safety: all methods.

    Attributes:
        indexed: whether the backend has a budget; its blocks are then listed once and tracked.
    """

    def __init__(self, catalogue: Catalogue, *, indexed: bool) -> None:
        self.catalogue = catalogue
        self.indexed = indexed
        self._hidden: OrderedDict[bytes, None] = OrderedDict()
        self._deleted_one = threading.Condition()
        self._deleting: dict[bytes, int] = {}  # block → deletions that run
        self._deletions = 0  # ended so far
        self._deleted: OrderedDict[bytes, int] = OrderedDict()  # block → number of its last one
        self._deleted_before = 0  # the last deletion of any block that is not in `_deleted`
        self._undeleted: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._replacing: set[bytes] = set()  # were undeleted, and are being written

    def __contains__(self, block: object) -> bool:
        return self.indexed and block in self.catalogue and block not in self._hidden

    @property
    def any_hidden(self) -> bool:
        """Whether there are hidden blocks."""
        return bool(self._hidden)

    def is_hidden(self, block: bytes) -> bool:
        """Whether ``block`` counts as missing, whatever the backend holds."""
        return block in self._hidden

    def hide(self, blocks: Sequence[bytes]) -> None:
        """Treat ``blocks`` as missing until they are written anew."""
        hidden = self._hidden
        for block in blocks:
            hidden[block] = None
        while len(hidden) > _HIDDEN_KEPT:
            hidden.popitem(last=False)

    def written(self, block: bytes) -> None:
        """Record that ``block`` was written anew, so it is no longer hidden."""
        self._hidden.pop(block, None)
        self._replacing.discard(block)

    def not_written(self, block: bytes, *, maybe: bool) -> None:
        """Record that a write, begun by `wait_deleted`, failed.

        ``maybe``: the backend may have the record nevertheless, so it has to be deleted.
        """
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
        """`Catalogue.victims`, for a `deletion` that follows at once."""
        with self._deleted_one:
            victims = self.catalogue.victims(needed, space)
            self._begin(victims)
            return victims

    def give_up(self, blocks: Iterable[bytes], needed: int) -> list[bytes]:
        """`Holds.give_up`, for a `deletion` that follows at once."""
        with self._deleted_one:
            gone = self.catalogue.holds.give_up(blocks, needed)
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
    def removal(self, blocks: Sequence[bytes]) -> Iterator[None]:
        """Forget ``blocks``, which the backend deletes within the ``with`` block."""
        with self.deletion(blocks):
            with self._deleted_one:
                self._begin(blocks)
            for block in blocks:
                self.catalogue.forget(block)
            yield

    def wait_deleted(self, block: bytes, timeout: float) -> bool:
        """Wait until no deletion of ``block`` runs, so that it can be written; False if one does.

        Otherwise the deletion could remove the new record. For the same reason, a failed deletion
        of an older record is not repeated from then on. Call `written` or `not_written` at the end.
        """
        if block not in self._deleting and block not in self._undeleted:
            return True
        with self._deleted_one:
            if not self._deleted_one.wait_for(lambda: block not in self._deleting, timeout):
                return False
            if block in self._undeleted:
                del self._undeleted[block]
                self._replacing.add(block)
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
