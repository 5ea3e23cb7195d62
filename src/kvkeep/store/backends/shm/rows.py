"""`ArenaRows`: the records of a shared arena, the free memory between them, and who holds what.

A row is one record: block id, extent, size, a unique generation, a checksum over these, who holds
it, and whether it is published. Rows are the truth. Free extents and counts are derived from them,
and `recount` makes them anew where a process died in the middle of a change.

A *hold* keeps a row's memory: a bit of this process in the row, of which this process counts its
own. The kernel frees the slot of a process that dies, and others drop its bits then. A row without
a name and without holds is free.

Times are nanoseconds since the machine was started: all processes read the same clock, and it never
jumps, as Unix time does when it is set.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self
from zlib import crc32

import numpy as np

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.shm import segment as at
from kvkeep.store.backends.shm.lock import SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvkeep.store.backends.shm.segment import OpenedArena

__all__ = ["AT_ONCE", "ArenaRows", "Hold", "extent", "from_unix", "now", "to_unix"]

AT_ONCE: Final = 64
"""Blocks of one call that are changed under one lock."""

Hold = tuple[int, int]
"""A row and the generation of the record in it: another record of the row is not held."""

_NS: Final = 1_000_000_000
_FAR: Final = 4e9  # seconds from now, at most
_REAP_EVERY: Final = 1.0  # seconds between two looks for dead processes, when room is short
_LAST_GENERATION: Final = 1 << 62
_HOLDER_BYTES: Final = at.COLUMNS["holders"]
_HOLDER_WORDS: Final = _HOLDER_BYTES // 8
_NOBODY: Final = bytes(_HOLDER_BYTES)
_PROOF: Final = 0x6B766B65 << 32  # above a checksum: so zeros prove nothing
_NUMBERS: Final = struct.Struct("=qqqq")
_SPARE_NAMES: Final = 4096
_SOUND: Final = (BackendFailed, InvalidValue, OutOfRoom)  # raised between changes, not in one


def now() -> int:
    """Return the time, in nanoseconds since the machine was started."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def from_unix(seconds: float) -> int:
    """Return the time of this clock at a Unix time; times outside of its range are cut off."""
    return now() + int(min(max(seconds - time.time(), -_FAR), _FAR) * _NS)


def to_unix(when: int) -> float:
    """Return the Unix time, in seconds, at a time of this clock."""
    return time.time() + (when - now()) / _NS


def extent(size: int) -> int:
    """Return the bytes that a record of ``size`` bytes takes: at least 4096."""
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


class DamagedRows(Exception):
    """Numbers contradict each other: somebody wrote there by accident. `recount` mends it."""


