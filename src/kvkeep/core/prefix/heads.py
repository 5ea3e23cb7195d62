"""`Heads`: the child of a node whose key shares the longest head with a prompt."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Heads", "common_bytes", "common_head", "stored_bytes"]

_BLOCK = 512
_STEP = 1024  # bytes


def common_head(left: bytes, right: bytes) -> int:
    """Return how many leading bytes two short byte strings share."""
    length = min(len(left), len(right))
    differs = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    if not differs:
        return length
    return ((differs & -differs).bit_length() - 1) >> 3


def stored_bytes(run: bytes | memoryview) -> bytes:
    """Return the bytes that ``run`` is the first of: a run that lost its tail is a view of them."""
    if type(run) is bytes:
        return run
    stored = cast("memoryview", run).obj
    assert type(stored) is bytes
    return stored


def common_bytes(part: memoryview, whole: bytes) -> int:
    """Return how many leading bytes ``part``, of bytes, and ``whole`` share.

    Cost: 2 µs, and at most three passes over those.
    """
    length = min(len(part), len(whole))
    if length < len(whole) and whole.startswith(part):
        return length
    low, step = 0, _STEP
    while low < length:
        high = min(low + step, length)
        if whole.startswith(part[low:high], low):
            low, step = high, step * 4
            continue
        while high - low > _STEP:
            middle = (low + high) >> 1
            if whole.startswith(part[low:middle], low):
                low = middle
            else:
                high = middle
        given = np.frombuffer(part, np.uint8, high - low, low)
        return low + int((given != np.frombuffer(whole, np.uint8, high - low, low)).argmax())
    return length


class Heads:
    """The keys of a node's children in lexicographic order.

    The key that shares the longest head with a given one is its neighbour in this order. Keys lie
    in blocks of some hundred, so adding one moves few. Removals of children are not reported: a key
    without a child is dropped when a search meets it. Once most keys have none, all are dropped.

    Cost: O(log n) comparisons to find and to add, amortised over removals.
    """

    __slots__ = ("_blocks", "_count", "_last")

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]
        self._last: list[bytes] = [b""]  # no key of block i is larger than _last[i]
        self._count = 0

    def add(self, key: bytes, alive: Collection[bytes]) -> None:
        """Add ``key``; ``alive`` are the children's present keys, this one among them."""
        if self._count > 2 * len(alive) + _BLOCK:
            self._rebuild(alive)
        at = bisect_left(self._last, key)
        if at == len(self._blocks):
            at -= 1
            self._last[at] = key
        block = self._blocks[at]
        place = bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return  # a key that was removed, but not dropped yet, is added again
        block.insert(place, key)
        self._count += 1
        if len(block) > 2 * _BLOCK:
            half = len(block) >> 1
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._last.insert(at, block[half - 1])

    def closest(self, key: bytes, alive: Collection[bytes]) -> tuple[bytes, int] | None:
        """Return the living key with the longest head in common, and its length in bytes."""
        best: tuple[bytes, int] | None = None
        at = min(bisect_left(self._last, key), len(self._blocks) - 1)
        place = bisect_left(self._blocks[at], key)
        for neighbour in (self._after(at, place, alive), self._before(at, place, alive)):
            if neighbour is not None:
                common = common_head(key, neighbour)
                if best is None or common > best[1]:
                    best = neighbour, common
        return best

    def _after(self, at: int, place: int, alive: Collection[bytes]) -> bytes | None:
        for block in self._blocks[at:]:
            while place < len(block):
                if block[place] in alive:
                    return block[place]
                del block[place]
                self._count -= 1
            place = 0
        return None

    def _before(self, at: int, place: int, alive: Collection[bytes]) -> bytes | None:
        block = self._blocks[at]
        while True:
            while place > 0:
                place -= 1
                if block[place] in alive:
                    return block[place]
                del block[place]
                self._count -= 1
            if at == 0:
                return None
            at -= 1
            block = self._blocks[at]
            place = len(block)

    def _rebuild(self, alive: Collection[bytes]) -> None:
        keys = [key for block in self._blocks for key in block if key in alive]
        self._blocks = [keys[i : i + _BLOCK] for i in range(0, len(keys), _BLOCK)] or [[]]
        self._last = [block[-1] if block else b"" for block in self._blocks]
        self._count = len(keys)
