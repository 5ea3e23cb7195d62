"""Shared by `int8` and `fp8`: one byte per number, one scale per tile.

Each part of a block (K or V of a layer) is encoded on its own:

- *as is*, if a number is not finite or so near the type's maximum that decoding could overflow, or
  if the scales would take more than the codes save.
- *per channel*: a tile is 64 tokens of one channel. Some channels of keys are large for every
  token; in a common tile the other channels would get few steps (KIVI, arXiv 2402.02750).
- *per token*: a tile is 64 channels of one token, or of as many tokens as small heads need.

Of the last two, the one with the smaller squared error on a sample of the part is used. A part of
fewer than 32 tokens is encoded per token.

Encoded bytes:

    kinds       one byte per part: 0 as is, 1 per channel, 2 per token; zeros up to a multiple of 8
    each part   as is: its raw bytes
                else: scales [rows, runs, groups], 16 bits each, little-endian, the upper half of a
                float32; then codes, one byte each, in the order of the raw numbers
                zeros up to a multiple of 8

Rows are heads in HND; NHD has one row, with the channels of all heads. Scales are rounded up to
16 bits, so that no code exceeds its range, and are at least 2^-126.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
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
    "ALIGNED",
    "Fp8Codec",
    "Int8Codec",
    "QuantisedCodec",
    "Tile",
    "aligned",
    "bytes_of",
    "per_channel",
    "per_token",
    "pieces",
    "regions",
]

_AS_IS, _PER_CHANNEL, _PER_TOKEN = 0, 1, 2
_FEW_TOKENS = 32
_SAMPLE_TOKENS = 64
_SAMPLE_CHANNELS = 256
_SCALE_BYTES = 2
_LEAST_SCALE = 2.0**-126  # the smallest with a finite, exact reciprocal
_NEAR_MAXIMUM = 0.98  # of the type's maximum: half a step more must not overflow
ALIGNED: Final = 8


def aligned(size: int) -> int:
    """Return ``size`` rounded up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def bytes_of(buffer: memoryview) -> Tensor:
    """Return a buffer as a tensor of uint8; a read-only one is copied, as torch needs to write."""
    writable = bytearray(buffer) if buffer.readonly else buffer
    return torch.frombuffer(writable, dtype=torch.uint8)


_GROUP = 64  # numbers that share a scale: 64 + 2 bytes instead of 128 of bfloat16, 1.94 times less


_PIECE = 1 << 15  # numbers processed at once; for more, torch would use its thread pool


