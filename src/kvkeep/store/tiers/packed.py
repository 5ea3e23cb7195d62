"""`Packed`: known blocks in about a hundred bytes each, in eviction order.

A dict of objects takes five times as much. Rows are stored in 65,536 buckets by the hash of the
block id; a row is found by searching its bucket for the id's bytes. Each group (one namespace with
a quota, or all the others; one tenant with shares) has a queue of rows, oldest first.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.core.keys import BLOCK_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

__all__ = ["Packed", "PackedRow"]

_ROW: Final = struct.Struct(f"<{BLOCK_ID_BYTES}sQdIHQ")
_USED_AT: Final = BLOCK_ID_BYTES + 8
_ROUND_AT: Final = _USED_AT + 12
_SERIAL_AT: Final = _ROUND_AT + 2
_MOST_HITS: Final = 2**32 - 1
_AT_ONCE: Final = 1024  # buckets
_SLACK: Final = 4096  # a queue may have as many stale entries as rows, and this many more


class PackedRow(NamedTuple):
    """A block: bytes of its record, last use (Unix seconds), hits, and the last listing with it.

    ``serial`` is unique: a block that is taken out and added again gets another one.
    """

    block: bytes
    size: int
    used: float
    hits: int
    round: int
    serial: int

    @property
    def pinned(self) -> float:
        """Always 0, which means not pinned: pinned blocks are never packed."""
        return 0.0


class _Queue:
    """Entries (bucket, serial number), oldest first. Stale ones are dropped at the front."""

    __slots__ = ("buckets", "head", "live", "serials")

    def __init__(self) -> None:
        self.buckets = array("H")
        self.serials = array("Q")
        self.head = 0
        self.live = 0

    def __len__(self) -> int:
        return len(self.serials) - self.head


class Packed:
    """Blocks as packed rows, with a queue of rows per group.

    Thread safety: none. Cost: about a microsecond a call.
    Memory: 77 bytes for a row, 10 in its queue, some slack; and half a mebibyte with the first row.
    """

    def __init__(self, group_of: Callable[[bytes], Hashable], buckets: int = 1 << 16) -> None:
        self._group_of = group_of
        self._number = buckets
        self._buckets: list[bytearray | None] = []
        self._queues: dict[Hashable, _Queue] = {}
        self._regroup = False  # the queues must be rebuilt before the next use
        self._length = 0
        self._serial = 0
        self._uses: array[float] | None = None  # last uses by serial number since `begin_listing`
        self._since = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: bytes) -> bool:
        return self._length > 0 and self._find(block)[1] >= 0

    def __iter__(self) -> Iterator[PackedRow]:
        for bucket in self._buckets:
            if bucket:
                yield from map(PackedRow._make, _ROW.iter_unpack(bytes(bucket)))

    def get(self, block: bytes) -> PackedRow | None:
        """Return the row of ``block``, None if it has none."""
        bucket, at = self._find(block)
        return None if bucket is None or at < 0 else PackedRow._make(_ROW.unpack_from(bucket, at))

    def add(self, block: bytes, size: int, used: float, hits: int, round_: int) -> None:
        """Add a row for ``block``, which has none, at the end of its group's queue."""
        self._settle()
        if not self._buckets:
            self._buckets = [None] * self._number
        number = hash(block) % self._number
        bucket = self._buckets[number]
        if bucket is None:
            bucket = self._buckets[number] = bytearray()
        serial = self._serial
        self._serial += 1
        bucket += _ROW.pack(block, size, used, min(hits, _MOST_HITS), round_, serial)
        self._length += 1
        self._push(self._group_of(block), number, serial)
        if self._uses is not None:
            self._uses.append(used)

    def seen(self, block: bytes, used: float, round_: int) -> bool:
        """Record that listing ``round_`` found ``block``; return False if it has no row.

        The row keeps the later of its own last use and ``used``, and its place in the queue.
        """
        bucket, at = self._find(block)
        if bucket is None or at < 0:
            return False
        if used > struct.unpack_from("<d", bucket, at + _USED_AT)[0]:
            struct.pack_into("<d", bucket, at + _USED_AT, used)
        struct.pack_into("<H", bucket, at + _ROUND_AT, round_)
        return True

    def take(self, block: bytes) -> PackedRow | None:
        """Remove and return the row of ``block``, None if it has none."""
        self._settle()
        bucket, at = self._find(block)
        if bucket is None or at < 0:
            return None
        row = PackedRow._make(_ROW.unpack_from(bucket, at))
        del bucket[at : at + _ROW.size]
        if not bucket:
            self._buckets[hash(block) % self._number] = None
        self._length -= 1
        group = self._group_of(block)
        queue = self._queues[group]
        queue.live -= 1
        if not queue.live:
            del self._queues[group]  # there may be many groups in the course of time
        elif len(queue) > 2 * queue.live + _SLACK:
            self._compact(queue)
        return row

    def oldest(self, group: Hashable) -> PackedRow | None:
        """Return the oldest row of ``group`` without removing it."""
        self._settle()
        queue = self._queues.get(group)
        if queue is None:
            return None
        while queue.head < len(queue.serials):
            row = self._row(queue.buckets[queue.head], queue.serials[queue.head])
            if row is not None:
                return row
            queue.head += 1
        return None

    def parts(self) -> range:
        """The arguments for `sweep` that together cover all rows."""
        return range(0, self._number, _AT_ONCE)

    def sweep(self, part: int, gone: Callable[[PackedRow], bool]) -> list[PackedRow]:
        """Return the rows in one of `parts` for which ``gone`` is true, without removing them."""
        some = self._buckets[part : part + _AT_ONCE]
        return [
            row
            for bucket in some
            if bucket
            for row in map(PackedRow._make, _ROW.iter_unpack(bytes(bucket)))
            if gone(row)
        ]

    # --- listings --------------------------------------------------------------------------------

    def begin_listing(self) -> None:
        """Begin to add the rows of a listing, whose order `end_listing` decides."""
        self._uses = array("d")
        self._since = self._serial

    def end_listing(self) -> None:
        """Order the rows added since `begin_listing` by last use, behind all others."""
        self._settle()
        assert self._uses is not None
        uses, self._uses = np.array(self._uses), None
        for queue in self._queues.values():
            self._compact(queue, check=False)
            serials = np.array(queue.serials, np.uint64)
            buckets = np.array(queue.buckets, np.uint16)
            new = serials >= self._since
            age = np.full(len(serials), -np.inf)
            age[new] = uses[(serials[new] - np.uint64(self._since)).astype(np.int64)]
            order = np.argsort(age, kind="stable")
            queue.serials = array("Q", serials[order].tobytes())
            queue.buckets = array("H", buckets[order].tobytes())

    def newest(self, most: int) -> list[bytes]:
        """Return the ``most`` newest blocks of the last listing, the oldest of them first."""
        found: list[tuple[float, bytes]] = []
        for queue in self._queues.values():
            for at in range(max(queue.head, len(queue.serials) - most), len(queue.serials)):
                if queue.serials[at] >= self._since:
                    row = self._row(queue.buckets[at], queue.serials[at])
                    if row is not None:
                        found.append((row.used, row.block))
        found.sort(key=lambda item: item[0])
        return [block for _, block in found[max(0, len(found) - most) :]]

    def regroup(self) -> None:
        """Rebuild the queues at the next use, since ``group_of`` returns other groups now."""
        self._regroup = self._length > 0

    # --- internals -------------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self._regroup:
            return
        self._regroup = False
        old, self._queues = self._queues, {}
        # Rows of one queue keep their order; those of several are merged by last use.
        queues = [self._rows_of(queue) for queue in old.values()]
        for number, row in heapq.merge(*queues, key=lambda found: found[1].used):
            self._push(self._group_of(row.block), number, row.serial)

    def _rows_of(self, queue: _Queue) -> Iterator[tuple[int, PackedRow]]:
        """Yield the rows of ``queue`` with their buckets, oldest first."""
        for at in range(queue.head, len(queue.serials)):
            row = self._row(queue.buckets[at], queue.serials[at])
            if row is not None:
                yield queue.buckets[at], row

    def _find(self, block: bytes) -> tuple[bytearray | None, int]:
        if not self._length:
            return None, -1
        bucket = self._buckets[hash(block) % self._number]
        if bucket is None:
            return None, -1
        at = bucket.find(block)
        while at >= 0 and at % _ROW.size:  # a chance match that does not begin a row
            at = bucket.find(block, at + 1)
        return bucket, at

    def _row(self, number: int, serial: int) -> PackedRow | None:
        bucket = self._buckets[number]
        if bucket is None:
            return None
        wanted = serial.to_bytes(8, "little")
        at = bucket.find(wanted)
        while at >= 0 and at % _ROW.size != _SERIAL_AT:
            at = bucket.find(wanted, at + 1)
        return None if at < 0 else PackedRow._make(_ROW.unpack_from(bucket, at - _SERIAL_AT))

    def _push(self, group: Hashable, number: int, serial: int) -> None:
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = _Queue()
        queue.buckets.append(number)
        queue.serials.append(serial)
        queue.live += 1

    def _compact(self, queue: _Queue, *, check: bool = True) -> None:
        """Drop the entries before the head, and with ``check`` all stale ones."""
        del queue.buckets[: queue.head], queue.serials[: queue.head]
        queue.head = 0
        if check:
            alive = [
                at
                for at, number in enumerate(queue.buckets)
                if self._row(number, queue.serials[at]) is not None
            ]
            queue.buckets = array("H", [queue.buckets[at] for at in alive])
            queue.serials = array("Q", [queue.serials[at] for at in alive])

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        self._settle()
        rows = list(self)
        assert len(rows) == self._length == len({row.block for row in rows})
        queued: dict[int, Hashable] = {}
        for group, queue in self._queues.items():
            alive = 0
            for at in range(queue.head, len(queue.serials)):
                row = self._row(queue.buckets[at], queue.serials[at])
                if row is not None:
                    assert row.serial not in queued
                    queued[row.serial] = group
                    alive += 1
            assert alive == queue.live
        assert len(queued) == self._length
