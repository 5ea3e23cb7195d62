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

__all__ = ["ColdBlock", "ColdBlocks", "Rows", "ids_of", "rows_of"]

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


def rows_of(blocks: Iterable[tuple[bytes, int, float]], round_: int) -> Rows:
    """Return rows of (block, bytes, last use), which listing ``round_`` found."""
    packed = [_ROW.pack(*block, hash(block[0]) & 0xFFFFFFFF, round_) for block in blocks]
    return np.frombuffer(b"".join(packed), _COLUMNS)


def ids_of(rows: Rows) -> list[bytes]:
    """Return the ids of blocks."""
    every = rows["block"].tobytes()
    return [every[at : at + BLOCK_ID_BYTES] for at in range(0, len(every), BLOCK_ID_BYTES)]


class ColdBlocks:
    """Rows of blocks, the oldest first.

    They stand in logs. A block that leaves makes a hole. A log with many holes, or one that is full
    of rows, is moved into a larger one, 4,096 rows at each change, so that no call takes long. What
    a listing finds stands in logs of its own until its order is known.

    Thread safety: none; the index calls it under its lock. Memory: 69 bytes a row, 6 to 12 for its
    place in a table, and holes for up to a quarter of the rows; twice that while rows are moved.
    Cost: a microsecond a call, and up to 2 ms while rows are moved.
    """

    def __init__(self) -> None:
        self._logs = [_Log(0)]  # oldest first; the rows of the second move to the first
        self._listed: list[_Log] = []  # the same
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ColdBlock]:
        for log in self._every():
            yield from log.all()

    def _every(self) -> list[_Log]:
        return self._logs + self._listed if self._listed else self._logs

    def get(self, block: bytes) -> ColdBlock | None:
        """Return the row of ``block``, None if it has none."""
        for log in self._every():
            at = log.find(block)
            if at >= 0:
                return log.row(at)
        return None

    def add(self, block: bytes, size: int, used: float, round_: int) -> None:
        """Add ``block``, which has no row, as the newest."""
        log = self._logs[-1]
        if log.lacks(1):
            log = self._longer(self._logs)
        log.append(block, size, used, round_)
        self._length += 1
        self.settle()

    def extend(self, rows: Rows) -> None:
        """Add rows of blocks that have none as the newest, in their order."""
        self._extend(self._logs, rows)
        self.settle()

    def _extend(self, logs: list[_Log], rows: Rows) -> None:
        log = logs[-1] if logs and not logs[-1].lacks(len(rows)) else self._longer(logs, len(rows))
        log.extend(rows)
        self._length += len(rows)

    def _longer(self, logs: list[_Log], more: int = 0) -> _Log:
        """Append a log to ``logs`` that has room for ``more`` rows, and return it."""
        logs.append(_Log(more + _STEP // 4 + sum(log.live for log in logs) // 2))
        return logs[-1]

    def take(self, block: bytes) -> ColdBlock | None:
        """Remove and return the row of ``block``, None if it has none."""
        for log in self._every() if self._length else ():
            at = log.find(block)
            if at >= 0:
                return self._take(log, at)
        return None

    def oldest(self) -> ColdBlock | None:
        """Return the oldest row, None if there is none."""
        if not self._length:
            return None
        logs = ((log, log.first()) for log in self._every())
        return next((log.row(at) for log, at in logs if at >= 0), None)

    def pop(self) -> ColdBlock | None:
        """Remove and return the oldest row, None if there is none."""
        for log in self._every() if self._length else ():
            at = log.first()
            if at >= 0:
                return self._take(log, at)
        return None

    def _take(self, log: _Log, at: int) -> ColdBlock | None:
        row = log.row(at)
        log.remove(at)
        self._length -= 1
        self.settle()
        return row

    def split(self, space: bytes) -> Rows:
        """Remove and return the rows of a namespace."""
        rows = np.concatenate([log.split(space) for log in self._every()])
        self._length -= len(rows)
        return rows

    def settle(self) -> bool:
        """Move 4,096 rows, if rows are to be moved; return whether there are more."""
        if len(self._logs) == 1:
            log = self._logs[0]
            if log.count - log.live <= log.live // 4 + _HOLES:
                return False
        live = sum(log.live for log in self._logs)
        return _move(self._logs, live + max(live // 4, min(live, _STEP)))

    # --- listings --------------------------------------------------------------------------------

    def listed(self, rows: Rows) -> Rows:
        """Take over the rows of different blocks that a listing found; return the new ones.

        Rows that are here keep their places, and get the later time of use.
        """
        for log in self._every():
            rows = log.see(rows) if log.live else rows
        if len(rows):
            self._extend(self._listed, rows)
            self.settle_listed()
        return rows

    def settle_listed(self) -> bool:
        """Move 4,096 of the listed rows, if they are in several logs; whether there are more."""
        if len(self._listed) < 2:
            return False
        return _move(self._listed, 2 * sum(log.live for log in self._listed))

    def listed_times(self) -> npt.NDArray[np.float64]:
        """Return when the rows of a listing were used last, behind `settle_listed`."""
        return self._listed[0].columns()["used"].copy() if self._listed else np.empty(0)

    def end_listing(self, order: npt.NDArray[np.intp], most: int) -> Rows:
        """Order the rows of a listing by ``order``, behind all others; return the last ones."""
        if not self._listed:
            return np.empty(0, _COLUMNS)
        (log,), self._listed = self._listed, []
        log.order = order
        self._logs.append(log)
        newest = log.columns()[order[max(0, len(order) - most) :]]
        return newest[newest["round"] != _HOLE]

    def not_listed(self, round_: int) -> list[bytes]:
        """Return the blocks that listing ``round_`` did not find."""
        return self._where(lambda rows: rows["round"] != round_)

    def unused_since(self, when: float, most: int) -> list[bytes]:
        """Return blocks that were last used before ``when``, at most so many."""
        return self._where(lambda rows: rows["used"] < when, most)

    def _where(self, right: Any, most: int | None = None) -> list[bytes]:
        blocks: list[bytes] = []
        for log in self._every():
            rows = log.columns()
            blocks += ids_of(rows[right(rows) & (rows["round"] != _HOLE)][:most])
        return blocks[:most]

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        rows = list(self)
        assert len(rows) == self._length == len({row.block for row in rows})
        assert all(self.get(row.block) == row for row in rows)
        for log in self._every():
            log.check()


def _move(logs: list[_Log], room: int) -> bool:
    """Move 4,096 rows to the first log, which takes ``room`` rows if it has to be a new one.

    Returns whether there are more.
    """
    if len(logs) == 1 or logs[0].lacks(min(_STEP, logs[1].live)):
        logs.insert(0, _Log(room))
    logs[0].extend(logs[1].drain())
    if not logs[1].live:
        del logs[1]
    return len(logs) > 1


class _Log:
    """Rows in the order in which they came, or in ``order``, and an open-addressed table of them.

    It takes so many rows, holes included.
    """

    def __init__(self, room: int) -> None:
        self.live = 0
        self.count = 0  # of rows, holes included
        self.order: npt.NDArray[np.intp] | None = None
        self._rows = bytearray()
        self._head = 0  # all before it, in order, are holes
        cells = max(64, 1 << (3 * room // 2).bit_length())
        self._table = array("i", bytes(4 * cells))  # row + 1; 0: none
        self._mask = cells - 1

    def lacks(self, more: int) -> bool:
        """Whether there is no room for ``more`` rows; never behind those in `order`."""
        return self.order is not None or 3 * (self.count + more) > 2 * len(self._table)

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
        order, rows = self.order, self._rows
        for _ in range(_NEAR):
            if self._head >= self.count:
                return -1
            at = self._head if order is None else int(order[self._head])
            if rows[at * _BYTES + _ROUND_AT]:
                return at
            self._head += 1
        rounds = self.columns()["round"]
        ahead = (rounds if order is None else rounds[order])[self._head :]
        self._head = self._head + int((ahead != _HOLE).argmax()) if self.live else self.count
        return self.first()

    def drain(self) -> Rows:
        """Remove and return 4,096 rows in order, or those that are left."""
        if self.first() < 0:
            return np.empty(0, _COLUMNS)
        begin, self._head = self._head, min(self._head + _STEP, self.count)
        if self.order is None:
            return self._remove(np.arange(begin, self._head))
        return self._remove(self.order[begin : self._head])

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
        assert self.order is None or len(self.order) == self.count
