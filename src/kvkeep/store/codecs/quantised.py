"""Lossy codecs of numbers: the parts of a block, and `int8` and `fp8`, one byte per number.

Each part (K or V of a layer) is encoded on its own, or stays as it is: if a number is not finite or
too large, or if it would not become smaller. Encoded bytes:

    heads       one byte per part: how it is encoded, 0 as it is; zeros up to a multiple of 8
    each part   its raw bytes, or what its head says; zeros up to a multiple of 8

`int8` and `fp8` have a scale per *tile*. With head 1 (per channel) it is 64 tokens of one channel:
some channels of keys are large for every token, and would leave the others few steps (KIVI, arXiv
2402.02750). With head 2 (per token) it is 64 channels of one token, or of as many tokens as small
heads need. Whichever has the smaller squared error on a sample is used, head 2 below 32 tokens.

    scales      [rows, runs, groups], the upper half of a float32, little-endian, rounded up so that
                no code exceeds its range, and at least 2^-126
    codes       one byte each, in the order of the raw numbers

Rows are heads in HND; NHD has one row, with the channels of all heads.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs.base import Codec, Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvkeep.store.codecs.base import BlockShape

__all__ = [
    "PIECE", "Fp8Codec", "Int8Codec", "Part", "QuantisedCodec", "divisor", "pieces", "regions",
]  # fmt: skip

_PER_CHANNEL, _PER_TOKEN = 1, 2
_FEW_TOKENS = 32
_SAMPLE_TOKENS = 64
_SAMPLE_CHANNELS = 256
_LEAST_SCALE = 2.0**-126  # the smallest with a finite, exact reciprocal
_NEAR_MAXIMUM = 0.98  # of the type's maximum: half a step more must not overflow
_GROUP = 64  # numbers that share a scale: 64 + 2 bytes instead of 128 of bfloat16, 1.94 times less
PIECE = 1 << 15
"""Numbers processed at once; for more, torch would use its thread pool."""

_ALIGNED: Final = 8


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _bytes_of(buffer: memoryview) -> Tensor:
    """Return a buffer as a tensor of uint8; a read-only one is copied, as torch needs to write."""
    writable = bytearray(buffer) if buffer.readonly else buffer
    return torch.frombuffer(writable, dtype=torch.uint8)


def divisor(number: int, most: int) -> int:
    """Return the greatest divisor of ``number`` in ``most / 2`` … ``most``, else ``number``."""
    return next((n for n in range(min(number, most), most // 2 - 1, -1) if number % n == 0), number)


def regions(tokens: int, run: int) -> list[tuple[int, int, int]]:
    """Return (first run, runs, tokens of each): whole runs, then the one with the remainder."""
    last = max(1, tokens // run) - 1
    if tokens == (last + 1) * run:
        return [(0, last + 1, run)]
    return [(0, last, run)] * (last > 0) + [(last, 1, tokens - last * run)]


def pieces(region: Tensor) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield slices that cut ``region`` [rows, runs, run, groups, width] at rows, runs and groups.

    A piece has at most 32768 numbers, if a group of a run has: torch computes it in this thread.
    """
    rows, runs, run, groups, width = region.shape
    room = PIECE // (run * width)
    steps = []
    for length in (groups, runs, rows):
        steps.append(max(1, min(length, room)))
        room //= length
    each, many, rest = steps
    for row, first, group in product(
        range(0, rows, rest), range(0, runs, many), range(0, groups, each)
    ):
        yield (
            slice(row, row + rest),
            slice(first, first + many),
            slice(None),
            slice(group, group + each),
        )


class Part(NamedTuple):
    """A part of a block of ``tokens``; ``start`` and ``size`` in its raw bytes."""

    number: int
    start: int
    size: int
    heads: int
    tokens: int
    dim: int


