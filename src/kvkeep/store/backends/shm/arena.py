"""`SharedArena`: records of an arena: drafts, publication, deletion, eviction, and recency."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends.shm import clock
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.books import DamagedIndex
from kvkeep.store.backends.shm.core import AT_ONCE, ArenaCore, in_space

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends.shm.books import Books
    from kvkeep.store.backends.shm.core import Hold
    from kvkeep.store.backends.shm.lock import NodeLock

__all__ = ["SharedArena", "check"]

_FRUITLESS: Final = 16  # choices of victims in a row that others used or took meanwhile
_AT_LEAST: Final = 64
_SHARE: Final = 16  # of the records are chosen at once
_MADE: Final = 256  # victims made of the columns at a time
_SPACES: Final = 64  # namespaces whose choices are kept
_FRESH: Final = 1.0  # seconds after which a choice is made anew


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

    def reserve(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Hold]:
        """Take extents for records of ``sizes`` bytes, under one lock; return drafts, held.

        Fewer than `AT_ONCE`, and one at least: the leading ones, up to the first without room.

        Raises:
            OutOfRoom: there is no room for the first; see `ShmBackend.reserve`.
            BackendFailed: the lock cannot be had, or the index is damaged; nothing is taken.
        """
        lengths = [self.extents.taken_by(size) for size in sizes[:AT_ONCE]]
        drafts: list[Hold] = []
        try:
            with self:
                found = self._together(lengths)
                if found >= 0:
                    self._draft(drafts, found, lengths, blocks, sizes)
                    return drafts
                for here, length in enumerate(lengths):
                    found = self._room(length, must=not drafts)
                    if found < 0:
                        break
                    self._draft(drafts, found, [length], blocks[here:], sizes[here:])
        except BackendFailed:
            self.release(drafts)
            raise
        return drafts

    def _together(self, lengths: Sequence[int]) -> int:
        """Return a free extent for all of ``lengths``, -1 if there is none."""
        if self.books.words[at.SPARES] < len(lengths):
            return -1
        return self.extents.find(sum(lengths))

    def _room(self, length: int, *, must: bool) -> int:
        """Return a free extent of ``length`` bytes or more; -1 if there is none, unless it must."""
        found = self.extents.find(length)
        if found < 0 and must and self._reap():
            found = self.extents.find(length)
        if found < 0 and must:
            free = self.books.words[at.FREE_BYTES]
            short = free < length <= self.books.layout.data_bytes
            raise OutOfRoom(length - free if short else length, self._place)
        return found

    def _draft(
        self,
        drafts: list[Hold],
        found: int,
        lengths: Sequence[int],
        blocks: Sequence[bytes],
        sizes: Sequence[int],
    ) -> None:
        """Append drafts with ``lengths`` bytes of the free extent ``found``, held."""
        books, words = self.books, self.books.words
        with self._change:
            generation = words[at.GENERATION]
            words[at.GENERATION] = generation + len(lengths)
            entries = self.extents.take(found, lengths)
            for entry, block, size in zip(entries, blocks, sizes, strict=False):
                generation += 1
                books.begin(entry, block, size, generation, self._holder)
                drafts.append((entry, generation))
                books.state[entry] = at.DRAFT
            with self._counting:
                self._held.update(dict.fromkeys(drafts[-len(entries) :], 1))

    def publish(self, drafts: Sequence[Hold], blocks: Sequence[bytes], *, hold: bool) -> None:
        """Make each draft the record of its block, in order; holds end unless ``hold``.

        Takes the lock once for `AT_ONCE` of them.

        Raises:
            BackendFailed: the lock cannot be had, or the index was damaged; leading drafts may be
                published. All stay held.
        """
        for start in range(0, len(drafts), AT_ONCE):
            with self:
                now = clock.now()
                for draft, block in zip(drafts[start:][:AT_ONCE], blocks[start:], strict=False):
                    self._publish(draft, block, now)
                    if not hold:
                        self._end_hold(draft)

    def _publish(self, draft: Hold, block: bytes, now: int) -> None:
        books, (entry, generation) = self.books, draft
        older = self.find_here(block)  # this may repair, and drop the draft
        mine = draft in self._held and books.generation[entry] == generation
        if books.state[entry] != at.DRAFT or not mine:
            raise BackendFailed(f"{self._place} was damaged and repaired; a draft is lost")
        with self._change:
            books.used[entry] = now
            if older >= 0:
                books.pinned[entry] = books.pinned[older]
            books.state[entry] = at.PUBLISHED  # from here on it survives this process
            bucket = books.bucket(block)
            books.link[entry] = books.heads[bucket]
            books.heads[bucket] = entry
            books.named[entry] = generation
            books.words[at.RECORDS] += 1
            self.quotas.count(block, books.size[entry])
            if older >= 0:
                self._unname(older)
        books.remember(block, entry, generation)

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
    ) -> list[tuple[bytes, Hold]]:
        """Delete the least recently used records of ``needed`` bytes; return their blocks.

        Fewer if no more may go: others are held or pinned. With ``leave`` they stay, marked as
        leaving and held, until `left`, which ends these holds. If ``space`` is given, records of
        that namespace alone.

        Raises:
            BackendFailed: the lock cannot be had, and no record went before.
        """
        gone: list[tuple[bytes, Hold]] = []
        try:
            self._evict_into(gone, needed, space, leave=leave)
        except BackendFailed:
            if not gone:
                raise
        return gone

    def _evict_into(
        self, gone: list[tuple[bytes, Hold]], needed: int, space: bytes | None, *, leave: bool
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
                        gone.append(self._evict(victim.entry, leave=leave))
            fruitless = 0 if len(gone) > before else fruitless + 1

    def _evict(self, entry: int, *, leave: bool) -> tuple[bytes, Hold]:
        books = self.books
        block, hold = books.id_of(entry), (entry, books.generation[entry])
        if leave:
            self._begin_hold(entry)
            books.words[at.LEAVING] += books.length[entry]
            books.leaving[entry] = 1 + self._lock.slot
        else:
            with self._change:
                self._unname(entry)
        return block, hold

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the records that any process is demoting."""
        return self.books.words[at.LEAVING]

    def left(self, block: bytes, hold: Hold) -> bool:
        """End the leaving of a record and its hold; delete it, if it is the block's still.

        Returns whether it was deleted.

        Raises:
            BackendFailed: the lock cannot be had; call it again later.
        """
        books, deleted, (entry, generation) = self.books, False, hold
        with self:
            if books.leaving[entry] == 1 + self._lock.slot and books.named[entry] == generation:
                with self._change:
                    books.leaving[entry] = 0
                    books.words[at.LEAVING] -= books.length[entry]
                    if books.id_of(entry) == block:
                        self._unname(entry)
                        deleted = True
            self._end_hold(hold)
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


