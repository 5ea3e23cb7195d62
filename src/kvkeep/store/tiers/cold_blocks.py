"""`ColdBlocks`: blocks in 69 bytes each, in eviction order.

A log of rows, oldest first, and an open-addressed table of their places. A block that leaves makes
a hole; once there are many, the log is written anew without them.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    import numpy.typing as npt

__all__ = ["ColdBlock", "ColdBlocks"]

_ROW: Final = struct.Struct(f"<{BLOCK_ID_BYTES}sQdIB")
_BYTES: Final = _ROW.size
_COLUMNS: Final = np.dtype(
    [
        ("block", "<u8", BLOCK_ID_BYTES // 8),
        ("size", "<u8"),
        ("used", "<f8"),
        ("hash", "<u4"),
        ("round", "u1"),
    ]
)
_ROUND_AT: Final = _BYTES - 1
_HOLE: Final = 0  # in the place of a round
_LEAST: Final = 1 << 10  # cells
_HOLES: Final = 4096  # and a quarter of all rows
_NEAR: Final = 8  # rows that are looked at one by one, then at most
_LOOK: Final = 1 << 16  # rows that are searched at once for those of a group


class ColdBlock(NamedTuple):
    """A block: bytes of its record, last use (Unix seconds), and the last listing with it."""

    block: bytes
    size: int
    used: float
    round: int
    pinned: float = 0.0
    """Never: pinned blocks are not cold."""


class ColdBlocks:
    """Rows of blocks, the oldest first.

    Thread safety: none; the index calls it under its lock. Memory: 69 bytes a row, 6 to 16 for its
    cells in the table, and holes for up to a quarter of the rows. Cost: a microsecond a call; the
    log is written anew at 150 ns a row, once in as many calls as a quarter of them.
    """

    def __init__(self) -> None:
        self._rows = bytearray()
        self._count = 0  # of rows, holes included
        self._table = array("i", bytes(4 * _LEAST))  # row + 1; 0: never used; -1: of a hole
        self._length = 0
        self._listed_from = 0  # the first row of the last listing
        self._spaces: dict[bytes, int] = {}  # rows of each namespace
        self._oldest: dict[Hashable, int] = {}  # by group: no older row is of it

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ColdBlock]:
        for block, size, used, _, round_ in _ROW.iter_unpack(bytes(self._rows)):
            if round_:
                yield ColdBlock(block, size, used, round_)

    def get(self, block: bytes) -> ColdBlock | None:
        """Return the row of ``block``, None if it has none."""
        cell = self._find(block)
        return None if cell < 0 else self._row(self._table[cell] - 1)

    def add(self, block: bytes, size: int, used: float, round_: int) -> None:
        """Add ``block``, which has no row, as the newest."""
        if 3 * self._count >= 2 * len(self._table):
            self._rewrite()
        number = hash(block)
        table = self._table
        mask = len(table) - 1
        cell = number & mask
        while table[cell]:
            cell = (cell + 1) & mask
        self._rows += _ROW.pack(block, size, used, number & 0xFFFFFFFF, round_)
        self._count += 1
        table[cell] = self._count
        self._length += 1
        space = block[:SPACE_BYTES]
        self._spaces[space] = self._spaces.get(space, 0) + 1

    def listed(self, found: Mapping[bytes, tuple[int, float]], round_: int) -> list[bytes]:
        """Take over what listing ``round_`` found: bytes and last use. Returns the new blocks.

        Rows that are here keep their places, and get the later time of use.
        """
        if 3 * (self._count + len(found)) >= 2 * len(self._table):
            self._rewrite(room=4 * self._length + len(found))  # many will follow
        packed = b"".join(
            [
                _ROW.pack(block, size, used, hash(block) & 0xFFFFFFFF, round_)
                for block, (size, used) in found.items()
            ]
        )
        new, rows = np.frombuffer(packed, _COLUMNS), np.frombuffer(self._rows, _COLUMNS)
        table = np.frombuffer(self._table, np.int32)
        rest, cells, here = np.arange(len(new)), self._cells(new), np.zeros(len(new), np.int32)
        while len(rest):
            at = table[cells]
            rest, cells, at = rest[at != 0], cells[at != 0], at[at != 0]
            same = (rows["block"][np.maximum(at, 1) - 1] == new["block"][rest]).all(axis=1)
            same &= at > 0  # else it is a hole
            here[rest[same]] = at[same]
            rest, cells = rest[~same], (cells[~same] + 1) & (len(table) - 1)
        known = here[here > 0] - 1
        rows["used"][known] = np.maximum(rows["used"][known], new["used"][here > 0])
        rows["round"][known] = round_
        del rows, table  # else they could not grow
        self._rows += new[here == 0].tobytes()
        self._hang(self._count)
        fresh = list(compress(found, here == 0))
        for space, count in Counter(block[:SPACE_BYTES] for block in fresh).items():
            self._spaces[space] = self._spaces.get(space, 0) + count
        self._length += len(fresh)
        return fresh

    def take(self, block: bytes) -> ColdBlock | None:
        """Remove and return the row of ``block``, None if it has none."""
        cell = self._find(block)
        if cell < 0:
            return None
        at = self._table[cell] - 1
        row = self._row(at)
        assert row is not None
        self._rows[at * _BYTES + _ROUND_AT] = _HOLE
        self._table[cell] = -1
        self._length -= 1
        space = block[:SPACE_BYTES]
        rows = self._spaces[space] - 1
        if rows:
            self._spaces[space] = rows
        else:
            del self._spaces[space]
        if self._count - self._length > self._length // 4 + _HOLES:
            self._rewrite()
        return row

    # --- order -----------------------------------------------------------------------------------

    def any_of(self, spaces: Collection[bytes]) -> bool:
        """Whether a namespace of ``spaces`` has rows."""
        return any(space in self._spaces for space in spaces)

    def oldest(
        self, group: Hashable = None, spaces: Collection[bytes] = (), *, others: bool = True
    ) -> ColdBlock | None:
        """Return the oldest row of a group without removing it.

        The group has the rows of ``spaces``, or with ``others`` all but these: it is the same at
        each call with ``group``, until `regroup`. Cost: O(1), amortised, for each group.
        """
        if not self._length:
            return None
        at = self._oldest.get(group, 0)
        for _ in range(_NEAR):
            row = self._row(at) if at < self._count else None
            if row is not None and (row.block[:SPACE_BYTES] in spaces) is not others:
                break
            at = min(at + 1, self._count)
        else:
            at = self._next(at, spaces, others=others)
            row = self._row(at) if at < self._count else None
        self._oldest[group] = at
        return row

    def _next(self, at: int, spaces: Collection[bytes], *, others: bool) -> int:
        """Return the first row from ``at`` on that is of ``spaces``, or of others."""
        columns, most = np.frombuffer(self._rows, _COLUMNS), 64
        wanted = np.array(list(spaces), f"S{SPACE_BYTES}")  # of one length, so zeros count
        while at < self._count:
            some = columns[at : at + most]
            right = some["round"] != _HOLE
            if len(wanted) or not others:
                of = np.ascontiguousarray(some["block"][:, : SPACE_BYTES // 8]).view(wanted.dtype)
                right &= np.isin(of[:, 0], wanted, invert=others)
            if right.any():
                return at + int(right.argmax())
            at, most = at + len(some), min(4 * most, _LOOK)
        return at

    def regroup(self) -> None:
        """Groups have other namespaces from now on."""
        self._oldest.clear()

    # --- all rows --------------------------------------------------------------------------------

    def not_listed(self, round_: int) -> list[bytes]:
        """Return the blocks that listing ``round_`` did not find."""
        return self._where(np.frombuffer(self._rows, _COLUMNS)["round"] != round_)

    def unused_since(self, when: float, most: int) -> list[bytes]:
        """Return blocks that were last used before ``when``, at most so many."""
        return self._where(np.frombuffer(self._rows, _COLUMNS)["used"] < when)[:most]

    def _where(self, right: npt.NDArray[np.bool_]) -> list[bytes]:
        rows = (self._row(int(at)) for at in np.flatnonzero(right))
        return [row.block for row in rows if row is not None]

    def begin_listing(self) -> None:
        """Begin to add the rows of a listing, whose order `end_listing` decides."""
        self._listed_from = self._count

    def end_listing(self, most: int) -> list[bytes]:
        """Order the rows added since `begin_listing` by last use, behind all others.

        Returns the ``most`` newest of their blocks, the oldest of these first.
        """
        columns, first = np.frombuffer(self._rows, _COLUMNS), self._listed_from
        order = np.arange(self._count)
        order[first:] = first + np.argsort(columns["used"][first:], kind="stable")
        order = order[columns["round"][order] != _HOLE]
        self._rewrite(order)
        newest = range(max(self._listed_from, self._count - most), self._count)
        return [row.block for at in newest if (row := self._row(at)) is not None]

    # --- internals -------------------------------------------------------------------------------

    def _find(self, block: bytes) -> int:
        """Return the cell of the row of ``block``, -1 if it has none."""
        if not self._length:
            return -1
        table, rows = self._table, self._rows
        mask = len(table) - 1
        cell = hash(block) & mask
        while at := table[cell]:
            if at > 0 and rows.startswith(block, (at - 1) * _BYTES):
                return cell
            cell = (cell + 1) & mask
        return -1

    def _row(self, at: int) -> ColdBlock | None:
        """Return a row, None if it is a hole."""
        block, size, used, _, round_ = _ROW.unpack_from(self._rows, at * _BYTES)
        return ColdBlock(block, size, used, round_) if round_ else None

    def _rewrite(self, order: npt.NDArray[np.intp] | None = None, room: int = 0) -> None:
        """Write the log anew without holes, in ``order``, and a table for ``room`` rows."""
        columns = np.frombuffer(self._rows, _COLUMNS)
        if order is None:
            order = np.flatnonzero(columns["round"] != _HOLE)
        self._listed_from = int((order < self._listed_from).sum())
        self._rows = bytearray(columns[order].tobytes())
        self._oldest.clear()
        size = max(_LEAST, 1 << (2 * max(room, self._length)).bit_length())
        self._table = array("i", bytes(4 * size))
        self._hang(0)

    def _cells(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        return columns["hash"].astype(np.intp) & (len(self._table) - 1)

    def _hang(self, first: int) -> None:
        """Add the rows from ``first`` on to the table."""
        columns = np.frombuffer(self._rows, _COLUMNS)
        self._count = len(columns)
        table, cells = np.frombuffer(self._table, np.int32), self._cells(columns[first:])
        rows = np.arange(first + 1, self._count + 1, dtype=np.int32)
        while len(rows):  # of several rows that find a cell free, one gets it
            free = table[cells] == 0
            table[cells[free]] = rows[free]
            later = table[cells] != rows
            rows, cells = rows[later], (cells[later] + 1) & (len(table) - 1)

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        rows = list(self)
        assert len(rows) == self._length == len({row.block for row in rows})
        assert len(self._rows) == self._count * _BYTES
        assert all(self.get(row.block) == row for row in rows)
        assert sum(map(bool, self._table)) == self._count
        assert sum(at > 0 for at in self._table) == self._length
        spaces: dict[bytes, int] = {}
        for row in rows:
            space = row.block[:SPACE_BYTES]
            spaces[space] = spaces.get(space, 0) + 1
        assert spaces == self._spaces