@dataclass(frozen=True, slots=True)
class Tile:
    """``run`` consecutive tokens times ``width`` adjacent channels of one head."""

    run: int
    width: int

    def runs(self, tokens: int) -> int:
        """Return the number of runs in ``tokens``; the last one is longer by the remainder."""
        return max(1, tokens // self.run)


def per_channel(_: int) -> Tile:
    """Return tiles of one channel: for keys, in which some channels are always large."""
    return Tile(_GROUP, 1)


def per_token(dim: int) -> Tile:
    """Return tiles of one token (of a few, in small heads): for values, and for few tokens."""
    width = next((n for n in range(min(dim, _GROUP), _GROUP // 2 - 1, -1) if dim % n == 0), dim)
    return Tile(-(-_GROUP // width), width)


def regions(part: Tensor, share: Tensor, tile: Tile) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of ``part`` [rows, tokens, channels] and ``share`` [rows, runs, groups].

    The first view is [rows, runs, tokens of a run, groups, channels of a group]; the second has
    size 1 in the axes whose numbers share a scale, so the two broadcast. One pair has all runs; if
    the last run is longer, it is a second pair.
    """
    runs = tile.runs(part.shape[1])
    whole = runs if part.shape[1] == runs * tile.run else runs - 1
    cut = whole * tile.run
    rows, _, groups = share.shape
    share = share[:, :, None, :, None]
    if whole:
        yield part[:, :cut].view(rows, whole, tile.run, groups, tile.width), share[:, :whole]
    if whole < runs:
        yield part[:, cut:].view(rows, 1, -1, groups, tile.width), share[:, whole:]


def pieces(region: Tensor) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield slices that cut a region into pieces of at most `_PIECE` numbers, in whole groups."""
    rows, runs, run, groups, width = region.shape
    left = _PIECE // (run * width)
    steps = []
    for length in (groups, runs, rows):
        steps.append(max(1, min(length, left)))
        left //= length
    for row, first, group in product(
        range(0, rows, steps[2]), range(0, runs, steps[1]), range(0, groups, steps[0])
    ):
        yield (
            slice(row, row + steps[2]),
            slice(first, first + steps[1]),
            slice(None),
            slice(group, group + steps[0]),
        )


_TILES = {_PER_CHANNEL: per_channel, _PER_TOKEN: per_token}


class _Part(NamedTuple):
    """Offset, size in bytes and shape [rows, tokens, channels] of a part in the raw bytes."""

    start: int
    size: int
    shape: tuple[int, int, int]
    dim: int  # channels of one head


class QuantisedCodec(Codec):
    """One byte per number, one scale per tile; `Int8Codec` and `Fp8Codec` define the byte.

    A call processes pieces of 32768 numbers, which torch computes in the calling thread; its
    thread pool stays free for the model. Memory: a few pieces beside the two buffers.
    """

    exact = False
    largest: float
    """Code of a tile's greatest magnitude."""

    def __init__(self, shape: BlockShape) -> None:
        if not shape.dtype or not shape.parts:
            raise InvalidValue(
                f"codec {self.name} needs the element type, and these bytes are opaque; "
                "raw and lossless work on any bytes"
            )
        if DTYPES[shape.dtype] < 2:
            raise InvalidValue(
                f"codec {self.name} makes numbers one byte long, and those of {shape.dtype} are "
                "already; use raw or lossless"
            )
        if shape.layout not in ("NHD", "HND"):
            raise InvalidValue(f"layout is 'NHD' or 'HND', got {shape.layout!r}")
        self._parts = shape.parts
        self._heads_first = shape.layout == "HND"
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._item = DTYPES[shape.dtype]
        self._bits = torch.int32 if self._item == 4 else torch.int16
        self._magnitude = 0x7FFFFFFF if self._item == 4 else 0x7FFF
        end = torch.tensor(torch.finfo(self._dtype).max * _NEAR_MAXIMUM, dtype=self._dtype)
        self._greatest_bits = int(end.view(self._bits))
        self._token_bytes = sum(heads * dim for heads, dim in shape.parts) * self._item

    @abstractmethod
    def _quantise(self, numbers: Tensor, codes: Tensor) -> None:
        """Round float32 ``numbers``, at most `largest`, into uint8 ``codes``. Alters them."""

    @abstractmethod
    def _restore(self, codes: Tensor) -> Tensor:
        """Return the float32 numbers of ``codes`` (uint8) in a new tensor."""

    def bound(self, raw_bytes: int) -> int:
        """Return the raw size plus kinds and padding: parts that do not shrink stay as they are."""
        return raw_bytes + aligned(len(self._parts)) + ALIGNED * len(self._parts)

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode part by part. A read-only ``raw`` is copied first: torch needs writable memory."""
        del bound_to
        tokens, rest = divmod(len(raw), self._token_bytes)
        assert tokens, "a block without a token"
        assert not rest, f"{len(raw)} bytes are not whole tokens of {self._token_bytes}"
        given = bytes_of(raw)
        target = bytes_of(out)
        at = aligned(len(self._parts))
        target[:at] = 0
        for number, part in enumerate(self._layout(tokens)):
            numbers = given[part.start : part.start + part.size].view(self._dtype)
            numbers = numbers.view(part.shape)
            kind = self._kind_of(numbers, part)
            if kind != _AS_IS:
                tile = _TILES[kind](part.dim)
                scales, codes = _sections(target, at, part, tile)
                if not self._encode_part(numbers, tile, scales, codes):
                    kind = _AS_IS
            if kind == _AS_IS:
                out[at : at + part.size] = raw[part.start : part.start + part.size]
            target[number] = kind
            end = at + _encoded_size(part, kind)
            at = aligned(end)
            target[end:at] = 0
        return at

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decode part by part into ``out``. A read-only ``encoded`` is copied first."""
        del bound_to
        tokens, rest = divmod(len(out), self._token_bytes)
        if rest or not tokens:
            raise Damaged(f"{len(out)} bytes are not whole tokens of {self._token_bytes}")
        parts = list(self._layout(tokens))
        at = aligned(len(parts))
        kinds = bytes(encoded[: len(parts)])
        if len(encoded) < at or any(kind not in {_AS_IS, *_TILES} for kind in kinds):
            raise Damaged(f"{len(encoded)} bytes do not begin with the kinds of {len(parts)} parts")
        sizes = [_encoded_size(part, kind) for part, kind in zip(parts, kinds, strict=True)]
        if at + sum(map(aligned, sizes)) != len(encoded):
            raise Damaged(f"{len(encoded)} bytes; {at + sum(map(aligned, sizes))} are expected")
        source = bytes_of(encoded)
        restored = bytes_of(out).view(self._dtype)
        for part, kind, size in zip(parts, kinds, sizes, strict=True):
            if kind == _AS_IS:
                out[part.start : part.start + part.size] = encoded[at : at + size]
            else:
                tile = _TILES[kind](part.dim)
                scales, codes = _sections(source, at, part, tile)
                if int(scales.min()) < 0x0080 or int(scales.max()) >= 0x7F80:
                    raise Damaged("a scale is not a finite number above zero")
                start = part.start // self._item
                numbers = restored[start : start + prod(part.shape)].view(part.shape)
                self._decode_part(numbers, tile, scales, codes)
            at += aligned(size)

    def _layout(self, tokens: int) -> Iterator[_Part]:
        start = 0
        for heads, dim in self._parts:
            shape = (heads, tokens, dim) if self._heads_first else (1, tokens, heads * dim)
            size = prod(shape) * self._item
            yield _Part(start, size, shape, dim)
            start += size

    def _kind_of(self, numbers: Tensor, part: _Part) -> int:
        kind = _PER_TOKEN
        if part.shape[1] >= _FEW_TOKENS:
            # A sample of whole heads: some channels of NHD's one row, the middle row of HND's.
            row = part.shape[0] // 2
            width = max(part.dim, _SAMPLE_CHANNELS // part.dim * part.dim)
            sample = numbers[row : row + 1, :_SAMPLE_TOKENS, :width]
            errors = {kind: self._error(sample, tile(part.dim)) for kind, tile in _TILES.items()}
            kind = min(errors, key=errors.__getitem__)
        return kind if _encoded_size(part, kind) < part.size else _AS_IS

    def _error(self, numbers: Tensor, tile: Tile) -> float:
        """Return the mean of squared scales, which grows with the mean squared error."""
        return float(self._peaks(numbers, tile).view(self._dtype).float().square_().mean())

    def _peaks(self, numbers: Tensor, tile: Tile) -> Tensor:
        """Return the bits of each tile's greatest magnitude; as integers they compare alike."""
        rows, tokens, channels = numbers.shape
        shape = rows, tile.runs(tokens), channels // tile.width
        peaks = torch.empty(shape, dtype=self._bits)
        for region, share in regions(numbers.view(self._bits), peaks, tile):
            for piece in pieces(region):
                magnitudes = region[piece] & self._magnitude
                torch.amax(magnitudes, (2, 4), keepdim=True, out=share[piece])
        return peaks

    def _encode_part(self, numbers: Tensor, tile: Tile, scales: Tensor, codes: Tensor) -> bool:
        """Fill ``scales`` and ``codes``; return False if the part must stay as it is."""
        peaks = self._peaks(numbers, tile)
        if int(peaks.max()) > self._greatest_bits:
            return False
        scale = peaks.view(self._dtype).float().div_(self.largest).clamp_(_LEAST_SCALE)
        upper = scale.view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16)
        scales.copy_(upper)
        steps = upper.bitwise_left_shift_(16).view(torch.float32).reciprocal_()
        pairs = zip(regions(numbers, steps, tile), regions(codes, steps, tile), strict=True)
        for (region, share), (coded, _) in pairs:
            for piece in pieces(region):
                given = region[piece].to(torch.float32, copy=True)  # else float32 is not copied
                self._quantise(given.mul_(share[piece]), coded[piece])
        return True

    def _decode_part(self, numbers: Tensor, tile: Tile, scales: Tensor, codes: Tensor) -> None:
        scale = scales.int().bitwise_left_shift_(16).view(torch.float32)
        pairs = zip(regions(numbers, scale, tile), regions(codes, scale, tile), strict=True)
        for (region, share), (coded, _) in pairs:
            for piece in pieces(region):
                region[piece] = self._restore(coded[piece]).mul_(share[piece])


def _scale_shape(part: _Part, tile: Tile) -> tuple[int, int, int]:
    rows, tokens, channels = part.shape
    return rows, tile.runs(tokens), channels // tile.width


def _encoded_size(part: _Part, kind: int) -> int:
    """Return the encoded size of a part in bytes, without padding."""
    if kind == _AS_IS:
        return part.size
    return prod(_scale_shape(part, _TILES[kind](part.dim))) * _SCALE_BYTES + prod(part.shape)


def _sections(buffer: Tensor, at: int, part: _Part, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return views of a part's scales (as int16) and codes in ``buffer``, from ``at`` on."""
    shape = _scale_shape(part, tile)
    middle = at + prod(shape) * _SCALE_BYTES
    scales = buffer[at:middle].view(torch.int16).view(shape)
    return scales, buffer[middle : middle + prod(part.shape)].view(part.shape)


class Int8Codec(QuantisedCodec):
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


class Fp8Codec(QuantisedCodec):
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