def check(arena: SharedArena) -> None:
    """Assert that extents tile the data, and that chains, bins and counts agree with records."""
    with arena:
        books, words = arena.books, arena.books.words
        states = books.state.tolist()
        used = [entry for entry, state in enumerate(states) if state != at.UNUSED]
        assert all(entry < words[at.HIGH] for entry in used)
        used.sort(key=books.offset.__getitem__)
        end, before, free = 0, -1, []
        for entry in used:
            assert books.offset[entry] == end, f"entry {entry} does not begin at {end}"
            assert books.before[entry] == before, f"the entry before {entry} is not {before}"
            if before >= 0:
                assert books.after[before] == entry
                assert (states[before], states[entry]) != (at.FREE, at.FREE), "two free ones meet"
            if states[entry] == at.FREE:
                free.append(entry)
            else:
                assert books.proven(entry), f"entry {entry} does not prove itself"
                published = states[entry] == at.PUBLISHED
                assert books.named[entry] == books.generation[entry] * published
                assert published or books.is_held(entry), f"entry {entry} is lost"
            end, before = end + books.length[entry], entry
        assert end == books.layout.data_bytes, f"the last extent ends at {end}"
        assert words[at.FREE_BYTES] == sum(books.length[entry] for entry in free)
        assert sorted(_listed(arena)) == sorted(free), "bins and free extents differ"
        spare, entry = 0, words[at.SPARE]
        while entry >= 0:
            assert states[entry] == at.UNUSED
            spare, entry = spare + 1, books.link[entry]
        assert spare == words[at.SPARES] == books.layout.entries - len(used)
        named = [entry for entry in used if states[entry] == at.PUBLISHED]
        assert words[at.RECORDS] == len(named) == len({books.id_of(entry) for entry in named})
        for entry in named:
            assert books.walk(books.id_of(entry)) == entry, f"entry {entry} is not found"
        leaving = [entry for entry in named if books.leaving[entry]]
        assert words[at.LEAVING] == sum(books.length[entry] for entry in leaving)
        for number in range(words[at.QUOTA_COUNT]):
            quota = at.QUOTA_AT + 4 * number
            space = bytes(words[quota : quota + 2].cast("B"))
            mine = [entry for entry in named if books.id_of(entry).startswith(space)]
            assert words[quota + 3] == sum(books.size[entry] for entry in mine)


def _listed(arena: SharedArena) -> list[int]:
    """Return the free extents that the bins have."""
    books, found = arena.books, []
    for number in range(at.BINS):
        entry = books.words[at.BIN_AT + number]
        marked = bool(books.bitmap[number >> 3] & 1 << (number & 7))
        assert marked == (entry >= 0), f"bin {number} is marked wrongly"
        while entry >= 0:
            found.append(entry)
            entry = books.link[entry]
    return found


