"""`Books`: the words and columns of an arena in memory, and lookups that take no lock."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.layout import COLUMNS, HOLDER_BYTES, HOLDER_WORDS, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Books", "DamagedIndex"]

_TRIES: Final = 8  # lookups without the lock, while others change the index
_LONGEST_CHAIN: Final = 4096  # entries that a lookup without the lock looks at
_FEW: Final = 48  # blocks that are looked up faster one by one than with arrays
_STEPS: Final = 64  # entries of a chain that are compared with arrays
_REMEMBERED: Final = 1 << 17  # blocks, at about 200 bytes each
_NOBODY: Final = bytes(HOLDER_BYTES)
_ID_WORDS: Final = BLOCK_ID_BYTES // 8

Words = memoryview
"""A memoryview of int64."""


class DamagedIndex(Exception):
    """The index contradicts itself: somebody wrote there by accident. `Repair` rebuilds it."""


class Books:
    """The arena's file, mapped: words and columns, each as a memoryview and as an array.

    Single numbers are read and written through memoryviews, which takes 35 ns; arrays serve whole
    columns. A store of one number is one instruction, so it is never seen in part.

    Thread safety: lookups (`find`, `find_all`) need no lock: they notice changes by a counter that
    is odd while the index changes, and try again. Everything else wants the arena's lock.

    Attributes:
        words: see `layout`.
        data: the memory of the records; `whole` has the index as well.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self.map = mmap.mmap(fd, layout.total)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system decides whether shared memory has huge pages
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.whole = whole = memoryview(self.map)
        count = layout.entries
        self.words: Words = whole[at.HEADER_BYTES : at.HEADER_BYTES + 8 * at.WORDS].cast("q")
        self.bitmap = whole[at.HEADER_BYTES + 8 * at.BITMAP_AT :][: at.BINS // 8]
        columns = []
        for number in range(len(COLUMNS)):
            begin = layout.columns_at + 8 * count * number
            columns.append(whole[begin : begin + 8 * count].cast("q"))
        (
            self.state, self.generation, self.named, self.offset, self.length, self.size,
            self.before, self.after, self.link, self.back, self.used, self.pinned, self.leaving,
            self.proof,
        ) = columns  # fmt: skip
        self.holders = whole[layout.holders_at : layout.ids_at].cast("Q")
        self.heads: Words = whole[layout.heads_at :][: 8 * layout.buckets].cast("q")
        self.data = whole[layout.data_at : layout.total]
        self.named_all = np.asarray(self.named)
        self.link_all = np.asarray(self.link)
        self.used_all = np.asarray(self.used)
        self.heads_all = np.asarray(self.heads)
        self.holders_all = np.asarray(self.holders).reshape(count, HOLDER_WORDS)
        ids = np.frombuffer(self.map, np.int64, _ID_WORDS * count, layout.ids_at)
        self.ids_all = ids.reshape(count, _ID_WORDS)
        self._mask = layout.buckets - 1
        self._ids_at, self._holders_at = layout.ids_at, layout.holders_at
        self._known: dict[bytes, tuple[int, int]] = {}  # block → entry, generation

    # --- blocks ----------------------------------------------------------------------------------

    def bucket(self, block: bytes) -> int:
        """Return the chain of ``block``."""
        return crc32(block) & self._mask

    def id_of(self, entry: int) -> bytes:
        """Return the block id of an entry."""
        begin = self._ids_at + BLOCK_ID_BYTES * entry
        return self.map[begin : begin + BLOCK_ID_BYTES]

    def begin(self, entry: int, block: bytes, size: int, generation: int, holder: bytes) -> None:
        """Write all of a draft but its extent, which is set, and its state.

        ``holder`` are the holders: the bit of this process.
        """
        self.named[entry] = self.leaving[entry] = self.pinned[entry] = 0
        begin = self._ids_at + BLOCK_ID_BYTES * entry
        self.map[begin : begin + BLOCK_ID_BYTES] = block
        begin = self._holders_at + HOLDER_BYTES * entry
        self.map[begin : begin + HOLDER_BYTES] = holder
        self.size[entry], self.generation[entry] = size, generation
        self.proof[entry] = at.proof_of(
            crc32(block), self.offset[entry], self.length[entry], size, generation
        )

    def proven(self, entry: int) -> bool:
        """Whether the columns of an entry are what was written together."""
        offset, length = self.offset[entry], self.length[entry]
        size, generation = self.size[entry], self.generation[entry]
        check = crc32(self.id_of(entry))
        if self.proof[entry] != at.proof_of(check, offset, length, size, generation):
            return False
        return offset >= 0 and 0 <= size <= length <= self.layout.data_bytes - offset

    def is_held(self, entry: int) -> bool:
        """Whether any process holds an entry."""
        begin = self._holders_at + HOLDER_BYTES * entry
        return self.map[begin : begin + HOLDER_BYTES] != _NOBODY

    # --- lookups without the lock ----------------------------------------------------------------

    def known(self, block: bytes) -> int:
        """Return the entry of ``block`` if this process found it before and it is there; else -1.

        Cost: about 0.15 µs.
        """
        found = self._known.get(block)
        if found is not None and self.named[found[0]] == found[1]:
            return found[0]
        return -1

    def known_record(self, block: bytes) -> tuple[int, int] | None:
        """Return entry and generation of ``block`` as `known` does; None where that returns -1."""
        found = self._known.get(block)
        return found if found is not None and self.named[found[0]] == found[1] else None

    def find(self, block: bytes) -> int:
        """Return the entry of ``block``, -1 if there is none, -2 if others changed too much.

        Cost: about 1 µs.
        """
        known = self.known(block)
        if known >= 0:
            return known
        words = self.words
        for _ in range(_TRIES):
            changes = words[at.CHANGES]
            try:
                entry = self.walk(block)
            except (DamagedIndex, IndexError):
                continue
            if entry >= 0:
                return self._learn(block, entry)
            if changes == words[at.CHANGES] and not changes & 1:
                return -1
        return -2

    def walk(self, block: bytes, most: int = _LONGEST_CHAIN) -> int:
        """Return the entry of ``block`` in its chain, -1 if it is not there.

        Raises:
            DamagedIndex: the chain has no end within ``most`` entries.
            IndexError: the chain leads out of the columns.
        """
        entry = self.heads[self.bucket(block)]
        for _ in range(most):
            if entry < 0:
                return -1
            generation = self.named[entry]
            if generation and self.id_of(entry) == block and self.named[entry] == generation:
                return entry
            entry = self.link[entry]
        raise DamagedIndex("a chain of the index has no end")

    def _learn(self, block: bytes, entry: int) -> int:
        generation = self.named[entry]
        if not generation or not self.proven(entry):
            return -2
        if self.id_of(entry) != block or self.named[entry] != generation:
            return -2  # since the walk it became the record of another block
        self.remember(block, entry, generation)
        return entry

    def remember(self, block: bytes, entry: int, generation: int) -> None:
        """Make `known` find a record that proves itself."""
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[block] = entry, generation

    def find_all(self, blocks: Sequence[bytes]) -> list[int]:
        """Return `find` of each block. Cost: about 0.2 µs a block, also of unknown ones."""
        known = self._known
        named = self.named
        entries = []
        for block in blocks:
            found = known.get(block)
            entries.append(found[0] if found is not None and named[found[0]] == found[1] else -1)
        missing = [at for at, entry in enumerate(entries) if entry < 0]
        if not missing:
            return entries
        if len(missing) < _FEW:
            found_now = [self.find(blocks[at]) for at in missing]
        else:
            found_now = self._find_many([blocks[at] for at in missing])
        for position, entry in zip(missing, found_now, strict=True):
            entries[position] = entry
        return entries

    def _find_many(self, blocks: list[bytes]) -> list[int]:
        """`find` many unknown blocks at once, with arrays."""
        changes = self.words[at.CHANGES]
        checks = np.fromiter(map(crc32, blocks), np.int64, len(blocks))
        wanted = np.frombuffer(b"".join(blocks), np.int64).reshape(-1, _ID_WORDS)
        found = np.full(len(blocks), -1, np.int64)
        place = np.arange(len(blocks))
        entry = self.heads_all[checks & self._mask]
        for _ in range(_STEPS):
            there = (entry >= 0) & (entry < self.layout.entries)
            place, entry = place[there], entry[there]
            if not len(place):
                break
            same = (self.ids_all[entry] == wanted[place]).all(1) & (self.named_all[entry] != 0)
            found[place[same]] = entry[same]
            place, entry = place[~same], self.link_all[entry[~same]]
        if len(place) or changes & 1 or changes != self.words[at.CHANGES]:
            return [self.find(block) for block in blocks]
        self._learn_all(blocks, checks, wanted, found)
        return found.tolist()

    def _learn_all(
        self, blocks: list[bytes], checks: np.ndarray, wanted: np.ndarray, found: np.ndarray
    ) -> None:
        """Remember the found blocks whose entries prove themselves; the others become -2."""
        rows = np.flatnonzero(found >= 0)
        entries = found[rows]
        generations = self.named_all[entries]
        wrong = ~self.proven_all(entries, checks[rows]) | (generations == 0)
        wrong |= (self.ids_all[entries] != wanted[rows]).any(1)  # of another block by now
        wrong |= self.named_all[entries] != generations
        found[rows[wrong]] = -2
        if len(self._known) + len(rows) > _REMEMBERED:
            self._known.clear()
        fine = ~wrong
        for row, entry, generation in zip(
            rows[fine].tolist(), entries[fine].tolist(), generations[fine].tolist(), strict=True
        ):
            self._known[blocks[row]] = entry, generation

    def proven_all(self, entries: np.ndarray, checks: np.ndarray) -> np.ndarray:
        """Return `proven` of each of ``entries``, whose ids have the CRC-32 ``checks``."""
        offset, length, size, generation, proof = (
            np.asarray(column)[entries]
            for column in (self.offset, self.length, self.size, self.generation, self.proof)
        )
        with np.errstate(over="ignore"):
            expected = at.proof_of(*(one.view(np.uint64) for one in (
                checks, offset, length, size, generation
            )))  # type: ignore[arg-type] # fmt: skip
        fits = (offset >= 0) & (size >= 0) & (size <= length)
        fits &= length <= self.layout.data_bytes - offset
        proven: np.ndarray = fits & (expected == proof.view(np.uint64))
        return proven
