"""`ArenaCore`: the lock of an arena with its repair, the holds, and dead processes."""

from __future__ import annotations

import os
import threading
import time
from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import BackendFailed, InvalidValue
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.books import Books, DamagedIndex
from kvkeep.store.backends.shm.extents import Extents
from kvkeep.store.backends.shm.repair import forget_dead, initialise, living, rebuild

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvkeep.store.backends.shm.lock import NodeLock

__all__ = ["AT_ONCE", "ArenaCore", "Hold"]

AT_ONCE: Final = 64
"""Blocks of one call that are changed under one lock."""

Hold = tuple[int, int]
"""An entry and the generation of the record in it: another record of the entry is not held."""

_SIGNS: Final = (DamagedIndex, IndexError, ValueError)  # of numbers that lead nowhere
_REAP_EVERY: Final = 1.0  # seconds between two looks for dead processes, when room is short


class _Change:
    """Marks the index as changing; an exception leaves the mark, and whoever is next repairs."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __enter__(self) -> None:
        self._words[at.CHANGES] += 1

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._words[at.CHANGES] += 1


class ArenaCore:
    """Takes the lock of the node, repairs what a dead process left, and counts holds.

    Each change makes a counter odd, stores its numbers, and makes the counter even. Whoever takes
    the lock and finds it odd rebuilds the index from the records: the process before it died.

    A *hold* keeps an entry's memory. Its bit in the column of holders belongs to this process,
    which counts its own; when the process dies, the kernel frees its slot, and others drop its
    holds.

    As a context manager it takes the lock. Thread safety: all methods without an underscore.
    """

    def __init__(self, books: Books, lock: NodeLock, place: str, *, new: bool) -> None:
        """Join the processes that have the arena open; call it under the lock."""
        self.books = books
        self.extents = Extents(books)
        self.quotas = Quotas(books)
        self._lock = lock
        self._place = place
        self._held: dict[Hold, int] = {}  # holds of this process
        self._counting = threading.Lock()  # of `_held`; from and to 0 needs the lock of the node
        self._late: list[Hold] = []  # holds to end when the lock can be taken again
        self._reaped = 0.0
        self._change = _Change(books.words)
        self._closing = False
        if new:
            initialise(books)
        self._join(new=new)

    def _join(self, *, new: bool) -> None:
        words = self.books.words
        alive = living(self.books, self._lock.lives)
        if not new and (not alive or words[at.CHANGES] & 1):
            self._repair()  # nobody else has it open: check what lies there
        if not alive:
            self.quotas.clear()
        words[at.CHANGES] = (words[at.CHANGES] | 1) + 1
        self._drop_dead()  # before a slot is taken, or holds of a dead process would be this one's
        for slot in range(at.SLOTS):
            if not words[at.SLOT_AT + slot] and self._lock.occupy(slot):
                words[at.SLOT_AT + slot] = os.getpid()
                break
        else:
            raise BackendFailed(
                f"{self._place} is open in {at.SLOTS} processes, which is the limit; close some"
            )
        self._word = self._lock.slot >> 6
        self._bit = 1 << (self._lock.slot & 63)
        holders = [0] * at.HOLDER_WORDS
        holders[self._word] = self._bit
        self._holder = array("Q", holders).tobytes()

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened the arena."""
        return self._lock.inherited

    # --- the lock, and changes under it ----------------------------------------------------------

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self.books.words[at.CHANGES] & 1:
                self._repair()
            for _ in range(min(len(self._late), AT_ONCE)):
                self._end_hold(self._late.pop())
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        damaged = kind is not None and kind in _SIGNS
        if damaged:
            self.books.words[at.CHANGES] |= 1
        self._lock.release()
        if damaged:
            raise BackendFailed(
                f"{self._place}: its index contradicts itself ({error}); the next use rebuilds it"
            ) from error

    def _repair(self) -> None:
        rebuild(self.books, self._lock.lives)
        self.quotas.recount()
        self._repaired()
        self.books.words[at.CHANGES] += 1

    def _repaired(self) -> None:
        """Forget what is known of entries: they were dropped or freed."""

    def find_here(self, block: bytes) -> int:
        """Return the entry of ``block``, -1 if there is none; call it under the lock.

        Repairs the index if it must.
        """
        known = self.books.known(block)
        if known >= 0 and self.books.id_of(known) == block:
            return known
        for _ in range(2):
            try:
                entry = self.books.walk(block, self.books.layout.entries)
                if entry < 0 or self.books.proven(entry):
                    return entry
            except (DamagedIndex, IndexError):
                pass
            self._repair()
        return -1

    def _reap(self) -> bool:
        """Take back what dead processes held; return whether there was anything, under the lock."""
        if time.monotonic() - self._reaped < _REAP_EVERY:
            return False
        self._reaped = time.monotonic()
        words = self.books.words
        taken = [slot for slot in range(at.SLOTS) if words[at.SLOT_AT + slot]]
        if all(map(self._lock.lives, taken)):
            return False
        self._drop_dead()
        return True

    def _drop_dead(self) -> None:
        with self._change:  # also around the slots: nobody else would look for holds without one
            for entry in forget_dead(self.books, living(self.books, self._lock.lives)).tolist():
                self.extents.free(entry)
        self._repaired()

    # --- lookups ---------------------------------------------------------------------------------

    def find(self, block: bytes) -> int:
        """Return the entry of ``block``, -1 if there is none. Takes the lock only in doubt."""
        entry = self.books.find(block)
        if entry == -2:
            with self:
                return self.find_here(block)
        return entry

    def find_all(self, blocks: Sequence[bytes]) -> list[int]:
        """Return `find` of each block."""
        entries = self.books.find_all(blocks)
        for place, entry in enumerate(entries):
            if entry == -2:
                entries[place] = self.find(blocks[place])
        return entries

    # --- holds -----------------------------------------------------------------------------------

    def hold_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Hold the record of each of ``blocks``, None if there is none.

        Takes the lock of the node once for `AT_ONCE` blocks that this process does not hold yet.

        Raises:
            BackendFailed: the lock cannot be had; nothing more is held than before.
        """
        holds = self._hold_again(blocks)
        missing = [place for place, hold in enumerate(holds) if hold is None]
        try:
            for start in range(0, len(missing), AT_ONCE):
                with self:
                    for place in missing[start : start + AT_ONCE]:
                        entry = self.find_here(blocks[place])
                        if entry >= 0:
                            holds[place] = self._begin_hold(entry)
        except BackendFailed:
            self.release([hold for hold in holds if hold is not None])
            raise
        return holds

    def _hold_again(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Hold records that this process holds already, without the lock of the node."""
        holds: list[Hold | None] = []
        with self._counting:
            for block in blocks:
                hold = self.books.known_record(block)
                held = 0 if hold is None else self._held.get(hold, 0)
                if hold is not None and held:
                    self._held[hold] = held + 1
                holds.append(hold if held else None)
        return holds

    def release(self, holds: Sequence[Hold]) -> None:
        """End ``holds``, each of them once; later, if the lock cannot be had now."""
        if self._lock.inherited:
            return
        with self._counting:
            for hold in holds:
                held = self._held.get(hold, 0)
                if held > 1:
                    self._held[hold] = held - 1
                else:
                    self._late.append(hold)
        try:
            while self._late:
                with self:
                    pass
        except BackendFailed:
            return
        self._close_when_free()

    def _begin_hold(self, entry: int) -> Hold:
        hold = entry, self.books.generation[entry]
        with self._counting:
            self._held[hold] = self._held.get(hold, 0) + 1
        self.books.holders[entry * at.HOLDER_WORDS + self._word] |= self._bit
        return hold

    def _end_hold(self, hold: Hold) -> None:
        with self._counting:
            held = self._held.pop(hold, 0)
            if held > 1:
                self._held[hold] = held - 1
                return
        books, (entry, generation) = self.books, hold
        if books.generation[entry] != generation:
            return  # a repair dropped it, and the entry has another record
        word = entry * at.HOLDER_WORDS + self._word
        if books.state[entry] == at.PUBLISHED:
            books.holders[word] &= ~self._bit
        elif books.state[entry] in (at.DRAFT, at.UNNAMED):  # else a repair dropped it
            with self._change:
                books.holders[word] &= ~self._bit
                if not books.is_held(entry):
                    self.extents.free(entry)

    # --- life cycle ------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the arena, as soon as this process holds nothing in it; the records stay."""
        self._closing = True
        self._close_when_free()

    def _close_when_free(self) -> None:
        if not self._closing or self._held:
            return
        if not self._lock.inherited:
            try:
                with self:
                    self.books.words[at.SLOT_AT + self._lock.slot] = 0
            except BackendFailed:
                pass  # the kernel frees the slot when the descriptor closes; others notice
        self._lock.close()


