"""`SharedArena`: records of an arena: drafts, publication, deletion, eviction, and recency."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends.shm import clock
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.books import DamagedIndex
from kvkeep.store.backends.shm.core import AT_ONCE, ArenaCore
from kvkeep.store.backends.shm.pins import ArenaPins
from kvkeep.store.backends.shm.victims import Victims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.shm.books import Books
    from kvkeep.store.backends.shm.lock import NodeLock

__all__ = ["SharedArena"]

_FRUITLESS: Final = 16  # choices of victims in a row that others used or took meanwhile


class SharedArena(ArenaCore):
    """Records in ``books``, changed under ``lock``; entries are numbers of the index.

    Thread safety: all methods. Cost: some µs a call, besides waiting for other processes, which
    hold the lock for as long.

    Attributes:
        pins: the pins of all processes.
    """

    def __init__(self, books: Books, lock: NodeLock, place: str, *, new: bool) -> None:
        """Join the processes that have the arena open; call it under the lock."""
        self._victims = Victims(books)
        self._choosing = threading.Lock()
        super().__init__(books, lock, place, new=new)
        self.pins = ArenaPins(self)

    def _repaired(self) -> None:
        self._victims.forget()

    # --- records ---------------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int) -> int:
        """Take an extent for a record of ``size`` bytes; return its entry, held.

        Raises:
            OutOfRoom: see `ShmBackend.reserve`.
        """
        books, words = self.books, self.books.words
        length = self.extents.taken_by(size)
        with self:
            found = self.extents.find(length)
            if found < 0 and self._reap():
                found = self.extents.find(length)
            if found < 0:
                free = words[at.FREE_BYTES]
                short = free < length <= books.layout.data_bytes
                raise OutOfRoom(length - free if short else length, self._place)
            with self._change:
                entry = self.extents.take(found, length)
                generation = words[at.GENERATION] + 1
                words[at.GENERATION] = generation
                books.set_id(entry, block)
                books.generation[entry], books.size[entry] = generation, size
                books.named[entry] = books.leaving[entry] = books.pinned[entry] = 0
                for word in range(at.HOLDER_WORDS):
                    books.holders[entry * at.HOLDER_WORDS + word] = 0
                self._begin_hold(entry)
                books.proof[entry] = at.proof_of(
                    crc32(block), books.offset[entry], length, size, generation
                )
                books.state[entry] = at.DRAFT
        return entry

    def publish(self, entry: int, block: bytes, *, hold: bool) -> None:
        """Make the draft ``entry`` the record of ``block``; its hold ends unless ``hold``."""
        books = self.books
        with self:
            older = self.find_here(block)  # this may repair, and drop the draft
            mine = entry in self._held and books.id_of(entry) == block
            if books.state[entry] != at.DRAFT or not mine:
                raise BackendFailed(f"{self._place} was damaged and repaired; a draft is lost")
            with self._change:
                books.used[entry] = clock.now()
                if older >= 0:
                    books.pinned[entry] = books.pinned[older]
                books.state[entry] = at.PUBLISHED  # from here on it survives this process
                bucket = books.bucket(block)
                books.link[entry] = books.heads[bucket]
                books.heads[bucket] = entry
                books.named[entry] = books.generation[entry]
                books.words[at.RECORDS] += 1
                self.quotas.count(block, books.size[entry])
                if older >= 0:
                    self._unname(older)
            books.remember(block, entry, books.generation[entry])
            if not hold:
                self._end_hold(entry)

    def _unname(self, entry: int) -> None:
        """Remove a published record from the index, and free it unless it is held."""
        books = self.books
        block = books.id_of(entry)
        books.named[entry] = 0
        books.state[entry] = at.UNNAMED
        books.words[at.RECORDS] -= 1
        bucket = books.bucket(block)
        link = books.link[entry]
        other = books.heads[bucket]
        if other == entry:
            books.heads[bucket] = link
        else:
            while books.link[other] != entry:
                other = books.link[other]
                if other < 0:
                    raise DamagedIndex("a published record is missing in its chain")
            books.link[other] = link
        self.quotas.count(block, -books.size[entry])
        if books.leaving[entry]:
            books.leaving[entry] = 0
            books.words[at.LEAVING] -= books.length[entry]
        if not books.is_held(entry):
            self.extents.free(entry)

    def delete(self, blocks: Sequence[bytes]) -> list[int]:
        """Delete the records of ``blocks``; return their sizes in bytes, 0 for missing ones."""
        sizes: list[int] = []
        for start in range(0, len(blocks), AT_ONCE):
            with self:
                for block in blocks[start : start + AT_ONCE]:
                    entry = self.find_here(block)
                    sizes.append(0 if entry < 0 else self.books.size[entry])
                    if entry >= 0:
                        with self._change:
                            self._unname(entry)
        return sizes

    # --- eviction --------------------------------------------------------------------------------

    def evict(
        self, needed: int, space: bytes | None, *, leave: bool = False
    ) -> list[tuple[bytes, int]]:
        """Delete the least recently used records of ``needed`` bytes; return blocks and entries.

        Fewer if no more may go: others are held or pinned. With ``leave`` they stay, marked as
        leaving and held, until `left`. If ``space`` is given, records of that namespace alone.

        Raises:
            BackendFailed: the lock cannot be had, and no record went before.
        """
        gone: list[tuple[bytes, int]] = []
        try:
            self._evict_into(gone, needed, space, leave=leave)
        except BackendFailed:
            if not gone:
                raise
        return gone

    def _evict_into(
        self, gone: list[tuple[bytes, int]], needed: int, space: bytes | None, *, leave: bool
    ) -> None:
        fruitless = 0
        while needed > 0 and fruitless < _FRUITLESS:
            before = len(gone)
            with self._choosing:  # the pass over the entries is made without the lock of the node
                chosen = self._victims.take(needed, space, AT_ONCE)
            with self:
                if not chosen:
                    if self._reap():
                        continue
                    break
                now = clock.now()
                for victim in chosen:
                    if needed > 0 and self._victims.still(victim, now):
                        needed -= self.books.length[victim.entry]
                        block = self._evict(victim.entry, leave=leave)
                        gone.append((block, victim.entry))
            fruitless = 0 if len(gone) > before else fruitless + 1

    def _evict(self, entry: int, *, leave: bool) -> bytes:
        books = self.books
        block = books.id_of(entry)
        if leave:
            self._begin_hold(entry)
            books.words[at.LEAVING] += books.length[entry]
            books.leaving[entry] = 1 + self._lock.slot
        else:
            with self._change:
                self._unname(entry)
        return block

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the records that any process is demoting."""
        return self.books.words[at.LEAVING]

    def left(self, block: bytes, entry: int) -> bool:
        """End the leaving of ``entry`` and its hold; delete its record, if that is there still.

        Returns whether it was deleted.

        Raises:
            BackendFailed: the lock cannot be had; call it again later.
        """
        books, deleted = self.books, False
        with self:
            if books.leaving[entry] == 1 + self._lock.slot and books.named[entry]:
                with self._change:
                    books.leaving[entry] = 0
                    books.words[at.LEAVING] -= books.length[entry]
                    if books.id_of(entry) == block:
                        self._unname(entry)
                        deleted = True
            self._end_hold(entry)
        return deleted

    # --- recency, pins and quotas ----------------------------------------------------------------

    def use(self, entries: Sequence[int], stamps: Sequence[int]) -> None:
        """Record uses at ``stamps`` (see `clock`); an earlier one changes nothing. Takes no lock.

        An entry that was reused meanwhile gets the time of another record, which does no harm.
        """
        rows = np.array(entries, np.int64)
        there = rows >= 0
        rows = rows[there]
        self.books.used_all[rows] = np.maximum(
            self.books.used_all[rows], np.array(stamps, np.int64)[there]
        )

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes, for all processes."""
        with self:
            self.quotas.set(space, limit)
