"""Rebuilds an index from its records, and takes back what dead processes held.

The records are the truth: an entry counts if it is a draft, published or unnamed, if its extent
lies in the data and overlaps no other, and if it proves itself. Chains, bins,
neighbours and counts are computed from these. So a process may die between any two stores into
memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.shm import clock
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.layout import HOLDER_WORDS, SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.store.backends.shm.books import Books

__all__ = ["forget_dead", "initialise", "living", "rebuild"]

_LAST_GENERATION: Final = 1 << 62


def initialise(books: Books) -> None:
    """Make the index of a new file, which is all zeros, that of an empty arena."""
    rebuild(books, lambda _slot: False)


def living(books: Books, lives: Callable[[int], bool]) -> list[int]:
    """Return the slots whose processes live; free the others."""
    alive = []
    for slot in range(SLOTS):
        if books.words[at.SLOT_AT + slot]:
            if lives(slot):
                alive.append(slot)
            else:
                books.words[at.SLOT_AT + slot] = 0
    return alive


def _holding(alive: Iterable[int]) -> np.ndarray:
    """Return the words of holders in which only ``alive`` slots have their bit."""
    words = [0] * HOLDER_WORDS
    for slot in alive:
        words[slot >> 6] |= 1 << (slot & 63)
    return np.array(words, np.uint64)


def forget_dead(books: Books, alive: list[int]) -> np.ndarray:
    """Drop the holds of all but ``alive`` slots; return the entries that only these kept.

    Cost: one pass over the entries in use. Call it when a process has died, not on each operation.
    """
    high = books.words[at.HIGH]
    holders = books.holders_all[:high]
    holders &= _holding(alive)
    state = np.asarray(books.state)[:high]
    gone = ~holders.any(1) & ((state == at.DRAFT) | (state == at.UNNAMED))
    leaving = np.asarray(books.leaving)[:high]
    stranded = np.flatnonzero((leaving != 0) & ~np.isin(leaving - 1, alive))
    leaving[stranded] = 0
    lengths = np.asarray(books.length)[:high]
    published = (state == at.PUBLISHED) & (leaving != 0)
    books.words[at.LEAVING] = int(lengths[published].sum())
    return np.flatnonzero(gone)


def rebuild(books: Books, lives: Callable[[int], bool]) -> None:
    """Rebuild everything derived from the records; leaves the index in the middle of a change.

    Runs again from the beginning if it is interrupted.
    Cost: one to three seconds for a million entries.
    """
    words = books.words
    words[at.CHANGES] |= 1
    words[at.REPAIRS] += 1
    alive = living(books, lives)
    np.asarray(books.holders_all)[:] &= _holding(alive)
    state = np.asarray(books.state)
    published_before = int((state == at.PUBLISHED).sum())
    taken = _valid(books)
    lost = published_before - int((state[taken] == at.PUBLISHED).sum())
    taken = _without_twins(books, taken)
    rest = np.ones(books.layout.entries, bool)
    rest[taken] = False
    state[rest] = at.UNUSED
    for column in (books.named, books.generation, books.leaving):
        np.asarray(column)[rest] = 0
    np.asarray(books.proof)[rest] = -1
    books.holders_all[rest] = 0
    words[at.LOST] += lost
    generations = np.asarray(books.generation)
    named = state == at.PUBLISHED
    np.asarray(books.named)[:] = np.where(named, generations, 0)
    leaving = np.asarray(books.leaving)
    leaving[~np.isin(leaving - 1, alive) | ~named] = 0
    last = words[at.GENERATION]  # never a number that a process may remember
    fresh = last if 0 <= last < _LAST_GENERATION else time.time_ns()
    words[at.GENERATION] = max(fresh, int(generations.max()))
    np.minimum(books.used_all, clock.now(), out=books.used_all)
    words[at.RECORDS] = int(named.sum())
    words[at.LEAVING] = int(np.asarray(books.length)[leaving != 0].sum())
    _chain(books, np.flatnonzero(named))
    _tile(books, taken)


def _valid(books: Books) -> np.ndarray:
    """Return the entries that are taken, prove themselves, and overlap no other, by address."""
    state = np.asarray(books.state)
    taken = np.flatnonzero((state >= at.DRAFT) & (state <= at.UNNAMED))
    held = books.holders_all[taken].any(1)
    taken = taken[held | (state[taken] == at.PUBLISHED)]  # nobody fills or reads the others
    checks = np.fromiter((crc32(books.id_of(entry)) for entry in taken), np.int64, len(taken))
    if len(taken):
        taken = taken[books.proven_all(taken, checks)]
    offset, length = np.asarray(books.offset), np.asarray(books.length)
    generation = np.asarray(books.generation)
    whole = (offset[taken] % ALIGNMENT == 0) & (length[taken] % ALIGNMENT == 0)
    numbered = (generation[taken] > 0) & (generation[taken] < _LAST_GENERATION)
    taken = taken[whole & numbered]
    taken = taken[np.argsort(offset[taken], kind="stable")]
    ends = np.maximum.accumulate(offset[taken] + length[taken])
    overlaps = np.zeros(len(taken), bool)
    if len(taken) > 1:
        meets = offset[taken[1:]] < ends[:-1]
        overlaps[1:] |= meets
        overlaps[:-1] |= meets
    valid: np.ndarray = taken[~overlaps]
    return valid


def _without_twins(books: Books, taken: np.ndarray) -> np.ndarray:
    """Keep the newest of the published records of a block: a replacement was interrupted."""
    state = np.asarray(books.state)
    newest: dict[bytes, int] = {}
    dropped: set[int] = set()
    for entry in taken[state[taken] == at.PUBLISHED].tolist():
        block = books.id_of(entry)
        other = newest.setdefault(block, entry)
        if other == entry:
            continue
        older = min(entry, other, key=books.generation.__getitem__)
        newest[block] = other if older == entry else entry
        if books.is_held(older):
            state[older] = at.UNNAMED
        else:
            dropped.add(older)
    if not dropped:
        return taken
    return taken[~np.isin(taken, list(dropped))]


def _chain(books: Books, named: np.ndarray) -> None:
    """Make the chains of the published records."""
    heads, link = books.heads_all, books.link_all
    heads[:] = -1
    buckets = np.fromiter((books.bucket(books.id_of(e)) for e in named), np.int64, len(named))
    order = named[np.argsort(buckets, kind="stable")]
    buckets.sort()
    link[order] = -1
    first = np.ones(len(order), bool)
    first[1:] = buckets[1:] != buckets[:-1]
    heads[buckets[first]] = order[first]
    follows = np.flatnonzero(~first)
    link[order[follows - 1]] = order[follows]


def _tile(books: Books, taken: np.ndarray) -> None:
    """Make the free extents between ``taken``, in order, the neighbours, and the unused entries."""
    from kvkeep.store.backends.shm.extents import Extents  # noqa: PLC0415 - both use the books

    words, entries = books.words, books.layout.entries
    extents = Extents(books)
    np.asarray(words)[at.BIN_AT : at.BIN_AT + at.BINS] = -1
    books.bitmap[:] = bytes(len(books.bitmap))
    unused = np.flatnonzero(np.asarray(books.state) == at.UNUSED)
    used = 0
    end, before, free = 0, -1, 0

    def place(entry: int) -> None:
        nonlocal before
        books.before[entry], books.after[entry] = before, -1
        if before >= 0:
            books.after[before] = entry
        before = entry

    def gap(until: int) -> None:
        nonlocal used, free
        if until > end and used < len(unused):
            entry = int(unused[used])
            used += 1
            books.offset[entry], books.length[entry] = end, until - end
            books.state[entry] = at.FREE
            place(entry)
            extents.enter(entry)
            free += until - end

    for entry in taken.tolist():
        gap(books.offset[entry])
        place(entry)
        end = books.offset[entry] + books.length[entry]
    gap(books.layout.data_bytes)
    spare = unused[used:]
    books.link_all[spare[:-1]] = spare[1:]
    if len(spare):
        books.link_all[spare[-1]] = -1
    words[at.SPARE] = int(spare[0]) if len(spare) else -1
    words[at.SPARES] = len(spare)
    in_use = np.flatnonzero(np.asarray(books.state) != at.UNUSED)
    words[at.HIGH] = int(in_use.max()) + 1 if len(in_use) else 0
    words[at.FREE_BYTES] = free
    assert entries - len(spare) == len(in_use)