class ArenaRows:
    """The columns of an arena, mapped. As a context manager it takes the lock of the node.

    Whoever gets the lock of a process that died with it counts everything anew first. Single
    numbers are read and written through memoryviews, which takes 35 ns; arrays serve whole columns.
    A store of one number is one instruction, so it is never seen in part.

    Thread safety: `find`, `find_all`, `is_held` and holds want no lock. Everything else wants it.

    Locks: that of the node, then `_mutex`, which guards the names and the counts of holds of this
    process.

    Attributes:
        words: see `segment`.
        leaving_at: the word with the bytes that this process demotes.
        data: the memory of the records; `memory` has the rows as well.
    """

    def __init__(self, opened: OpenedArena, place: str) -> None:
        """Join the processes that have the arena open; call it under the lock."""
        self.layout = layout = opened.layout
        self.lock = opened.lock
        self.map = mmap.mmap(opened.fd, layout.total)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system decides whether shared memory has huge pages
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memory = memoryview(self.map)
        self.words = memory[at.HEADER_BYTES : layout.recent_at].cast("q")
        self._recent = memory[layout.recent_at :][: 8 * at.RECENT].cast("q")
        columns = {
            name: memory[layout.column_at(name) :][: width * (layout.rows + 1)]
            for name, width in at.COLUMNS.items()
        }
        numbers = {name: columns[name].cast("q") for name in at.NUMBERS}
        (
            self.generation, self.named, self.offset, self.length, self.size, self.used,
            self.pinned, self._proof, self._free_offset, self._free_length,
        ) = numbers.values()  # fmt: skip
        self._free_lengths = np.asarray(self._free_length)
        self._holders = columns["holders"].cast("Q")
        self._busy = columns["busy"]
        self.data = memory[layout.data_at : layout.total]
        self._ids_at, self._holders_at, self._busy_at = map(
            layout.column_at, ("ids", "holders", "busy")
        )
        self._place = place
        self._mutex = threading.Lock()
        self._names: dict[bytes, Hold] = {}  # block → row and generation, also of removed records
        self._seen = -1  # `PUBLISHED` when `_names` was up to date
        self._unproven: set[int] = set()  # rows of `_names` to be proven before they are held
        self._held: dict[Hold, int] = {}  # holds of this process; from and to 0 under the lock
        self._late: list[tuple[Hold, bool]] = []  # to end when the lock can be had; see `end_hold`
        self._hidden: set[Hold] = set()  # records to remove then; until then they are not found
        self._quotas: dict[bytes, int] = {}  # space → its words
        self._reaped = 0.0
        self._closing = False
        self._join()

    def _join(self) -> None:
        words = self.words
        alive = self._living()
        if not alive:
            words[at.QUOTA_COUNT] = 0
        if not alive or words[at.CHANGING]:  # nobody else has it open: check what lies there
            self.recount()
        words[at.CHANGING] = 1
        self._drop_dead()  # before a slot is taken, or holds of a dead process would be this one's
        for slot in range(SLOTS):
            if not words[at.SLOT_AT + slot] and self.lock.occupy(slot):
                words[at.SLOT_AT + slot] = os.getpid()
                break
        else:
            words[at.CHANGING] = 0
            raise BackendFailed(
                f"{self._place} is open in {SLOTS} processes, which is the limit; close some"
            )
        self.leaving_at = at.LEAVING_AT + slot
        self._word, self._bit = slot >> 6, 1 << (slot & 63)
        self._holder = self._bit.to_bytes(8, "little").rjust(8 * self._word + 8, b"\0")
        self._holder = self._holder.ljust(_HOLDER_BYTES, b"\0")
        words[at.CHANGING] = 0
        self._learn()

    # --- the lock --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.lock.acquire()
        try:
            if self.words[at.CHANGING]:
                self.recount()
            self.words[at.CHANGING] = 1
            for _ in range(min(len(self._late), AT_ONCE)):
                self.end_hold(*self._late.pop())
            while self._hidden:
                row, generation = hidden = next(iter(self._hidden))
                if self.named[row] == generation:
                    self.unname(row)
                self._hidden.discard(hidden)
        except BaseException:
            self.lock.release()  # marked: the next one counts anew
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, _SOUND):
            self.words[at.CHANGING] = 0
        self.lock.release()
        if isinstance(error, (DamagedRows, IndexError, ValueError)) and not isinstance(
            error, _SOUND
        ):
            raise BackendFailed(
                f"{self._place}: its rows contradict each other ({error}); the next use counts "
                "them anew"
            ) from error

    def _living(self) -> list[int]:
        """Return the slots whose processes live; free the others."""
        alive = []
        for slot in range(SLOTS):
            if self.words[at.SLOT_AT + slot]:
                if self.lock.lives(slot):
                    alive.append(slot)
                else:
                    self.words[at.SLOT_AT + slot] = self.words[at.LEAVING_AT + slot] = 0
        return alive

    def reap(self) -> bool:
        """Drop what dead processes held; return whether there was anything."""
        if time.monotonic() - self._reaped < _REAP_EVERY:
            return False
        self._reaped = time.monotonic()
        taken = [slot for slot in range(SLOTS) if self.words[at.SLOT_AT + slot]]
        if all(map(self.lock.lives, taken)):
            return False
        self._drop_dead()
        return True

    def _drop_dead(self) -> None:
        """Cost: a pass over the rows in use."""
        high = self.words[at.HIGH]
        nobody = self._hold_only(self._living(), high)
        busy = np.frombuffer(self._busy, np.uint8)[:high] != 0
        named = np.asarray(self.named)[:high] != 0
        for row in np.flatnonzero(nobody & busy & ~named).tolist():
            self.free(row)

    def _hold_only(self, alive: Sequence[int], rows: int) -> np.ndarray:
        """Drop the holds of dead processes; return which of the first ``rows`` nobody holds."""
        bits = np.zeros(_HOLDER_WORDS, np.uint64)
        for slot in alive:
            bits[slot >> 6] |= np.uint64(1 << (slot & 63))
        holders = np.asarray(self._holders).reshape(-1, _HOLDER_WORDS)[:rows]
        holders &= bits
        return ~self.held(rows)

    # --- rows ------------------------------------------------------------------------------------

    def id_of(self, row: int) -> bytes:
        """Return the block id of a row."""
        begin = self._ids_at + BLOCK_ID_BYTES * row
        return self.map[begin : begin + BLOCK_ID_BYTES]

    def view(self, row: int) -> memoryview:
        """Return the record of a row."""
        begin = self.offset[row]
        return self.data[begin : begin + self.size[row]]

    def _prove(self, row: int, block: bytes) -> int:
        numbers = self.generation[row], self.offset[row], self.length[row], self.size[row]
        return _PROOF | crc32(_NUMBERS.pack(*numbers), crc32(block))

    def _is_proven(self, row: int, block: bytes) -> bool:
        """Whether the numbers of a row are what was written together."""
        offset, length = self.offset[row], self.length[row]
        return (
            self._proof[row] == self._prove(row, block)
            and offset >= 0
            and 0 <= self.size[row] <= length <= self.layout.data_bytes - offset
            and not (offset | length) % ALIGNMENT
            and 0 < self.generation[row] < _LAST_GENERATION
        )

    def _proven(self, rows: np.ndarray) -> dict[int, bytes]:
        """Return those of ``rows`` that prove themselves, as `_is_proven`, with their blocks.

        Cost: about a µs for each.
        """
        columns = [
            np.asarray(column)[rows]
            for column in (self.generation, self.offset, self.length, self.size)
        ]
        generation, offset, length, size = columns
        sound = (generation > 0) & (generation < _LAST_GENERATION) & (offset >= 0) & (size >= 0)
        sound &= (size <= length) & (length <= self.layout.data_bytes - offset)
        sound &= (offset | length) % ALIGNMENT == 0
        numbers, width = np.stack(columns, 1).tobytes(), _NUMBERS.size
        blocks = self._ids(rows)
        checks = [
            crc32(numbers[width * place : width * (place + 1)], crc32(block))
            for place, block in enumerate(blocks)
        ]
        sound &= np.asarray(self._proof)[rows] == np.array(checks, np.int64) + _PROOF
        return {int(rows[place]): blocks[place] for place in np.flatnonzero(sound)}

    def _ids(self, rows: np.ndarray) -> list[bytes]:
        ids = np.frombuffer(self.map, f"V{BLOCK_ID_BYTES}", self.layout.rows, self._ids_at)
        blocks: list[bytes] = ids[rows].tolist()
        return blocks

    def draft(self, blocks: Sequence[bytes], sizes: Sequence[int], offset: int) -> list[Hold]:
        """Make rows of records that lie one behind the other, from ``offset`` on; hold them."""
        words, drafts = self.words, []
        for block, size in zip(blocks, sizes, strict=True):
            generation = words[at.GENERATION] + 1
            words[at.GENERATION] = generation
            row = self._next_unused()
            self.named[row] = self.pinned[row] = 0
            begin = self._ids_at + BLOCK_ID_BYTES * row
            self.map[begin : begin + BLOCK_ID_BYTES] = block
            begin = self._holders_at + _HOLDER_BYTES * row
            self.map[begin : begin + _HOLDER_BYTES] = self._holder
            self.generation[row], self.offset[row] = generation, offset
            self.length[row], self.size[row] = extent(size), size
            self._proof[row] = self._prove(row, block)
            self._busy[row] = 1
            self.count(block, size)
            words[at.BUSY] += 1
            words[at.LOW] = row + 1
            words[at.HIGH] = max(words[at.HIGH], row + 1)
            offset += self.length[row]
            drafts.append((row, generation))
        with self._mutex:
            self._held.update(dict.fromkeys(drafts, 1))
        return drafts

    def unused(self) -> int:
        """Return how many rows are not in use."""
        unused: int = self.layout.rows - self.words[at.BUSY]
        if not 0 <= unused <= self.layout.rows:
            raise DamagedRows(f"{self.words[at.BUSY]} rows are in use")
        return unused

    def _next_unused(self) -> int:
        row = self.map.find(
            b"\0", self._busy_at + self.words[at.LOW], self._busy_at + self.layout.rows
        )
        if row < 0:
            raise DamagedRows("all rows are in use, and not all are counted")
        return row - self._busy_at

    def name(self, draft: Hold) -> None:
        """Make a draft the record of its block; from here on it survives this process."""
        row, generation = draft
        words, block = self.words, self.id_of(row)
        with self._mutex:
            fine = draft in self._held
        if not fine or self.generation[row] != generation or self.named[row]:
            raise BackendFailed(f"{self._place} was damaged and counted anew; a draft is lost")
        older = self.find(block)
        self.used[row] = now()
        if older is not None:
            self.pinned[row] = self.pinned[older[0]]
        self.named[row] = generation
        published = words[at.PUBLISHED] + 1
        self._recent[published % at.RECENT] = row
        words[at.PUBLISHED] = published
        words[at.RECORDS] += 1
        with self._mutex:
            if self._seen == published - 1:
                self._seen, self._names[block] = published, draft
        if older is not None:
            self.unname(older[0])

    def unname(self, row: int) -> None:
        """Remove a published record; its memory is free at the end of its last hold."""
        block = self.id_of(row)
        self.named[row] = 0
        self.words[at.RECORDS] -= 1
        with self._mutex:
            there = self._names.get(block)
            if there is not None and there[0] == row:
                del self._names[block]
        if not self.is_held(row):
            self.free(row)

    # --- free memory -----------------------------------------------------------------------------

    def allocate(self, length: int) -> int:
        """Take ``length`` bytes of the first free extent that has as many.

        Returns the offset, -1 if there is none. Cost: some µs, and one more for each thousand free
        extents; so `free`.
        """
        words, count = self.words, self.words[at.FREE_EXTENTS]
        place = int((self._free_lengths[:count] >= length).argmax()) if count > 0 else 0
        offset, rest = self._free_offset[place], self._free_length[place] - length
        if count <= 0 or rest < 0:
            return -1
        if not 0 <= offset <= self.layout.data_bytes - length - rest or offset % ALIGNMENT:
            raise DamagedRows(f"a free extent begins at {offset}")
        if rest:
            self._free_offset[place], self._free_length[place] = offset + length, rest
        else:
            self._replace_extents(place, place + 1)
        words[at.FREE_BYTES] -= length
        return offset

    def free(self, row: int) -> None:
        """End a row, and merge its memory with the free extents beside it."""
        words, offsets, lengths = self.words, self._free_offset, self._free_length
        begin, length = self.offset[row], self.length[row]
        self._busy[row] = 0
        self.count(self.id_of(row), -self.size[row])
        self._proof[row] = -1
        words[at.BUSY] -= 1
        words[at.LOW] = min(words[at.LOW], row)
        count, end = words[at.FREE_EXTENTS], begin + length
        first = behind = bisect_left(offsets, begin, 0, count)
        if behind < count and offsets[behind] == end:
            end, behind = end + lengths[behind], behind + 1
        if first and offsets[first - 1] + lengths[first - 1] == begin:
            first -= 1
            begin = offsets[first]
        self._replace_extents(first, behind, (begin, end - begin))
        words[at.FREE_BYTES] += length

    def _replace_extents(self, first: int, behind: int, *extents: tuple[int, int]) -> None:
        """Replace the free extents from ``first`` to ``behind`` by ``extents``, in order."""
        count = self.words[at.FREE_EXTENTS]
        begin, end = first + len(extents), count + first + len(extents) - behind
        for column in (self._free_offset, self._free_length):
            if begin != behind:
                column[begin:end] = column[behind:count]
        for place, extent in enumerate(extents, first):
            self._free_offset[place], self._free_length[place] = extent
        self.words[at.FREE_EXTENTS] = end

    # --- names: which blocks are here ------------------------------------------------------------

    def find(self, block: bytes) -> Hold | None:
        """Return row and generation of the record of ``block``, None if there is none.

        Cost: 0.2 µs, and about 2 µs for each record that others published since the last call. This
        process remembers all records, at about 300 bytes each.
        """
        there = self._names.get(block)
        if there is None or self.named[there[0]] != there[1]:
            if self._seen == self.words[at.PUBLISHED]:
                return None
            self._learn()
            there = self._names.get(block)
            if there is None or self.named[there[0]] != there[1]:
                return None
        return None if there in self._hidden else there

    def find_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Return `find` of each block."""
        if self._hidden:
            with suppress(BackendFailed), self:  # which removes them
                pass
            if self._hidden:
                return [self.find(block) for block in blocks]
        records, named = list(map(self._names.get, blocks)), self.named
        for place, there in enumerate(records):
            if there is None or named[there[0]] != there[1]:
                records[place] = self.find(blocks[place])
        return records

    def _learn(self) -> None:
        """Read what others published; all rows, where that was too much, or at first.

        A row that is changed meanwhile is named with a generation that it has no longer.
        """
        words = self.words
        with self._mutex:
            names, last = self._names, words[at.PUBLISHED]
            some = range(self._seen + 1, last + 1)
            few = 0 <= self._seen <= last and len(some) < at.RECENT
            few &= len(names) <= 2 * words[at.RECORDS] + _SPARE_NAMES
            fresh = [self._recent[number % at.RECENT] for number in some] if few else []
            if few and words[at.PUBLISHED] - self._seen < at.RECENT:  # else written over meanwhile
                fresh = [row for row in fresh if 0 <= row < self.layout.rows]
                generations = [self.named[row] for row in fresh]
                blocks = list(map(self.id_of, fresh))
            else:
                named, names = np.array(self.named[: self.layout.rows]), {}
                rows = np.flatnonzero(named)
                fresh, generations, blocks = rows.tolist(), named[rows].tolist(), self._ids(rows)
            for block, row, generation in zip(blocks, fresh, generations, strict=True):
                if generation:
                    names[block] = row, generation
            self._unproven.update(fresh)
            self._names, self._seen = names, last

    # --- holds -----------------------------------------------------------------------------------

    def held(self, rows: int) -> np.ndarray:
        """Return which of the first ``rows`` any process holds."""
        holders = np.asarray(self._holders).reshape(-1, _HOLDER_WORDS)[:rows]
        return np.asarray(holders.any(1))

    def is_held(self, row: int) -> bool:
        """Whether any process holds a row."""
        begin = self._holders_at + _HOLDER_BYTES * row
        return self.map[begin : begin + _HOLDER_BYTES] != _NOBODY

    def hold_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Hold the record of each of ``blocks``, None if there is none.

        Takes the lock of the node once for `AT_ONCE` blocks that this process does not hold yet.

        Raises:
            BackendFailed: the lock cannot be had; nothing more is held than before.
        """
        holds, missing = self.find_all(blocks), []
        with self._mutex:
            for place, hold in enumerate(holds):
                if hold is not None and hold in self._held:
                    self._held[hold] += 1
                elif hold is not None:
                    holds[place] = None
                    missing.append(place)
        try:
            for start in range(0, len(missing), AT_ONCE):
                with self:
                    for place in missing[start : start + AT_ONCE]:
                        hold = self.find(blocks[place])
                        if hold is not None and hold[0] in self._unproven:
                            if not self._is_proven(hold[0], blocks[place]):
                                self.recount()
                            self._unproven.discard(hold[0])
                            hold = self.find(blocks[place])
                        if hold is not None:
                            self.hold(hold)
                            holds[place] = hold
        except BackendFailed:
            self.release([hold for hold in holds if hold is not None])
            raise
        return holds

    def hold(self, record: Hold) -> None:
        """Hold the record, which is published."""
        with self._mutex:
            self._held[record] = self._held.get(record, 0) + 1
        self._holders[record[0] * _HOLDER_WORDS + self._word] |= self._bit

    def release(self, holds: Sequence[Hold], *, leaving: bool = False) -> None:
        """End ``holds``, each of them once; later, if the lock cannot be had now."""
        if self.lock.inherited:
            return
        with self._mutex:
            for hold in holds:
                if self._held.get(hold, 0) > 1 and not leaving:
                    self._held[hold] -= 1
                else:
                    self._late.append((hold, leaving))
        try:
            while self._late:
                with self:
                    pass
        except BackendFailed:
            return
        self._close_when_free()

    def end_hold(self, hold: Hold, leaving: bool = False) -> None:
        """End one hold; under the lock. A record that is ``leaving`` goes with it."""
        row, generation = hold
        if leaving:
            self.words[self.leaving_at] -= self.length[row]
            if self.named[row] == generation:
                self.unname(row)
        with self._mutex:
            count = self._held.pop(hold, 0)
            if count > 1:
                self._held[hold] = count - 1
                return
        if self.generation[row] != generation or not self._busy[row]:
            return  # it was damaged, and dropped
        self._holders[row * _HOLDER_WORDS + self._word] &= ~self._bit
        if not self.named[row] and not self.is_held(row):
            self.free(row)

    def hide(self, blocks: Sequence[bytes]) -> None:
        """Let the records of ``blocks`` be removed as soon as the lock can be had.

        Until then this process does not find them.
        """
        self._hidden.update(record for record in self.find_all(blocks) if record is not None)

    def close(self) -> None:
        """Leave the arena, as soon as this process holds nothing in it; the records stay."""
        self._closing = True
        self._close_when_free()

    def _close_when_free(self) -> None:
        if not self._closing or self._held:
            return
        if not self.lock.inherited:
            with suppress(BackendFailed), self:  # else the kernel frees the slot; others notice
                slot = self.lock.slot
                self.words[at.SLOT_AT + slot] = self.words[at.LEAVING_AT + slot] = 0
        self.lock.close()

    # --- quotas ----------------------------------------------------------------------------------

    def _quota_at(self, space: bytes) -> int:
        """Return where the words of a namespace's quota are, -1 if it has none."""
        while len(self._quotas) < min(self.words[at.QUOTA_COUNT], at.QUOTAS):
            where = at.QUOTA_AT + 4 * len(self._quotas)
            self._quotas[bytes(self.words[where : where + 2].cast("B"))] = where
        return self._quotas.get(space, -1)

    def over_quota(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits.

        Drafts count, and deleted records that are still held.
        """
        where = self._quota_at(space)
        if where < 0:
            return 0
        limit, held = self.words[where + 2], self.words[where + 3]
        return -1 if more > limit else max(0, held + more - limit)

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes. Cost: a new one takes a pass over the rows."""
        words = self.words
        where = self._quota_at(space)
        if where < 0:
            count = words[at.QUOTA_COUNT]
            if count >= at.QUOTAS:
                raise InvalidValue(f"a shared arena has room for {at.QUOTAS} quotas, all are taken")
            where = at.QUOTA_AT + 4 * count
            words[where : where + 2] = memoryview(space).cast("q")
            words[where + 3] = self._bytes_in(space)
            words[at.QUOTA_COUNT] = count + 1
        words[where + 2] = limit

    def count(self, block: bytes, more: int) -> None:
        """Count ``more`` bytes, negative for fewer, to the quota of a block's namespace."""
        if self.words[at.QUOTA_COUNT]:
            where = self._quota_at(block[:SPACE_BYTES])
            if where >= 0:
                self.words[where + 3] += more

    def in_space(self, space: bytes, rows: int) -> np.ndarray:
        """Return which of the first ``rows`` have an id in ``space``."""
        ids = np.frombuffer(self.map, np.uint8, BLOCK_ID_BYTES * rows, self._ids_at)
        prefix = ids.reshape(rows, BLOCK_ID_BYTES)[:, :SPACE_BYTES]
        same: np.ndarray = (prefix == np.frombuffer(space, np.uint8)).all(1)
        return same

    def _bytes_in(self, space: bytes) -> int:
        high = self.words[at.HIGH]
        mine = self.in_space(space, high) & (np.frombuffer(self._busy, np.uint8)[:high] != 0)
        return int(np.asarray(self.size)[:high][mine].sum())

    # --- counting anew ---------------------------------------------------------------------------

    def recount(self) -> None:
        """Make everything that is derived from the rows anew; drop rows that prove nothing.

        Leaves the mark of a change, and begins again if it is interrupted. Cost: about two seconds
        for a million rows.
        """
        words, rows = self.words, self.layout.rows
        words[at.CHANGING] = 1
        words[at.REPAIRS] = (words[at.REPAIRS] + 1) % _LAST_GENERATION
        nobody = self._hold_only(self._living(), rows)
        named = np.array(self.named[:rows])
        usable = (named == np.array(self.generation[:rows])) | ((named == 0) & ~nobody)
        usable &= np.frombuffer(self._busy, np.uint8)[:rows] != 0
        blocks = self._proven(np.flatnonzero(usable))
        valid = self._without_overlaps(list(blocks))
        lost = named != 0
        lost[valid] = False
        valid = self._without_twins(valid, blocks)
        rest = np.ones(rows, bool)
        rest[valid] = False
        np.asarray(self.named)[:rows][rest] = 0
        np.asarray(self.generation)[:rows][rest] = 0
        np.asarray(self._proof)[:rows][rest] = -1
        np.asarray(self._holders).reshape(-1, _HOLDER_WORDS)[:rows][rest] = 0
        np.frombuffer(self._busy, np.uint8)[:rows] = ~rest
        words[at.LOST] = (words[at.LOST] + int(lost.sum())) % _LAST_GENERATION
        last = words[at.GENERATION]  # never a number that a process may remember
        fresh = last if 0 <= last < _LAST_GENERATION else time.time_ns()
        words[at.GENERATION] = max(fresh, int(np.asarray(self.generation).max()))
        published = words[at.PUBLISHED] + at.RECENT + 1  # so that all processes learn all rows
        words[at.PUBLISHED] = published % _LAST_GENERATION
        used = np.asarray(self.used)
        np.minimum(used, now(), out=used)
        words[at.BUSY] = len(valid)
        words[at.RECORDS] = int(np.count_nonzero(np.asarray(self.named)[valid]))
        words[at.LOW], words[at.HIGH] = 0, max(valid, default=-1) + 1
        self._tile(valid)
        for number in range(min(words[at.QUOTA_COUNT], at.QUOTAS)):
            quota = at.QUOTA_AT + 4 * number
            words[quota + 3] = self._bytes_in(bytes(words[quota : quota + 2].cast("B")))

    def _without_overlaps(self, rows: list[int]) -> list[int]:
        """Return ``rows`` by address, without those that share memory."""
        rows.sort(key=self.offset.__getitem__)
        wrong: set[int] = set()
        end, before = 0, -1
        for row in rows:
            if self.offset[row] < end:
                wrong.update((row, before))
            if self.offset[row] + self.length[row] > end:
                end, before = self.offset[row] + self.length[row], row
        return [row for row in rows if row not in wrong]

    def _without_twins(self, rows: list[int], blocks: dict[int, bytes]) -> list[int]:
        """Keep the newest record of a block: a replacement was interrupted."""
        newest: dict[bytes, int] = {}
        dropped = set()
        for row in rows if len(set(blocks.values())) < len(blocks) else ():
            if not self.named[row]:
                continue
            other = newest.setdefault(blocks[row], row)
            if other != row:
                older, newer = sorted((other, row), key=self.generation.__getitem__)
                newest[blocks[row]] = newer
                self.named[older] = 0
                if not self.is_held(older):
                    dropped.add(older)
        return [row for row in rows if row not in dropped]

    def _tile(self, rows: list[int]) -> None:
        """Make the free extents between ``rows``, which are in order of address."""
        offsets = np.asarray(self.offset)[rows]
        begins = np.append(0, offsets + np.asarray(self.length)[rows])
        lengths = np.append(offsets, self.layout.data_bytes) - begins
        begins, lengths = begins[lengths > 0], lengths[lengths > 0]
        np.asarray(self._free_offset)[: len(begins)] = begins
        self._free_lengths[: len(begins)] = lengths
        self.words[at.FREE_EXTENTS], self.words[at.FREE_BYTES] = len(begins), int(lengths.sum())

    def check(self) -> None:
        """Assert that rows and free extents tile the data, and that the counts agree with them."""
        words, rows = self.words, self.layout.rows
        busy = [row for row in range(rows) if self._busy[row]]
        named = [row for row in busy if self.named[row]]
        extents = [(self.offset[row], self.length[row], "taken") for row in busy]
        count = words[at.FREE_EXTENTS]
        assert self._free_offset[:count].tolist() == sorted(self._free_offset[:count])
        free = zip(self._free_offset[:count], self._free_length[:count], strict=True)
        extents += [(offset, length, "free") for offset, length in free]
        end, last = 0, ""
        for offset, length, kind in sorted(extents):
            assert offset == end, f"{kind} memory at {offset} does not begin at {end}"
            assert (last, kind) != ("free", "free"), f"two free extents meet at {offset}"
            end, last = offset + length, kind
        assert end == self.layout.data_bytes, f"the last extent ends at {end}"
        for row in busy:
            assert self._is_proven(row, self.id_of(row)), f"row {row} does not prove itself"
            assert self.named[row] in (0, self.generation[row]), f"row {row} has a wrong name"
            assert self.named[row] or self.is_held(row), f"row {row} is lost"
            assert not self.named[row] or self.find(self.id_of(row)) == (row, self.named[row])
        assert words[at.FREE_BYTES] == sum(self._free_length[:count])
        assert (words[at.BUSY], words[at.RECORDS]) == (len(busy), len(named))
        assert words[at.LOW] <= min(set(range(rows + 1)).difference(busy))
        assert not any(self.named[row] for row in set(range(rows)).difference(busy))
        assert words[at.HIGH] > max(busy, default=-1)
        for number in range(words[at.QUOTA_COUNT]):
            quota = at.QUOTA_AT + 4 * number
            held = self._bytes_in(bytes(words[quota : quota + 2].cast("B")))
            assert words[quota + 3] == held, "a quota counts wrongly"
