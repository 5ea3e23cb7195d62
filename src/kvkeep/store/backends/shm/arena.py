"""`SharedArena`: the steps that change an arena, each under the lock of the node."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.books import Books, Damaged
from kvkeep.store.backends.shm.extents import Extents
from kvkeep.store.backends.shm.quotas import Quotas
from kvkeep.store.backends.shm.repair import forget_dead, initialise, living, rebuild
from kvkeep.store.backends.shm.victims import Victims

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends.shm.lock import NodeLock

__all__ = ["SharedArena"]

_AT_ONCE: Final = 64  # blocks of one call that are changed under one lock
_REAP_EVERY: Final = 1.0  # seconds between two looks for dead processes, when room is short


class SharedArena:
    """Records in ``books``, changed under ``lock``; entries are numbers of the index.

    Each change makes a counter odd, stores its numbers, and makes the counter even. Whoever takes
    the lock and finds it odd rebuilds the index from the records (`repair`): the process before died.

    A *hold* keeps an entry's memory. Its bit in the column of holders belongs to this process, which
    counts its own; when the process dies, the kernel frees its slot and others drop its holds.

    Thread safety: all methods. Cost: some µs a call, besides waiting for other processes, which hold
    the lock for as long.
    """

    def __init__(self, books: Books, lock: NodeLock, place: str, *, new: bool) -> None:
        """Join the processes that have the arena open; call it under the lock."""
        self.books = books
        self.extents = Extents(books)
        self.quotas = Quotas(books)
        self._lock = lock
        self._place = place
        self._victims = Victims(books)
        self._held: dict[int, int] = {}  # entry → holds of this process
        self._late: list[int] = []  # holds to end when the lock can be taken again
        self._reaped = 0.0
        self._choosing = threading.Lock()
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
        for slot in range(at.SLOTS):
            if not words[at.SLOT_AT + slot] and self._lock.occupy(slot):
                words[at.SLOT_AT + slot] = os.getpid()
                break
        else:
            raise BackendFailed(
                f"{self._place} is open in {at.SLOTS} processes, which is the limit; close some"
            )
        self._drop_dead(living(self.books, self._lock.lives))
        self._word = self._lock.slot >> 6
        self._bit = 1 << (self._lock.slot & 63)

    # --- the lock, and changes under it ----------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self.books.words[at.CHANGES] & 1:
                self._repair()
            while self._late:
                self._end_hold(self._late.pop())
            yield

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Mark the index as changing; an exception leaves the mark, and the next one repairs."""
        words = self.books.words
        words[at.CHANGES] += 1
        yield
        words[at.CHANGES] += 1

    def _repair(self) -> None:
        rebuild(self.books, self._lock.lives)
        self.quotas.recount()
        self._victims.forget()
        self.books.words[at.CHANGES] += 1

    def _find(self, block: bytes) -> int:
        """Return the entry of ``block``, -1 if there is none; repairs the index if it must."""
        known = self.books.known(block)
        if known >= 0:
            return known
        for _ in range(2):
            try:
                entry = self.books.walk(block)
                if entry < 0 or self.books.proven(entry):
                    return entry
            except (Damaged, IndexError):
                pass
            self._repair()
        return -1

    # --- lookups ---------------------------------------------------------------------------------

    def find(self, block: bytes) -> int:
        """Return the entry of ``block``, -1 if there is none. Takes the lock only in doubt."""
        entry = self.books.find(block)
        if entry == -2:
            with self._locked():
                return self._find(block)
        return entry

    def find_all(self, blocks: Sequence[bytes]) -> list[int]:
        """Return `find` of each block."""
        entries = self.books.find_all(blocks)
        for place, entry in enumerate(entries):
            if entry == -2:
                entries[place] = self.find(blocks[place])
        return entries

    # --- holds -----------------------------------------------------------------------------------

    def hold(self, block: bytes) -> int:
        """Hold the entry of ``block`` and return it; -1 if there is none."""
        with self._locked():
            entry = self._find(block)
            if entry >= 0:
                self._begin_hold(entry)
            return entry

    def hold_all(self, blocks: Sequence[bytes]) -> list[int]:
        """`hold` each of ``blocks``."""
        entries: list[int] = []
        for start in range(0, len(blocks), _AT_ONCE):
            with self._locked():
                for block in blocks[start : start + _AT_ONCE]:
                    entry = self._find(block)
                    if entry >= 0:
                        self._begin_hold(entry)
                    entries.append(entry)
        return entries

    def release(self, entries: Sequence[int]) -> None:
        """End one hold of each of ``entries``; later, if the lock cannot be had now."""
        if self._lock.inherited:
            return
        self._late.extend(entries)
        try:
            with self._locked():
                pass
        except BackendFailed:
            return
        self._close_when_free()

    def _begin_hold(self, entry: int) -> None:
        held = self._held.get(entry, 0)
        if not held:
            self.books.holders[entry * at.HOLDER_WORDS + self._word] |= self._bit
        self._held[entry] = held + 1

    def _end_hold(self, entry: int) -> None:
        held = self._held.get(entry, 0)
        if held > 1:
            self._held[entry] = held - 1
            return
        self._held.pop(entry, None)
        books = self.books
        books.holders[entry * at.HOLDER_WORDS + self._word] &= ~self._bit
        if books.state[entry] in (at.DRAFT, at.UNNAMED) and not books.is_held(entry):
            with self._change():
                self.extents.free(entry)

    @property
    def held_bytes(self) -> int:
        """Bytes of the entries that this process holds."""
        return sum(self.books.length[entry] for entry in list(self._held))

    # --- records ---------------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int) -> int:
        """Take an extent for a record of ``size`` bytes; return its entry, held.

        Raises:
            OutOfRoom: see `ShmBackend.reserve`.
        """
        books, words = self.books, self.books.words
        length = self.extents.taken_by(size)
        with self._locked():
            found = self.extents.find(length)
            if found < 0 and self._reap():
                found = self.extents.find(length)
            if found < 0:
                free = words[at.FREE_BYTES]
                short = free < length <= books.layout.data_bytes
                raise OutOfRoom(length - free if short else length, self._place)
            with self._change():
                entry = self.extents.take(found, length)
                generation = words[at.GENERATION] + 1
                words[at.GENERATION] = generation
                books.set_id(entry, block)
                books.generation[entry], books.size[entry] = generation, size
                books.named[entry] = books.leaving[entry] = books.pinned[entry] = 0
                for word in range(at.HOLDER_WORDS):
                    books.holders[entry * at.HOLDER_WORDS + word] = 0
                self._held.pop(entry, None)
                self._begin_hold(entry)
                books.proof[entry] = at.proof_of(
                    crc32(block), books.offset[entry], length, size, generation
                )
                books.state[entry] = at.DRAFT
        return entry

    def publish(self, entry: int, block: bytes, *, hold: bool) -> None:
        """Make the draft ``entry`` the record of ``block``; its hold ends unless ``hold``."""
        books = self.books
        with self._locked():
            mine = entry in self._held and books.id_of(entry) == block
            if books.state[entry] != at.DRAFT or not mine:
                raise BackendFailed(f"{self._place} was damaged and repaired; a draft is lost")
            older = self._find(block)
            with self._change():
                books.used[entry] = time.time_ns()
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
        for start in range(0, len(blocks), _AT_ONCE):
            with self._locked():
                for block in blocks[start : start + _AT_ONCE]:
                    entry = self._find(block)
                    sizes.append(0 if entry < 0 else self.books.size[entry])
                    if entry >= 0:
                        with self._change():
                            self._unname(entry)
        return sizes

    # --- eviction --------------------------------------------------------------------------------

    def evict(self, needed: int, space: bytes | None, *, leave: bool = False) -> list[bytes]:
        """Delete the least recently used records of ``needed`` bytes; return their blocks.

        Fewer if no more may go: others are held or pinned. With ``leave`` they stay, marked as
        leaving and held, until `left`. If ``space`` is given, records of that namespace alone.
        """
        gone: list[bytes] = []
        while needed > 0:
            with self._choosing:  # the pass over the entries is made without the lock of the node
                chosen = self._victims.take(needed, space, _AT_ONCE)
            with self._locked():
                if not chosen:
                    if self._reap():
                        continue
                    break
                now = time.time_ns()
                for victim in chosen:
                    if needed > 0 and self._victims.still(victim, now):
                        needed -= self.books.length[victim.entry]
                        gone.append(self._evict(victim.entry, leave=leave))
        return gone

    def _evict(self, entry: int, *, leave: bool) -> bytes:
        books = self.books
        block = books.id_of(entry)
        if leave:
            self._begin_hold(entry)
            books.words[at.LEAVING] += books.length[entry]
            books.leaving[entry] = 1 + self._lock.slot
        else:
            with self._change():
                self._unname(entry)
        return block

    def left(self, block: bytes, entry: int, *, delete: bool) -> None:
        """End the leaving of ``entry`` and its hold; ``delete`` it if ``block`` is still there."""
        books = self.books
        with self._locked():
            if books.leaving[entry] == 1 + self._lock.slot and books.named[entry]:
                with self._change():
                    books.leaving[entry] = 0
                    books.words[at.LEAVING] -= books.length[entry]
                    if delete and books.id_of(entry) == block:
                        self._unname(entry)
            self._end_hold(entry)

    def _reap(self) -> bool:
        """Take back what dead processes held; return whether there was anything, under the lock."""
        if time.monotonic() - self._reaped < _REAP_EVERY:
            return False
        self._reaped = time.monotonic()
        words = self.books.words
        taken = [slot for slot in range(at.SLOTS) if words[at.SLOT_AT + slot]]
        alive = living(self.books, self._lock.lives)
        if len(alive) == len(taken):
            return False
        self._drop_dead(alive)
        return True

    def _drop_dead(self, alive: list[int]) -> None:
        with self._change():
            for entry in forget_dead(self.books, alive).tolist():
                self.extents.free(entry)
        self._victims.forget()

    # --- recency, pins and quotas ----------------------------------------------------------------

    def use(self, entries: Sequence[int], stamps: Sequence[int]) -> None:
        """Record uses at ``stamps`` (Unix ns); an earlier one changes nothing. Takes no lock.

        An entry that was reused meanwhile gets the time of another record, which does no harm.
        """
        rows = np.array(entries, np.int64)
        there = rows >= 0
        rows = rows[there]
        self.books.used_all[rows] = np.maximum(
            self.books.used_all[rows], np.array(stamps, np.int64)[there]
        )

    def pin(self, blocks: Sequence[bytes], until: int, most: int) -> list[bytes]:
        """Pin ``blocks`` until then (Unix ns), in order, while pins cover ``most`` bytes at most.

        Returns those that are pinned. Cost: a pass over the entries, besides the blocks.
        """
        books = self.books
        pinned: list[bytes] = []
        with self._locked():
            now = time.time_ns()
            covered = self._pinned_bytes(now)
            for block in blocks:
                entry = self._find(block)
                if entry < 0:
                    continue
                if books.pinned[entry] <= now:
                    if covered + books.size[entry] > most:
                        break
                    covered += books.size[entry]
                books.pinned[entry] = max(books.pinned[entry], until)
                pinned.append(block)
        return pinned

    def set_pins(self, ends: dict[bytes, int]) -> list[bytes]:
        """Let pins end at these times (Unix ns), 0: now; return the blocks that were pinned."""
        were: list[bytes] = []
        with self._locked():
            now = time.time_ns()
            for block, end in ends.items():
                entry = self._find(block)
                if entry >= 0 and self.books.pinned[entry] > now:
                    self.books.pinned[entry] = end
                    were.append(block)
        self._victims.forget()
        return were

    def pinned_bytes(self) -> int:
        """Return the bytes that are pinned now. Cost: a pass over the entries."""
        return self._pinned_bytes(time.time_ns())

    def _pinned_bytes(self, now: int) -> int:
        high = self.books.words[at.HIGH]
        held = np.asarray(self.books.pinned)[:high] > now
        held &= self.books.named_all[:high] != 0
        return int(np.asarray(self.books.size)[:high][held].sum())

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes, for all processes."""
        with self._locked():
            self.quotas.set(space, limit)

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
                with self._locked():
                    self.books.words[at.SLOT_AT + self._lock.slot] = 0
            except BackendFailed:
                pass  # the kernel frees the slot when the descriptor closes; others notice
        self._lock.close()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep all processes from changing the arena, to `check` it."""
        with self._locked():
            yield
