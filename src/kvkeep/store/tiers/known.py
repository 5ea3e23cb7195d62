"""`KnownBlocks`: which blocks a tier is known to hold, and which of them it must not serve."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.tiers.catalogue import Catalogue

__all__ = ["KnownBlocks"]

_HIDDEN_KEPT = 1 << 16


class KnownBlocks:
    """The catalogue of an indexed tier, with the blocks hidden from it and a guard for removals.

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
        self._lock = threading.Lock()
        self._removals = 0  # begun so far
        self._removing = 0  # of these, not ended yet

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

    def before_query(self) -> int | None:
        """Return a mark for `learn`; call it before the query to the backend."""
        with self._lock:
            return None if self._removing else self._removals

    def learn(self, block: bytes, size: int, mark: int | None) -> None:
        """Add ``block``, which a query begun after ``mark`` found in the backend.

        Does nothing if a removal ran since ``mark``: the block may have been deleted.
        """
        if self.indexed and block not in self.catalogue:
            with self._lock:
                if mark is not None and mark == self._removals:
                    self.catalogue.add(block, size)

    @contextmanager
    def removal(self, blocks: Sequence[bytes]) -> Iterator[None]:
        """Forget ``blocks``, which the caller deletes from the backend within the ``with`` block.

        Results of queries that run meanwhile are ignored.
        """
        with self._lock:
            self._removals += 1
            self._removing += 1
        try:
            for block in blocks:
                self.catalogue.forget(block)
            yield
        finally:
            with self._lock:
                self._removing -= 1
