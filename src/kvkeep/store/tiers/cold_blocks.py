"""`ColdBlocks`: blocks in 69 bytes each, in eviction order."""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

__all__ = ["ColdBlock", "ColdBlocks", "Rows", "by_use", "ids_of", "rows_of"]

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
_HOLES: Final = 4096  # and a quarter of all rows
_STEP: Final = 4096  # rows that are moved at once
_NEAR: Final = 8  # holes that are passed one by one

Rows = Any
"""An array of `_COLUMNS`."""


class ColdBlock(NamedTuple):
    """A block: bytes of its record, last use (Unix seconds), and the last listing with it."""

    block: bytes
    size: int
    used: float
    round: int
    pinned: float = 0.0
    """Never: pinned blocks are not cold."""


def rows_of(blocks: Iterable[tuple[bytes, int, float]], round_: int, rows: bytearray) -> None:
    """Append (block, bytes, last use), which listing ``round_`` found, to the bytes of ``rows``."""
    for block, size, used in blocks:
        rows += _ROW.pack(block, size, used, hash(block) & 0xFFFFFFFF, round_)


def by_use(rows: Rows | bytearray) -> Rows:
    """Return rows, or those of these bytes, in the order of their last use."""
    if isinstance(rows, bytearray):
        rows = np.frombuffer(rows, _COLUMNS)
    return rows[np.argsort(rows["used"], kind="stable")]


def ids_of(rows: Rows) -> list[bytes]:
    """Return the ids of blocks."""
    every = rows["block"].tobytes()
    return [every[at : at + BLOCK_ID_BYTES] for at in range(0, len(every), BLOCK_ID_BYTES)]