class QuantisedCodec(Codec):
    """Encodes each part on its own, or leaves it as it is.

    A call processes pieces of 32768 numbers, which torch computes in the calling thread; its
    thread pool stays free for the model.

    Raises:
        InvalidValue: the bytes are opaque, or have numbers of one byte.
    """

    exact = False

    def __init__(self, shape: BlockShape) -> None:
        if not shape.dtype or not shape.parts:
            raise InvalidValue(
                f"codec {self.name} needs the element type, and these bytes are opaque; "
                "raw and lossless work on any bytes"
            )
        if DTYPES[shape.dtype] < 2:
            raise InvalidValue(
                f"codec {self.name} shortens numbers of two bytes or more, and those of "
                f"{shape.dtype} have one; use raw or lossless"
            )
        if shape.layout not in ("NHD", "HND"):
            raise InvalidValue(f"layout is 'NHD' or 'HND', got {shape.layout!r}")
        self._parts = shape.parts
        self._heads_first = shape.layout == "HND"
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._item = DTYPES[shape.dtype]
        self._token_bytes = sum(heads * dim for heads, dim in shape.parts) * self._item

    @abstractmethod
    def _encoded_size(self, part: Part, head: int) -> int | None:
        """Return the size of a part with this head (not 0), without padding; None: no such head."""

    @abstractmethod
    def _encode_part(self, part: Part, numbers: Tensor, target: Tensor) -> int:
        """Encode flat ``numbers`` to the front of ``target``; return the head, 0: as they are."""

    @abstractmethod
    def _decode_part(self, part: Part, head: int, source: Tensor, numbers: Tensor) -> None:
        """Decode ``source`` into flat ``numbers``. Raises `Damaged`."""

    def bound(self, raw_bytes: int) -> int:
        """Return the raw size plus heads and padding: parts that do not shrink stay as they are."""
        return raw_bytes + _aligned(len(self._parts)) + _ALIGNED * len(self._parts)

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode part by part. A read-only ``raw`` is copied first: torch needs writable memory."""
        del bound_to
        assert len(raw) >= self._token_bytes, "a block without a token"
        assert not len(raw) % self._token_bytes, "a block that does not end with a token"
        given, target = _bytes_of(raw), _bytes_of(out)
        at = _aligned(len(self._parts))
        target[:at] = 0
        for part in self._layout(len(raw)):
            raw_part = slice(part.start, part.start + part.size)
            head = self._encode_part(part, given[raw_part].view(self._dtype), target[at:])
            end = at + (self._encoded_size(part, head) or 0 if head else part.size)
            if not head:
                out[at:end] = raw[raw_part]
            target[part.number] = head
            at = _aligned(end)
            target[end:at] = 0
        return at

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decode part by part into ``out``. A read-only ``encoded`` is copied first."""
        del bound_to
        if not len(out) or len(out) % self._token_bytes:
            raise Damaged(f"{len(out)} bytes are not whole tokens of {self._token_bytes}")
        heads = bytes(encoded[: len(self._parts)])
        at = _aligned(len(self._parts))
        if len(encoded) < at:
            raise Damaged(f"{len(encoded)} bytes do not begin with the kinds of all parts")
        parts = []
        size = at
        for part, head in zip(self._layout(len(out)), heads, strict=True):
            bytes_here = self._encoded_size(part, head) if head else part.size
            if bytes_here is None:
                raise Damaged(f"{head:#x} is none of the kinds of parts")
            parts.append((part, head, bytes_here))
            size += _aligned(bytes_here)
        if size != len(encoded):
            raise Damaged(f"{len(encoded)} bytes; {size} are expected")
        source, restored = _bytes_of(encoded), _bytes_of(out)
        for part, head, size in parts:
            raw_part = slice(part.start, part.start + part.size)
            if head:
                numbers = restored[raw_part].view(self._dtype)
                self._decode_part(part, head, source[at : at + size], numbers)
            else:
                out[raw_part] = encoded[at : at + size]
            at += _aligned(size)

    def _layout(self, raw_bytes: int) -> Iterator[Part]:
        tokens = raw_bytes // self._token_bytes
        start = 0
        for number, (heads, dim) in enumerate(self._parts):
            size = heads * tokens * dim * self._item
            yield Part(number, start, size, heads, tokens, dim)
            start += size


class _Tiles(NamedTuple):
    """The tiles of a part: [rows, tokens, channels] in runs of tokens and groups of channels."""

    rows: int
    tokens: int
    groups: int
    run: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, runs and groups, which the scales have."""
        return self.rows, max(1, self.tokens // self.run), self.groups

    def cut(self, numbers: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of both that broadcast: [rows, runs, run, groups, width]."""
        by_group = numbers.view(self.rows, self.tokens, self.groups, self.width)
        for first, runs, length in regions(self.tokens, self.run):
            start = first * self.run
            region = by_group[:, start : start + runs * length]
            region = region.view(self.rows, runs, length, self.groups, self.width)
            yield region, scales[:, first : first + runs, None, :, None]