class Quotas:
    """The quotas in ``books``, for all processes. A process that sets one sets it for all.

    Thread safety: `limit`, `held` and `over` take no lock; call the others under the arena's lock.
    Cost: nothing where no namespace has a quota, else a microsecond for a record put or deleted.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._at: dict[bytes, int] = {}  # space → its words

    def _of(self, space: bytes) -> int:
        """Return where the words of a namespace's quota are, -1 if it has none."""
        words = self._books.words
        while len(self._at) < min(words[at.QUOTA_COUNT], at.QUOTAS):
            where = at.QUOTA_AT + 4 * len(self._at)
            self._at[bytes(words[where : where + 2].cast("B"))] = where
        return self._at.get(space, -1)

    def over(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits."""
        where = self._of(space)
        if where < 0:
            return 0
        limit, held = self._books.words[where + 2], self._books.words[where + 3]
        return -1 if more > limit else max(0, held + more - limit)

    def set(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes. Cost: a new one takes a pass over the entries."""
        words = self._books.words
        where = self._of(space)
        if where < 0:
            count = words[at.QUOTA_COUNT]
            if count >= at.QUOTAS:
                raise InvalidValue(f"a shared arena has room for {at.QUOTAS} quotas, all are taken")
            where = at.QUOTA_AT + 4 * count
            words[where : where + 2] = memoryview(space).cast("q")
            words[where + 2], words[where + 3] = limit, self._count(space)
            words[at.QUOTA_COUNT] = count + 1
        words[where + 2] = limit

    def count(self, block: bytes, more: int) -> None:
        """Count ``more`` bytes, negative for fewer, to the namespace of ``block``."""
        if self._books.words[at.QUOTA_COUNT]:
            where = self._of(block[:SPACE_BYTES])
            if where >= 0:
                self._books.words[where + 3] += more

    def recount(self) -> None:
        """Count the bytes of all namespaces with a quota anew, after a repair."""
        for number in range(min(self._books.words[at.QUOTA_COUNT], at.QUOTAS)):
            where = at.QUOTA_AT + 4 * number
            space = bytes(self._books.words[where : where + 2].cast("B"))
            self._books.words[where + 3] = self._count(space)

    def clear(self) -> None:
        """Forget all quotas: nobody else has the arena open."""
        self._books.words[at.QUOTA_COUNT] = 0
        self._at.clear()

    def _count(self, space: bytes) -> int:
        mine = in_space(self._books, space, self._books.words[at.HIGH])
        mine &= self._books.named_all[: len(mine)] != 0
        return int(np.asarray(self._books.size)[: len(mine)][mine].sum())


def in_space(books: Books, space: bytes, high: int) -> np.ndarray:
    """Return which of the first ``high`` entries have an id in ``space``."""
    wanted = np.frombuffer(space, np.int64)
    ids = books.ids_all[:high]
    same: np.ndarray = (ids[:, 0] == wanted[0]) & (ids[:, 1] == wanted[1])
    return same
