"""`Extents`: free memory of a shared arena, in bins by size.

The entries of all extents, taken and free, are linked in the order of their addresses, so
neighbours are merged in a constant number of steps. Free extents of nearly the
same size share a bin: exactly the same below 1 MiB, within 3 % above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.shm import layout as at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.shm.books import Books

__all__ = ["Extents"]

_EXACT: Final = 256  # sizes below so many units have a bin of their own
_LOOKED_AT: Final = 32  # extents of one bin that may be too small


class Extents:
    """Allocates and frees extents in ``books``.

    Thread safety: none; call it under the arena's lock, inside a change. Cost: a few µs a call.
    """

    def __init__(self, books: Books) -> None:
        self._books = books

    @staticmethod
    def taken_by(size: int) -> int:
        """Return the bytes that a record of ``size`` bytes takes: at least 4096."""
        return max(-(-size // ALIGNMENT), 1) * ALIGNMENT

    def find(self, length: int) -> int:
        """Return the entry of a free extent of ``length`` bytes or more; -1 if there is none.

        Also -1 if it would have to be split and no entry is unused.
        """
        books = self._books
        number = bin_of(length)
        entry = books.words[at.BIN_AT + number]
        for _ in range(_LOOKED_AT):
            if entry < 0:
                break
            if books.length[entry] >= length:
                return self._usable(entry, length)
            entry = books.link[entry]
        larger = int.from_bytes(books.bitmap, "little") >> (number + 1)
        if not larger:
            return -1
        number += (larger & -larger).bit_length()
        return self._usable(books.words[at.BIN_AT + number], length)

    def _usable(self, entry: int, length: int) -> int:
        books = self._books
        split = books.length[entry] > length
        return -1 if split and books.words[at.SPARE] < 0 else entry

    def take(self, entry: int, lengths: Sequence[int]) -> list[int]:
        """Take ``lengths`` bytes, one behind the other, from the free extent ``entry``.

        Returns their entries, still unset. Wants an unused entry for each of them, but for one that
        takes the rest.
        """
        books, words = self._books, self._books.words
        self._leave_bin(entry)
        words[at.FREE_BYTES] -= sum(lengths)
        offset, before, rest = books.offset[entry], books.before[entry], books.length[entry]
        taken: list[int] = []
        for length in lengths:
            if length == rest:
                taken.append(entry)
                break
            mine = words[at.SPARE]
            words[at.SPARE] = books.link[mine]
            words[at.SPARES] -= 1
            if mine >= words[at.HIGH]:
                words[at.HIGH] = mine + 1
            books.offset[mine], books.length[mine], books.before[mine] = offset, length, before
            if before >= 0:
                books.after[before] = mine
            before = mine
            offset, rest = offset + length, rest - length
            taken.append(mine)
        books.offset[entry], books.length[entry], books.before[entry] = offset, rest, before
        if before >= 0:
            books.after[before] = entry
        if taken[-1] != entry:
            self._enter_bin(entry)
        return taken

    def free(self, entry: int) -> None:
        """Free a taken extent and merge it with free neighbours."""
        books = self._books
        books.state[entry] = at.FREE
        books.proof[entry] = -1
        books.words[at.FREE_BYTES] += books.length[entry]
        before, after = books.before[entry], books.after[entry]
        if before >= 0 and books.state[before] == at.FREE:
            self._leave_bin(before)
            self._merge(before, entry)
            entry = before
        if after >= 0 and books.state[after] == at.FREE:
            self._leave_bin(after)
            self._merge(entry, after)
        self._enter_bin(entry)

    def _merge(self, entry: int, after: int) -> None:
        books = self._books
        books.length[entry] += books.length[after]
        behind = books.after[entry] = books.after[after]
        if behind >= 0:
            books.before[behind] = entry
        books.state[after] = at.UNUSED
        books.link[after] = books.words[at.SPARE]
        books.words[at.SPARE] = after
        books.words[at.SPARES] += 1

    def _enter_bin(self, entry: int) -> None:
        books = self._books
        number = bin_of(books.length[entry])
        first = books.words[at.BIN_AT + number]
        books.link[entry], books.back[entry] = first, -1
        if first >= 0:
            books.back[first] = entry
        else:
            books.bitmap[number >> 3] |= 1 << (number & 7)
        books.words[at.BIN_AT + number] = entry

    def _leave_bin(self, entry: int) -> None:
        books = self._books
        link, back = books.link[entry], books.back[entry]
        if link >= 0:
            books.back[link] = back
        if back >= 0:
            books.link[back] = link
            return
        number = bin_of(books.length[entry])
        books.words[at.BIN_AT + number] = link
        if link < 0:
            books.bitmap[number >> 3] &= ~(1 << (number & 7))

    def enter(self, entry: int) -> None:
        """Make ``entry`` findable, for `Repair`: a free extent whose neighbours are taken."""
        self._enter_bin(entry)


def bin_of(length: int) -> int:
    """Return the number of the bin for free extents of ``length`` bytes."""
    units = length // ALIGNMENT
    if units < _EXACT:
        return units
    shift = units.bit_length() - 6  # 3 or more
    return _EXACT + (shift - 3) * 32 + (units >> shift) - 32
