"""`CodeBands`: the entropy coding of the codec `transform`.

The codes of some groups [rank, tokens] are sorted into bands by the spread of their row. A band's
rows, those of the first group first, are one sequence of codes. Each byte has several codes if they
are small, so that zstd's Huffman code spends less than a bit on one; the bytes of a band are
frames (`kvkeep.store.codecs.frames`) of at most a mebibyte.

    band   spread    codes a byte   largest code
       0   < 0.25    5              1
       1   < 0.55    3              2
       2   < 1.6     2              7
       3   < 5       1              127
       4   others    1              127

With r = 2 · largest + 1 and n = ⌈codes / k⌉ bytes, byte i is the sum over j < k of
(code[i + j · n] + largest) · r^j; the sequence is continued with zeros to k · n codes. One code a
byte is written as it is. Larger codes are exceptions: written as 0, and in a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.store.codecs.frames import FRAME_BYTES, FRAME_HEAD, BloscFrames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Codes = NDArray[np.int8]

__all__ = ["CodeBands"]

_EDGES = np.array([0.25, 0.55, 1.6, 5.0], np.float32)
_PACKING = ((5, 1), (3, 2), (2, 7), (1, 127), (1, 127))  # codes a byte, largest code


class _Run(NamedTuple):
    """Rows ``first`` to ``last`` of a group's codes, which are in one band; ``place``: there."""

    group: int
    first: int
    last: int
    place: int


class CodeBands:
    """The bands of some groups with these ``spreads``, each not ascending.

    Thread safety: immutable.

    Attributes:
        rows: codes a token, all groups together.
    """

    def __init__(self, spreads: Sequence[NDArray[np.float32]], frames: BloscFrames) -> None:
        self._frames = frames
        self._runs: list[_Run] = []
        self._bands: list[tuple[int, int, int]] = []  # number, first place, rows
        self.rows = 0
        cuts = [np.searchsorted(-spread, -_EDGES, side="right") for spread in spreads]
        for band in range(len(_PACKING)):
            start = self.rows
            for group, spread in enumerate(spreads):
                first = int(cuts[group][band]) if band < len(_EDGES) else 0
                last = int(cuts[group][band - 1]) if band else len(spread)
                if first < last:
                    self._runs.append(_Run(group, first, last, self.rows))
                    self.rows += last - first
            if self.rows > start:
                self._bands.append((band, start, self.rows - start))

    def bound(self, tokens: int) -> int:
        """Return the maximum size of the frames of so many tokens."""
        total = 0
        for band, _, rows in self._bands:
            size = -(-rows * tokens // _PACKING[band][0])
            total += size + FRAME_HEAD * -(-size // FRAME_BYTES)
        return total

    def join(self, codes: Sequence[Codes]) -> Codes:
        """Return the rows of all groups' ``codes`` [rank, tokens] in the order of the bands."""
        tokens = codes[0].shape[1]
        joined = np.empty((self.rows, tokens), np.int8)
        for group, first, last, place in self._runs:
            joined[place : place + last - first] = codes[group][first:last]
        return joined

    def split(self, joined: Codes, codes: Sequence[Codes]) -> None:
        """Copy the rows of ``joined`` into each group's ``codes``: the inverse of `join`."""
        for group, first, last, place in self._runs:
            codes[group][first:last] = joined[place : place + last - first]

    def take_exceptions(self, joined: Codes) -> tuple[NDArray[np.uint32], Codes]:
        """Return places and values of codes too large for their band; set them to 0."""
        flat = joined.reshape(-1)
        tokens = joined.shape[1]
        places = []
        for band, start, rows in self._bands:
            largest = _PACKING[band][1]
            part = flat[start * tokens : (start + rows) * tokens]
            if largest < 127:
                places.append(np.flatnonzero(np.abs(part) > largest) + start * tokens)
        where = np.concatenate(places) if places else np.empty(0, np.int64)
        values = flat[where]
        flat[where] = 0
        return where.astype(np.uint32), values

    def write(self, joined: Codes, out: memoryview) -> int:
        """Write the frames of ``joined`` [rows, tokens]; return their size, at most `bound`."""
        at = 0
        tokens = joined.shape[1]
        for band, start, rows in self._bands:
            packed = _pack(joined[start : start + rows].reshape(-1), *_PACKING[band])
            for first in range(0, tokens * rows, FRAME_BYTES):
                frame = packed[first : first + FRAME_BYTES]
                if len(frame):
                    at += self._frames.write(frame.data, 1, out[at:])
        return at

    def read(self, encoded: memoryview, tokens: int) -> tuple[Codes, int]:
        """Return the codes [rows, tokens] in the order of the bands, and the size of the frames.

        Raises:
            Damaged: these are no such frames.
        """
        at = 0
        joined = np.empty((self.rows, tokens), np.int8)
        for band, start, rows in self._bands:
            count, largest = _PACKING[band]
            codes = joined[start : start + rows].reshape(-1)
            if count == 1:
                packed = codes.view(np.uint8)
            else:
                packed = np.empty(-(-len(codes) // count), np.uint8)
            for first in range(0, len(packed), FRAME_BYTES):
                frame = packed[first : first + FRAME_BYTES].data
                at += self._frames.read(encoded[at:], frame)
            if count > 1:
                _unpack(packed, count, largest, codes)
        return joined, at


def _pack(codes: Codes, count: int, largest: int) -> NDArray[np.uint8]:
    if count == 1:
        return codes.view(np.uint8)
    size = -(-len(codes) // count)
    full = np.zeros(size * count, np.int8)
    full[: len(codes)] = codes
    digits = (full + np.int8(largest)).view(np.uint8).reshape(count, size)
    packed: NDArray[np.uint8] = digits[-1].copy()
    for digit in digits[-2::-1]:
        packed *= np.uint8(2 * largest + 1)
        packed += digit
    return packed


def _unpack(packed: NDArray[np.uint8], count: int, largest: int, codes: Codes) -> None:
    """Fill ``codes``. Alters ``packed``."""
    size = len(packed)
    digits = codes.view(np.uint8)
    radix = np.uint8(2 * largest + 1)
    for place in range(count - 1):
        share = digits[place * size : (place + 1) * size]
        above = packed // radix
        if len(share) == size:
            np.subtract(packed, above * radix, out=share)
        else:
            share[:] = (packed - above * radix)[: len(share)]
        packed = above
    last = digits[(count - 1) * size :]
    last[:] = packed[: len(last)]
    codes -= np.int8(largest)
