"""int4: codes of 4 bits between a group's least and greatest.

The layout is KIVI's (arXiv 2402.02750): keys share a scale along tokens, values along channels, and
each group has a zero point. Keys are turned back by their rotary embedding first.
Codes are written in 4 bits; each part of a record names its number, and 2 to 8 bits are read.

Encoded bytes, little-endian:

    heads       one byte per part: kind · 16 + bits; zeros up to a multiple of 8
    each part   kind 0: its raw bytes
                kinds 1 to 3: base of the scales, float32
                kind 2 with 128 tokens or more: centres [rows, width], the upper half of a float32
                kind 3: base of the rotation, float32
                exponents of the scales, uint8, then zero points, int8: [rows, runs, width] for
                kinds 1 and 3, [rows, tokens, width / group] for kind 2; zeros up to a multiple of 8
                planes (grids.py) of the whole runs [rows, runs, bytes], then of the last run
                zeros up to a multiple of 8

`docs/codecs.md` says what rows, runs, width and groups are, and bounds the error.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs.base import Codec, Damaged
from kvkeep.store.codecs.grids import (
    AS_IS,
    BITS,
    PER_CHANNEL,
    PER_TOKEN,
    ROTATED,
    Grid,
    PartRows,
    pack,
    padded,
    range_error,
    unpack,
)
from kvkeep.store.codecs.quantised import ALIGNED, aligned, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvkeep.store.codecs.base import BlockShape

__all__ = ["Int4Codec", "find_base", "turn", "turns"]

_KINDS = (AS_IS, PER_CHANNEL, PER_TOKEN, ROTATED)
_BITS = 4  # of the codes that are written
_SAMPLE_ROWS = 2
_FEW_TOKENS = 64  # fewer do not show a rotation
_SEARCHES = 2  # blocks in which a part's rotation is searched for
_NEAR_MAXIMUM = 0.25  # of the type's maximum: no sum, difference or rotation overflows
BASES = (1e3, 1e8)
"""The smallest and the largest base that is searched for."""

_STEP = 1.03  # between two bases searched: a phase that is wrong by a tenth at the block's end
_SAMPLE_TOKENS = 128
_LEAST_SHARE = 0.1  # of the energy that must be in the means, and was not before turning


class Int4Codec(Codec):
    """Codes of few bits, with scale and zero point by group.

    A codec remembers which rotation each part has, so only its first blocks are searched. What it
    remembers changes the size of the error, never how a record is read.

    Memory: the largest part in float32 and some pieces, beside the two buffers. torch
    computes in the calling thread, in pieces too small for its thread pool.

    Raises:
        InvalidValue: the bytes are opaque or have one-byte numbers.
    """

    name = "int4"
    number = 4
    exact = False

    def __init__(self, shape: BlockShape) -> None:
        if not shape.dtype or not shape.parts:
            raise InvalidValue(
                "codec int4 needs the element type, and these bytes are opaque; "
                "raw and lossless work on any bytes"
            )
        if DTYPES[shape.dtype] < 2:
            raise InvalidValue(
                f"codec int4 shortens numbers of two bytes or more, and those of {shape.dtype} "
                "have one; use raw or lossless"
            )
        if shape.layout not in ("NHD", "HND"):
            raise InvalidValue(f"layout is 'NHD' or 'HND', got {shape.layout!r}")
        self._item = DTYPES[shape.dtype]
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._most = torch.finfo(self._dtype).max * _NEAR_MAXIMUM
        self._parts = shape.parts
        self._heads_first = shape.layout == "HND"
        self._token_bytes = sum(heads * dim for heads, dim in shape.parts) * self._item
        self._bases: dict[int, float] = {}  # of the rotation of each part
        self._searched = [0] * len(shape.parts)

    def bound(self, raw_bytes: int) -> int:
        """Return the raw size plus heads and padding: parts that do not shrink stay as they are."""
        return raw_bytes + aligned(len(self._parts)) + ALIGNED * len(self._parts)

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode part by part. A read-only ``raw`` is copied first: torch needs writable memory."""
        del bound_to
        tokens, rest = divmod(len(raw), self._token_bytes)
        assert tokens, "a block without a token"
        assert not rest, f"{len(raw)} bytes are not whole tokens of {self._token_bytes}"
        given, target = bytes_of(raw), bytes_of(out)
        at = aligned(len(self._parts))
        target[:at] = 0
        for part, (start, rows) in enumerate(self._layout(tokens)):
            size = rows.numbers * self._item
            numbers = given[start : start + size].view(self._dtype)
            grid, turned, base = self._choose(part, rows, numbers)
            target[part] = grid.kind << 4 | grid.bits
            if grid.kind == AS_IS:
                out[at : at + size] = raw[start : start + size]
            else:
                self._encode_part(target[at : at + grid.bytes], grid, turned, base)
            del turned  # before the next part's
            end = at + (grid.bytes or size)
            at = aligned(end)
            target[end:at] = 0
        return at

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decode part by part into ``out``. A read-only ``encoded`` is copied first."""
        del bound_to
        tokens, rest = divmod(len(out), self._token_bytes)
        if rest or not tokens:
            raise Damaged(f"{len(out)} bytes are not whole tokens of {self._token_bytes}")
        heads = bytes(encoded[: len(self._parts)])
        at = aligned(len(self._parts))
        if len(encoded) < at or any(
            one >> 4 not in _KINDS or (one & 15) not in (BITS if one >> 4 else (0,))
            for one in heads
        ):
            raise Damaged(f"{len(encoded)} bytes do not begin with kinds of {len(heads)} parts")
        layout = list(self._layout(tokens))
        grids = [
            Grid(rows, head >> 4, head & 15) for head, (_, rows) in zip(heads, layout, strict=True)
        ]
        sizes = [grid.bytes or grid.rows.numbers * self._item for grid in grids]
        if at + sum(map(aligned, sizes)) != len(encoded):
            raise Damaged(f"{len(encoded)} bytes; {at + sum(map(aligned, sizes))} are expected")
        source = bytes_of(encoded)
        restored = bytes_of(out).view(self._dtype)
        for (start, rows), grid, size in zip(layout, grids, sizes, strict=True):
            if grid.kind == AS_IS:
                out[start : start + size] = encoded[at : at + size]
            else:
                first = start // self._item
                numbers = restored[first : first + rows.numbers]
                self._decode_part(source[at : at + size], grid, rows.views(numbers))
            at += aligned(size)

    def _layout(self, tokens: int) -> Iterator[tuple[int, PartRows]]:
        """Yield the offset of each part in the raw bytes, and its rows."""
        start = 0
        for heads, dim in self._parts:
            yield start, PartRows(heads, tokens, dim, self._heads_first)
            start += heads * tokens * dim * self._item

    def _choose(self, part: int, rows: PartRows, numbers: Tensor) -> tuple[Grid, Tensor, float]:
        """Return how a part is encoded, its numbers [rows, tokens, width] in float32, and a base.

        They are turned back if the grid is of that kind; the base is then the rotation's.
        """
        whole = rows.float32(numbers)
        peak = torch.maximum(whole.amax(), -whole.amin())
        grids = [Grid(rows, kind, _BITS) for kind in (PER_CHANNEL, PER_TOKEN)]
        least = min(grid.bytes for grid in grids)
        most = min(1.1 * least, rows.numbers * self._item - ALIGNED)
        if not bool(peak <= self._most) or least > most:
            return Grid(rows, AS_IS, 0), whole, 0.0
        middle = max(0, rows.count // 2 - 1)
        sample = whole[middle : middle + _SAMPLE_ROWS, : rows.lengths()[-1]]
        errors = {
            grid.kind: range_error(sample, grid.kind, grid.group)
            for grid in grids
            if grid.bytes <= most
        }
        base = self._base_of(part, rows, sample) if PER_CHANNEL in errors else 0.0
        if base:
            rotated = Grid(rows, ROTATED, _BITS)
            cosines, sines = turns(base, sample.shape[1], rows.width)
            error = range_error(turn(sample, cosines, -sines), ROTATED, 1)
            if error < min(errors.values()):
                cosines, sines = turns(base, rows.tokens, rows.width)
                for head in whole:
                    head.copy_(turn(head, cosines, -sines))
                return rotated, whole, base
        kind = min(errors, key=errors.__getitem__)
        return next(grid for grid in grids if grid.kind == kind), whole, 0.0

    def _base_of(self, part: int, rows: PartRows, sample: Tensor) -> float:
        known = self._bases.get(part)
        if known is None and rows.rotatable and sample.shape[1] >= _FEW_TOKENS:
            if self._searched[part] == _SEARCHES:
                return 0.0
            self._searched[part] += 1
            known = find_base(sample)
            if known:
                # Parts mostly agree; one base for all keeps the table of turns small.
                near = [b for b in list(self._bases.values()) if 0.9 < b / known < 1.1]
                known = self._bases[part] = near[0] if near else known
        return known or 0.0

    def _encode_part(self, target: Tensor, grid: Grid, numbers: Tensor, base: float) -> None:
        """Fill ``target``. Alters ``numbers``."""
        sections = grid.sections(target)
        sections.padding.zero_()
        if grid.kind == ROTATED:
            sections.rotation.copy_(torch.tensor([base], dtype=torch.float32))
        if grid.centred:
            middle = (numbers.amax(1) + numbers.amin(1)).mul_(0.5)
            upper = middle.view(torch.int32).bitwise_right_shift_(16)
            sections.centres.copy_(upper)
            numbers.sub_(upper.bitwise_left_shift_(16).view(torch.float32)[:, None])
        least, greatest = grid.extremes(numbers)
        scales, offsets = grid.fit(least, greatest, sections)
        inverse = scales.reciprocal()
        last = 2**grid.bits - 1
        for region, planes in zip(grid.regions, sections.planes, strict=True):
            stored = padded(region.unit)
            for rows, runs, tokens in region.pieces():
                places = region, rows, runs, tokens
                codes = grid.cut(numbers, region, rows, tokens) - grid.share(offsets, *places)
                codes.mul_(grid.share(inverse, *places)).round_().clamp_(0, last)
                units = torch.empty((codes.numel() // region.unit, stored), dtype=torch.uint8)
                units[:, : region.unit] = codes.view(len(units), -1)
                units[:, region.unit :] = 0
                for plane, filled in zip(planes, pack(units, grid.bits), strict=True):
                    plane[rows, runs] = filled.view(plane[rows, runs].shape)

    def _decode_part(self, source: Tensor, grid: Grid, views: list[Tensor]) -> None:
        sections = grid.sections(source)
        scales, offsets = grid.read(sections)
        centres = None
        if grid.centred:
            centres = sections.centres.int().bitwise_left_shift_(16).view(torch.float32)
            if not bool(centres.isfinite().all()):
                raise Damaged("a centre is not finite")
        if grid.kind == ROTATED:
            base = float(sections.rotation)
            if not BASES[0] * 0.9 <= base <= BASES[1] * 1.1 or not grid.rows.rotatable:
                raise Damaged(f"{base} is no base of a rotation")
            cosines, sines = turns(base, grid.rows.tokens, grid.rows.width)
        for region, planes in zip(grid.regions, sections.planes, strict=True):
            for rows, runs, tokens in region.pieces():
                places = region, rows, runs, tokens
                packed = [plane[rows, runs].flatten(0, 1) for plane in planes]
                codes = unpack(packed, grid.bits)[:, : region.unit].float()
                numbers = codes.view(rows.stop - rows.start, -1, grid.rows.width)
                parts = grid.cut(numbers, region, slice(None), slice(None))
                parts.mul_(grid.share(scales, *places)).add_(grid.share(offsets, *places))
                if centres is not None:
                    numbers += centres[rows, None]
                if grid.kind == ROTATED:
                    numbers = turn(numbers, cosines[tokens], sines[tokens])
                grid.rows.put(views, rows, tokens, numbers)


@lru_cache(maxsize=16)
def turns(base: float, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [tokens, dim / 2], float32, of the positions 0 … tokens - 1.

    They are kept for sixteen sizes. Do not alter them.
    """
    speeds = base ** (torch.arange(dim // 2, dtype=torch.float64) * (-2.0 / dim))
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * speeds
    return angles.cos().float(), angles.sin().float()


def turn(numbers: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return new numbers [..., tokens, dim] (float32), with each pair rotated forwards.

    With negated ``sines`` it rotates backwards.
    """
    half = numbers.shape[-1] // 2
    first, second = numbers[..., :half], numbers[..., half:]
    turned = torch.empty_like(numbers)
    torch.mul(first, cosines, out=turned[..., :half])
    turned[..., :half].addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=turned[..., half:])
    turned[..., half:].addcmul_(first, sines)
    return turned


def find_base(keys: Tensor) -> float:
    """Return the base of the rotation in ``keys`` [heads, tokens, dim] (float32); 0 without one.

    Cost: some ten milliseconds, whatever the size: it looks at 128 tokens.
    """
    keys = keys[:, :_SAMPLE_TOKENS]
    _, tokens, dim = keys.shape
    if dim % 2 or tokens < 2:
        return 0.0
    pairs = torch.complex(keys[..., : dim // 2], keys[..., dim // 2 :]).permute(2, 1, 0)
    energy = float(pairs.abs().square().mean(1).sum())
    if not energy or not math.isfinite(energy):
        return 0.0
    count = math.ceil(math.log(BASES[1] / BASES[0]) / math.log(_STEP))
    bases = BASES[0] * _STEP ** torch.arange(count + 1, dtype=torch.float64)
    some = range(0, dim // 2, max(1, dim // 32))
    rough = _means(pairs, bases, some)
    best = float(bases[int(rough.argmax())])
    near = best * _STEP ** torch.linspace(-1, 1, 15, dtype=torch.float64)
    exact = _means(pairs, near, range(dim // 2))
    before = float(pairs.mean(1).abs().square().sum())
    if float(exact.max()) < before + _LEAST_SHARE * energy:
        return 0.0
    return float(near[int(exact.argmax())].float())


def _means(pairs: Tensor, bases: Tensor, some: range) -> Tensor:
    """Return the energy of the means of ``some`` of ``pairs`` [dim / 2, tokens, heads], by base."""
    half, tokens, _ = pairs.shape
    positions = torch.arange(tokens, dtype=torch.float64)
    scores = torch.zeros(len(bases))
    for pair in some:
        angles = (bases.pow(-pair / half)[:, None] * positions).float()
        back = torch.complex(angles.cos(), angles.sin().neg_())
        scores += (back @ pairs[pair]).abs().square().sum(1)
    return scores / tokens**2