class ArenaPins:
    """The pins of all processes: a time in each entry. They outlive the process that made them.

    Thread safety: all methods.
    """

    def __init__(self, arena: ArenaCore) -> None:
        self._arena = arena
        self._books = arena.books

    def pin(self, blocks: Sequence[bytes], until: int, most: int) -> list[bytes]:
        """Pin ``blocks`` in order until then, while pins cover ``most`` bytes at most.

        ``until`` is a time of `clock`. Returns those that are pinned. Cost: a pass over the
        entries, besides the blocks.
        """
        books = self._books
        pinned: list[bytes] = []
        with self._arena:
            now = clock.now()
            covered = self._pinned_bytes(now)
            for block in blocks:
                entry = self._arena.find_here(block)
                if entry < 0:
                    continue
                if books.pinned[entry] <= now:
                    if covered + books.size[entry] > most:
                        break
                    covered += books.size[entry]
                books.pinned[entry] = max(books.pinned[entry], until)
                pinned.append(block)
        return pinned

    def set(self, ends: dict[bytes, int]) -> list[bytes]:
        """Let pins end at these times (see `clock`), 0: now; return the blocks that were pinned."""
        were: list[bytes] = []
        with self._arena:
            now = clock.now()
            for block, end in ends.items():
                entry = self._arena.find_here(block)
                if entry >= 0 and self._books.pinned[entry] > now:
                    self._books.pinned[entry] = end
                    were.append(block)
        return were

    def bytes(self) -> int:
        """Return the bytes that are pinned now. Cost: a pass over the entries."""
        return self._pinned_bytes(clock.now())

    def _pinned_bytes(self, now: int) -> int:
        high = self._books.words[at.HIGH]
        held = np.asarray(self._books.pinned)[:high] > now
        held &= self._books.named_all[:high] != 0
        return int(np.asarray(self._books.size)[:high][held].sum())


class Victim(NamedTuple):
    """A record as it was when it was chosen."""

    entry: int
    generation: int
    used: int


class Victims:
    """Chooses victims in the order of their last use, many at once.

    A pass over the entries chooses the oldest sixteenth of the records, so a victim costs about
    sixteen entries' share of a pass, whatever the arena holds. Uses after that are noticed: the
    record has another time of use then and is no longer a victim, and all others are younger than
    those chosen. So the order is that of one list, without a list that each use would have to
    change under the lock.

    Thread safety: none; each caller holds a lock of its own.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._chosen: dict[bytes | None, tuple[float, Iterator[Victim]]] = {}

    def take(self, needed: int, space: bytes | None, most: int) -> list[Victim]:
        """Return the next victims of a namespace, or of all, for ``needed`` bytes.

        They are ``most`` records at most.
        Check each under the arena's lock (`still`) before it goes.
        """
        taken: list[Victim] = []
        at_time, chosen = self._chosen.pop(space, (0.0, iter(())))
        if time.monotonic() - at_time <= _FRESH:
            needed = self._next(chosen, needed, most, taken)
        if not taken:
            at_time, chosen = time.monotonic(), self._choose(space)
            self._next(chosen, needed, most, taken)
        for oldest in list(self._chosen)[: 1 - _SPACES]:  # `forget` may clear it meanwhile
            self._chosen.pop(oldest, None)
        self._chosen[space] = at_time, chosen
        return taken

    def _next(self, chosen: Iterator[Victim], needed: int, most: int, taken: list[Victim]) -> int:
        while needed > 0 and len(taken) < most:
            victim = next(chosen, None)
            if victim is None:
                break
            taken.append(victim)
            needed -= self._books.length[victim.entry]
        return needed

    def still(self, victim: Victim, now: int) -> bool:
        """Whether a record is as it was when it was chosen, and may go."""
        books, entry = self._books, victim.entry
        if books.named[entry] != victim.generation or books.used[entry] != victim.used:
            return False
        return not (books.leaving[entry] or books.pinned[entry] > now or books.is_held(entry))

    def forget(self) -> None:
        """Choose anew next time: entries were freed that were not to go before."""
        self._chosen.clear()

    def _choose(self, space: bytes | None) -> Iterator[Victim]:
        books, now = self._books, clock.now()
        high = books.words[at.HIGH]
        fit = (books.named_all[:high] != 0) & ~books.holders_all[:high].any(1)
        fit &= (np.asarray(books.pinned)[:high] <= now) & (np.asarray(books.leaving)[:high] == 0)
        if space is not None:
            fit &= in_space(books, space, high)
        entries = np.flatnonzero(fit)
        used = books.used_all[entries]
        many = max(_AT_LEAST, len(entries) // _SHARE)
        if many < len(entries):
            oldest = np.argpartition(used, many)[:many]
            entries, used = entries[oldest], used[oldest]
        order = np.argsort(used, kind="stable")
        entries, used = entries[order], used[order]
        generations = books.named_all[entries]
        return _one_by_one(entries, generations, used)


def _one_by_one(entries: np.ndarray, generations: np.ndarray, used: np.ndarray) -> Iterator[Victim]:
    for start in range(0, len(entries), _MADE):
        part = slice(start, start + _MADE)
        rows = (column[part].tolist() for column in (entries, generations, used))
        for row in zip(*rows, strict=True):
            if row[1]:  # else it was deleted during the pass, which holds no lock
                yield Victim(*row)