class ByteCodec(QuantisedCodec):
    """One byte per number, one scale per tile. Memory: a few pieces beside the two buffers."""

    largest: float
    """Code of a tile's greatest magnitude."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__(shape)
        self._bits = torch.int32 if self._item == 4 else torch.int16
        self._magnitude = 0x7FFFFFFF if self._item == 4 else 0x7FFF
        end = torch.tensor(torch.finfo(self._dtype).max * _NEAR_MAXIMUM, dtype=self._dtype)
        self._greatest_bits = int(end.view(self._bits))

    @abstractmethod
    def _quantise(self, numbers: Tensor, codes: Tensor) -> None:
        """Round float32 ``numbers``, at most `largest`, into uint8 ``codes``. Alters them."""

    @abstractmethod
    def _restore(self, codes: Tensor) -> Tensor:
        """Return the float32 numbers of ``codes`` (uint8) in a new tensor."""

    def _tiles(self, part: Part, head: int) -> _Tiles:
        rows, channels = part.heads, part.dim
        if not self._heads_first:
            rows, channels = 1, part.heads * part.dim
        width = 1 if head == _PER_CHANNEL else divisor(part.dim, _GROUP)
        return _Tiles(rows, part.tokens, channels // width, -(-_GROUP // width), width)

    def _encoded_size(self, part: Part, head: int) -> int | None:
        if head not in (_PER_CHANNEL, _PER_TOKEN):
            return None
        return 2 * prod(self._tiles(part, head).shape) + part.size // self._item

    def _sections(self, buffer: Tensor, tiles: _Tiles, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales (as int16) and the ``count`` codes at the buffer's front."""
        middle = 2 * prod(tiles.shape)
        scales = buffer[:middle].view(torch.int16).view(tiles.shape)
        return scales, buffer[middle : middle + count]

    def _encode_part(self, part: Part, numbers: Tensor, target: Tensor) -> int:
        head = self._head_of(part, numbers)
        if (self._encoded_size(part, head) or 0) >= part.size:
            return 0
        tiles = self._tiles(part, head)
        peaks = self._peaks(numbers, tiles)
        if int(peaks.max()) > self._greatest_bits:
            return 0
        scales, codes = self._sections(target, tiles, len(numbers))
        scale = peaks.view(self._dtype).float().div_(self.largest).clamp_(_LEAST_SCALE)
        upper = scale.view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16)
        scales.copy_(upper)
        steps = upper.bitwise_left_shift_(16).view(torch.float32).reciprocal_()
        for (region, step), (coded, _) in zip(
            tiles.cut(numbers, steps), tiles.cut(codes, steps), strict=True
        ):
            for piece in pieces(region):
                given = region[piece].to(torch.float32, copy=True)  # else float32 is not copied
                self._quantise(given.mul_(step[piece]), coded[piece])
        return head

    def _decode_part(self, part: Part, head: int, source: Tensor, numbers: Tensor) -> None:
        tiles = self._tiles(part, head)
        scales, codes = self._sections(source, tiles, len(numbers))
        if int(scales.min()) < 0x0080 or int(scales.max()) >= 0x7F80:
            raise Damaged("a scale is not a finite number above zero")
        steps = scales.int().bitwise_left_shift_(16).view(torch.float32)
        for (region, step), (coded, _) in zip(
            tiles.cut(numbers, steps), tiles.cut(codes, steps), strict=True
        ):
            for piece in pieces(region):
                region[piece] = self._restore(coded[piece]).mul_(step[piece])

    def _head_of(self, part: Part, numbers: Tensor) -> int:
        if part.tokens < _FEW_TOKENS:
            return _PER_TOKEN
        # A sample of whole heads: some channels of NHD's one row, the middle row of HND's.
        tiles = self._tiles(part, _PER_TOKEN)
        row = tiles.rows // 2
        width = max(part.dim, _SAMPLE_CHANNELS // part.dim * part.dim)
        sample = numbers.view(tiles.rows, part.tokens, -1)[row : row + 1, :_SAMPLE_TOKENS, :width]
        _, tokens, channels = sample.shape

        def error(head: int) -> float:
            """Return the mean of squared scales, which grows with the mean squared error."""
            like = self._tiles(part, head)
            some = like._replace(rows=1, tokens=tokens, groups=channels // like.width)
            return float(self._peaks(sample, some).view(self._dtype).float().square_().mean())

        return min((_PER_CHANNEL, _PER_TOKEN), key=error)

    def _peaks(self, numbers: Tensor, tiles: _Tiles) -> Tensor:
        """Return the bits of each tile's greatest magnitude; as integers they compare alike."""
        peaks = torch.empty(tiles.shape, dtype=self._bits)
        for region, peak in tiles.cut(numbers.view(self._bits), peaks):
            for piece in pieces(region):
                magnitudes = region[piece] & self._magnitude
                torch.amax(magnitudes, (2, 4), keepdim=True, out=peak[piece])
        return peaks


class Int8Codec(ByteCodec):
    """Stores each number as a whole multiple, -127 … 127, of its tile's scale.

    A scale is the tile's greatest magnitude / 127, rounded up by less than 1 %. The error is at
    most half a scale, plus the rounding to the block's element type: none for float32, half a unit
    in the last place for float16 and bfloat16.
    """

    name = "int8"
    number = 2
    largest = 127.0

    def _quantise(self, numbers: Tensor, codes: Tensor) -> None:
        codes.view(torch.int8).copy_(numbers.round_())

    def _restore(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()


class Fp8Codec(ByteCodec):
    """Stores each number as E4M3 (``torch.float8_e4m3fn``) times its tile's scale.

    A scale is the tile's greatest magnitude / 448, rounded up by less than 1 %, so nothing
    saturates. The error is at most the larger of 1/16 of the number and 1/1024 of the scale, plus
    the rounding to the block's element type. Small numbers are more accurate than with int8, large
    ones less: int8 has the smaller error for most KV.
    """

    name = "fp8"
    number = 3
    largest = 448.0

    def _quantise(self, numbers: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(numbers)

    def _restore(self, codes: Tensor) -> Tensor:
        # E4M3 is float16 with another bias: move the sign to the front, shift the rest up by 7,
        # multiply by 2^8. Three times as fast as torch's conversion. (NaN, never written, is ±480.)
        bits = (codes.view(torch.int8).short() << 7) & -0x4001
        return bits.view(torch.float16).float().mul_(256.0)