class ColdBlocks:
    """Rows of blocks, the oldest first.

    They stand in logs. A block that leaves makes a hole. A log with many holes, or one that is full
    of rows, is moved into a larger one, 4,096 rows at each change, so that no call takes long.

    Thread safety: none; the index calls it under its lock. Memory: 69 bytes a row, 6 to 12 for its
    place in a table, and holes for up to a quarter of the rows; twice that while rows are moved.
    Cost: a microsecond a call, and up to 2 ms while rows are moved.
    """

    def __init__(self) -> None:
        self._logs = [_Log(0)]  # oldest first; the rows of the second move to the first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ColdBlock]:
        for log in self._logs:
            yield from log.all()

    def get(self, block: bytes) -> ColdBlock | None:
        """Return the row of ``block``, None if it has none."""
        for log in self._logs:
            at = log.find(block)
            if at >= 0:
                return log.row(at)
        return None

    def add(self, block: bytes, size: int, used: float, round_: int) -> None:
        """Add ``block``, which has no row, as the newest."""
        log = self._logs[-1]
        if log.lacks(1):
            log = self._longer()
        log.append(block, size, used, round_)
        self._length += 1
        self._settle()

    def extend(self, rows: Rows, more: int = 0) -> None:
        """Add rows of blocks that have none as the newest, in their order; ``more`` will follow."""
        log = self._logs[-1]
        if log.lacks(len(rows)):
            log = self._longer(len(rows) + more)
        log.extend(rows)
        self._length += len(rows)
        self._settle()

    def see(self, rows: Rows) -> Rows:
        """Note that a listing found the blocks of ``rows``; return those that have no row.

        The others keep their places, and get the later time of use.
        """
        for log in self._logs:
            rows = log.see(rows) if log.live else rows
        return rows

    def take(self, block: bytes) -> ColdBlock | None:
        """Remove and return the row of ``block``, None if it has none."""
        for log in self._logs if self._length else ():
            at = log.find(block)
            if at >= 0:
                return self._take(log, at)
        return None

    def oldest(self) -> ColdBlock | None:
        """Return the oldest row, None if there is none."""
        if not self._length:
            return None
        return next((log.row(at) for log in self._logs if (at := log.first()) >= 0), None)

    def pop(self) -> ColdBlock | None:
        """Remove and return the oldest row, None if there is none."""
        for log in self._logs if self._length else ():
            at = log.first()
            if at >= 0:
                return self._take(log, at)
        return None

    def split(self, space: bytes) -> Rows:
        """Remove and return the rows of a namespace."""
        rows = np.concatenate([log.split(space) for log in self._logs])
        self._length -= len(rows)
        return rows

    def not_listed(self, round_: int) -> list[bytes]:
        """Return the blocks that listing ``round_`` did not find."""
        return self._where(lambda rows: rows["round"] != round_)

    def unused_since(self, when: float, most: int) -> list[bytes]:
        """Return blocks that were last used before ``when``, at most so many."""
        return self._where(lambda rows: rows["used"] < when, most)

    def _where(self, right: Any, most: int | None = None) -> list[bytes]:
        blocks: list[bytes] = []
        for log in self._logs:
            rows = log.columns()
            blocks += ids_of(rows[right(rows) & (rows["round"] != _HOLE)][:most])
        return blocks[:most]

    def _take(self, log: _Log, at: int) -> ColdBlock:
        row = log.row(at)
        log.remove(at)
        self._length -= 1
        self._settle()
        return row

    def _longer(self, more: int = 0) -> _Log:
        """Append a log that has room for ``more`` rows, and return it."""
        if not self._length:
            self._logs.clear()
        self._logs.append(_Log(more + _STEP // 4 + self._length // 2))
        return self._logs[-1]

    def _settle(self) -> None:
        """Move 4,096 rows of the second log to the first, if rows are to be moved."""
        logs, live = self._logs, self._length
        if len(logs) == 1 and logs[0].count - live <= live // 4 + _HOLES:
            return
        if len(logs) == 1 or logs[0].lacks(min(_STEP, logs[1].live)):
            logs.insert(0, _Log(live + max(live // 4, min(live, _STEP))))
        logs[0].extend(logs[1].drain())
        if not logs[1].live:
            del logs[1]

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        rows = list(self)
        assert len(rows) == self._length == len({row.block for row in rows})
        assert all(self.get(row.block) == row for row in rows)
        for log in self._logs:
            log.check()


class _Log:
    """Rows in the order in which they came, and an open-addressed table of them.

    It takes so many rows, holes included.
    """

    def __init__(self, room: int) -> None:
        self.live = 0
        self.count = 0  # of rows, holes included
        self._rows = bytearray()
        self._head = 0  # all before it are holes
        cells = max(64, 1 << (3 * room // 2).bit_length())
        self._table = array("i", bytes(4 * cells))  # row + 1; 0: none
        self._mask = cells - 1

    def lacks(self, more: int) -> bool:
        """Whether there is no room for ``more`` rows."""
        return 3 * (self.count + more) > 2 * len(self._table)

    def columns(self) -> Rows:
        """All rows; while the array lives, no row can be added."""
        return np.frombuffer(self._rows, _COLUMNS)

    def row(self, at: int) -> ColdBlock:
        block, size, used, _, round_ = _ROW.unpack_from(self._rows, at * _BYTES)
        return ColdBlock(block, size, used, round_)

    def all(self) -> Iterator[ColdBlock]:
        for block, size, used, _, round_ in _ROW.iter_unpack(bytes(self._rows)):
            if round_:
                yield ColdBlock(block, size, used, round_)

    def find(self, block: bytes) -> int:
        """Return the number of the row of ``block``, -1 if it has none."""
        table, rows, mask = self._table, self._rows, self._mask
        cell = hash(block) & mask
        while at := table[cell]:
            start = (at - 1) * _BYTES
            if rows.startswith(block, start) and rows[start + _ROUND_AT]:
                return at - 1
            cell = (cell + 1) & mask
        return -1

    def append(self, block: bytes, size: int, used: float, round_: int) -> None:
        number, table, mask = hash(block), self._table, self._mask
        cell = number & mask
        while table[cell]:
            cell = (cell + 1) & mask
        self._rows += _ROW.pack(block, size, used, number & 0xFFFFFFFF, round_)
        self.count += 1
        self.live += 1
        table[cell] = self.count

    def extend(self, rows: Rows) -> None:
        cells = self._cells(rows)
        numbers = np.arange(self.count + 1, self.count + 1 + len(rows), dtype=np.int32)
        self._rows += rows.tobytes()
        self.count += len(rows)
        self.live += len(rows)
        table = np.frombuffer(self._table, np.int32)
        while len(numbers):  # of several rows that find a cell free, one gets it
            free = table[cells] == 0
            table[cells[free]] = numbers[free]
            later = table[cells] != numbers
            numbers, cells = numbers[later], (cells[later] + 1) & self._mask

    def see(self, new: Rows) -> Rows:
        """Note that a listing found the blocks of ``new``; return those that have no row."""
        rows, table = self.columns(), np.frombuffer(self._table, np.int32)
        rest, cells, here = np.arange(len(new)), self._cells(new), np.zeros(len(new), np.int32)
        while len(rest):
            at = table[cells]
            there = at != 0
            rest, cells, at = rest[there], cells[there], at[there]
            same = rows["hash"][at - 1] == new["hash"][rest]
            same[same] = (rows["block"][at[same] - 1] == new["block"][rest[same]]).all(axis=1)
            same &= rows["round"][at - 1] != _HOLE
            here[rest[same]] = at[same]
            rest, cells = rest[~same], (cells[~same] + 1) & self._mask
        known = here > 0
        if not known.any():
            return new
        at = here[known] - 1
        rows["used"][at] = np.maximum(rows["used"][at], new["used"][known])
        rows["round"][at] = new["round"][known]
        return new[~known]

    def remove(self, at: int) -> None:
        self._rows[at * _BYTES + _ROUND_AT] = _HOLE
        self.live -= 1

    def first(self) -> int:
        """Return the number of the first row, -1 if there is none."""
        if not self.live:
            return -1
        for _ in range(_NEAR):
            if self._rows[self._head * _BYTES + _ROUND_AT]:
                return self._head
            self._head += 1
        self._head += int((self.columns()["round"][self._head :] != _HOLE).argmax())
        return self._head

    def drain(self) -> Rows:
        """Remove and return 4,096 rows in order, or those that are left."""
        begin = max(0, self.first())
        self._head = min(begin + _STEP, self.count)
        return self._remove(np.arange(begin, self._head))

    def split(self, space: bytes) -> Rows:
        """Remove and return the rows of a namespace."""
        wanted = np.frombuffer(space, "<u8")
        mine = (self.columns()["block"][:, : SPACE_BYTES // 8] == wanted).all(axis=1)
        return self._remove(np.flatnonzero(mine))

    def _remove(self, numbers: npt.NDArray[np.intp]) -> Rows:
        columns = self.columns()
        numbers = numbers[columns["round"][numbers] != _HOLE]
        rows = columns[numbers]
        columns["round"][numbers] = _HOLE
        self.live -= len(rows)
        return rows

    def _cells(self, rows: Rows) -> npt.NDArray[np.intp]:
        hashes: npt.NDArray[np.uint32] = rows["hash"]
        return hashes.astype(np.intp) & self._mask

    def check(self) -> None:
        assert len(self._rows) == self.count * _BYTES
        assert sum(map(bool, self._table)) == self.count
        assert self.live == int((self.columns()["round"] != _HOLE).sum())
