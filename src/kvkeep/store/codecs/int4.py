"""int4: codes of 4 bits between a group's least and greatest.

The layout is KIVI's (arXiv 2402.02750): keys share a scale along tokens, values along channels, and
each group has a zero point. Keys are turned back by their rotary embedding first. A part's head is
kind · 16 + bits; codes are written in 4 bits, and 2 to 8 are read. An encoded part, little-endian:

    base of the scales, float32
    kind 2 with 128 tokens or more: centres [rows, width], the upper half of a float32
    kind 3: base of the rotation, float32
    exponents of the scales, uint8, then zero points, int8: [rows, runs, width] for kinds 1 and 3,
    [rows, tokens, groups] for kind 2; zeros up to a multiple of 8
    planes of the codes of the whole runs [rows, runs, bytes], then of the last run

A *row* is a head, or an equal share of at most 128 channels of a head wider than 256. A *run* is
128 tokens of a row (64 where rows are wider than 128); the last one has the remainder, too. A
*group* shares a scale and a zero point: one channel of a run, or some adjacent channels of a token.
`docs/codecs.md` has planes and numbers in full, and bounds the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.store.codecs.base import Damaged
from kvkeep.store.codecs.quantised import PIECE, Part, QuantisedCodec, divisor, pieces, regions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvkeep.store.codecs.base import BlockShape

__all__ = ["Int4Codec", "find_base", "turn", "turns"]

_PER_CHANNEL, _PER_TOKEN, _ROTATED = 1, 2, 3
_BITS = 4  # of the codes that are written
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # lowest bits first
_RUN = 128
_WIDEST = 256  # channels of a row
_GROUP = 64  # channels of a token that share a scale
_CENTRED_TOKENS = 128  # with so many, centres of channels cost an eighth of a bit at most
_STEPS = 16.0  # scales in an octave
_LEAST_BASE = 2.0**-100  # of a part's scales; all have finite reciprocals
_FARTHEST = 126.0  # steps between a group's middle and zero
_NEAR_MAXIMUM = 0.25  # of the type's maximum: no sum, difference or rotation overflows
_SAMPLE_ROWS = 2
_FEW_TOKENS = 64  # fewer do not show a rotation
_SEARCHES = 2  # blocks in which a part's rotation is searched for
_BASES = (1e3, 1e8)  # the smallest and the largest that is searched for
_STEP = 1.03  # between two bases searched: a phase that is wrong by a tenth at the block's end
_SAMPLE_TOKENS = 128
_LEAST_SHARE = 0.1  # of the energy that must be in the means, and was not before turning
_POWERS = torch.exp2(torch.arange(256, dtype=torch.float32) / -_STEPS)
# Tensors, because torch converts a Python number anew in each operation: 3 µs of its 8.
_SHIFTS = torch.arange(8, dtype=torch.int32).unbind()
# Four bytes are shifted and masked at once, as an int32.
_MASKS = {w: torch.tensor(0x01010101 * ((1 << w) - 1), dtype=torch.int32) for w in (1, 2, 4)}


class _Sections(NamedTuple):
    """Views of an encoded part. ``planes`` are those of each region, [rows, runs, bytes]."""

    base: Tensor
    rotation: Tensor
    centres: Tensor
    exponents: Tensor
    zeros: Tensor
    padding: Tensor
    planes: list[list[Tensor]]


@dataclass(frozen=True)
class _Grid:
    """Which numbers of a part [rows, tokens, width] share a scale, and where everything is."""

    rows: int
    tokens: int
    width: int
    kind: int
    bits: int = _BITS

    @cached_property
    def regions(self) -> list[tuple[int, int, int]]:
        """See `regions`."""
        return regions(self.tokens, self.run)

    @property
    def run(self) -> int:
        return _RUN if self.width <= _RUN else _RUN // 2

    @cached_property
    def group(self) -> int:
        """Channels of one token that share a scale."""
        return divisor(self.width, _GROUP) if self.kind == _PER_TOKEN else 1

    @cached_property
    def scales(self) -> tuple[int, int, int]:
        """The shape of scales and zero points."""
        along = self.tokens if self.kind == _PER_TOKEN else max(1, self.tokens // self.run)
        return self.rows, along, self.width // self.group

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of everything in an encoded part, in order."""
        centred = self.kind == _PER_TOKEN and self.tokens >= _CENTRED_TOKENS
        scales = math.prod(self.scales)
        before = [
            4, 4 * (self.kind == _ROTATED), 2 * self.rows * self.width * centred, scales, scales,
        ]  # fmt: skip
        planes = [
            self.rows * runs * _padded(length * self.width) * bits // 8
            for _, runs, length in self.regions
            for bits in _PLANES[self.bits]
        ]
        return [*before, -sum(before) % 8, *planes]

    @cached_property
    def size(self) -> int:
        """Bytes of an encoded part, without padding behind it."""
        return sum(self.sizes)

    def sections(self, part: Tensor) -> _Sections:
        base, rotation, centres, exponents, zeros, padding, *planes = torch.split(part, self.sizes)
        shaped = iter(planes)
        return _Sections(
            base.view(torch.float32),
            rotation.view(torch.float32),
            centres.view(torch.int16).view(-1, 1, 1, self.width // self.group, self.group),
            exponents.view(self.scales),
            zeros.view(torch.int8).view(self.scales),
            padding,
            [
                [next(shaped).view(self.rows, runs, -1) for _ in _PLANES[self.bits]]
                for _, runs, _ in self.regions
            ],
        )

    def by_run(self, values: Tensor) -> list[Tensor]:
        """Return views [rows, runs, run, …] of values [rows, tokens, …], by region."""
        return [
            values[:, first * self.run : first * self.run + runs * length].view(
                len(values), runs, length, *values.shape[2:]
            )
            for first, runs, length in self.regions
        ]

    def cut(self, numbers: Tensor) -> list[Tensor]:
        """Return views [rows, runs, run, groups, group] of numbers [rows, tokens, width]."""
        return self.by_run(numbers.view(*numbers.shape[:2], -1, self.group))

    def shares(self, scales: Tensor) -> list[Tensor]:
        """Return views of one number a group, which broadcast with those of `cut`."""
        if self.kind == _PER_TOKEN:
            return self.by_run(scales[..., None])
        return [scales[:, at : at + runs, None, :, None] for at, runs, _ in self.regions]


_grid = lru_cache(maxsize=256)(_Grid)  # what a grid computes of itself is computed once


class Int4Codec(QuantisedCodec):
    """Codes of few bits, with scale and zero point by group.

    A codec remembers which rotation each part has, so only its first blocks are searched. What it
    remembers changes the size of the error, never how a record is read.

    Memory: the largest part in float32 and some pieces, beside the two buffers.
    """

    name = "int4"
    number = 4

    def __init__(self, shape: BlockShape) -> None:
        super().__init__(shape)
        self._most = torch.finfo(self._dtype).max * _NEAR_MAXIMUM
        self._bases: dict[int, float] = {}  # of the rotation of each part
        self._searched = [0] * len(shape.parts)

    def _grid(self, part: Part, head: int) -> _Grid:
        width = part.dim if part.dim <= _WIDEST else divisor(part.dim, _RUN)
        return _grid(part.heads * part.dim // width, part.tokens, width, head >> 4, head & 15)

    def _encoded_size(self, part: Part, head: int) -> int | None:
        if head >> 4 not in (_PER_CHANNEL, _PER_TOKEN, _ROTATED) or head & 15 not in _PLANES:
            return None
        return self._grid(part, head).size

    def _rows(self, grid: _Grid, part: Part, numbers: Tensor) -> Tensor:
        """Return a view [heads, shares of a head, tokens, width] of flat ``numbers``."""
        if self._heads_first:
            return numbers.view(part.heads, part.tokens, -1, grid.width).transpose(1, 2)
        return numbers.view(part.tokens, part.heads, -1, grid.width).permute(1, 2, 0, 3)

    def _encode_part(self, part: Part, numbers: Tensor, target: Tensor) -> int:
        grids = [self._grid(part, kind << 4 | _BITS) for kind in (_PER_CHANNEL, _PER_TOKEN)]
        whole = torch.empty((grids[0].rows, part.tokens, grids[0].width))
        given = self._rows(grids[0], part, numbers).reshape(whole.shape)
        step = max(1, PIECE // whole[0].numel())
        for row in range(0, len(whole), step):
            whole[row : row + step] = given[row : row + step]
        peak = torch.maximum(whole.amax(), -whole.amin())
        least = min(grid.size for grid in grids)
        most = min(1.1 * least, part.size - 8)
        if not bool(peak <= self._most) or least > most:
            return 0
        middle = max(0, len(whole) // 2 - 1)
        run = grids[0].regions[-1][2]
        sample = whole[middle : middle + _SAMPLE_ROWS, :run]
        errors = {grid: _range_error(sample, grid) for grid in grids if grid.size <= most}
        base = self._base_of(part, grids[0].width, sample) if grids[0] in errors else 0.0
        if base:
            rotated = self._grid(part, _ROTATED << 4 | _BITS)
            cosines, sines = turns(base, part.tokens, rotated.width)
            turned = turn(sample, cosines[:run], -sines[:run])
            errors[rotated] = _range_error(turned, rotated)
        grid = min(errors, key=errors.__getitem__)
        if grid.kind == _ROTATED:
            for row in whole:
                row.copy_(turn(row, cosines, -sines))
        self._fill(grid.sections(target[: grid.size]), grid, whole, base)
        return grid.kind << 4 | grid.bits

    def _base_of(self, part: Part, width: int, sample: Tensor) -> float:
        """Return the base of a part's rotation, 0 without one; search its first blocks."""
        number = part.number
        if number not in self._bases:
            rotatable = width == part.dim and width % 2 == 0 and sample.shape[1] >= _FEW_TOKENS
            if not rotatable or self._searched[number] == _SEARCHES:
                return 0.0
            self._searched[number] += 1
            base = find_base(sample)
            if not base:
                return 0.0
            # Parts mostly agree; one base for all keeps the table of turns small.
            near = [each for each in list(self._bases.values()) if 0.9 < each / base < 1.1]
            self._bases[number] = near[0] if near else base
        return self._bases[number]

    def _fill(self, sections: _Sections, grid: _Grid, numbers: Tensor, base: float) -> None:
        """Write an encoded part. Alters ``numbers``."""
        sections.padding.zero_()
        if grid.kind == _ROTATED:
            sections.rotation.fill_(base)
        if sections.centres.numel():
            middle = (numbers.amax(1) + numbers.amin(1)).mul_(0.5)
            upper = middle.view(torch.int32).bitwise_right_shift_(16)
            sections.centres.copy_(upper.view(sections.centres.shape))
            numbers.sub_(upper.bitwise_left_shift_(16).view(torch.float32)[:, None])
        scales, offsets = _fit(grid, numbers, sections)
        shares = map(grid.shares, (scales.reciprocal(), offsets))
        for region, inverse, offset, planes in zip(
            grid.cut(numbers), *shares, sections.planes, strict=True
        ):
            unit = region[0, 0].numel()
            for piece in pieces(region):
                codes = (region[piece] - offset[piece]).mul_(inverse[piece])
                codes.round_().clamp_(0, 2**grid.bits - 1)
                units = torch.empty((codes.numel() // unit, _padded(unit)), dtype=torch.uint8)
                units[:, :unit] = codes.view(len(units), -1)
                units[:, unit:] = 0
                low, high = units.view(torch.int32).view(len(units), 2, -1).unbind(1)
                target = planes[0][piece[:2]]
                target.copy_((low | high << _SHIFTS[4]).view(torch.uint8).view(target.shape))

    def _decode_part(self, part: Part, head: int, source: Tensor, numbers: Tensor) -> None:
        grid = self._grid(part, head)
        sections = grid.sections(source)
        scales, offsets = _scales(sections, grid)
        centres = sections.centres.int().bitwise_left_shift_(16).view(torch.float32)
        if len(centres) and not bool(centres.isfinite().all()):
            raise Damaged("a centre is not finite")
        angles: list[Tensor] = []
        if grid.kind == _ROTATED:
            base = float(sections.rotation)
            rotatable = grid.width == part.dim and part.dim % 2 == 0
            if not _BASES[0] * 0.9 <= base <= _BASES[1] * 1.1 or not rotatable:
                raise Damaged(f"{base} is no base of a rotation")
            angles = [each[None] for each in turns(base, part.tokens, part.dim)]
        by_head = self._rows(grid, part, numbers)
        rows = by_head.reshape(grid.rows, part.tokens, grid.width)
        for region, scale, offset, planes, *turning in zip(
            grid.cut(rows),
            grid.shares(scales),
            grid.shares(offsets),
            sections.planes,
            *map(grid.by_run, angles),
            strict=True,
        ):
            unit = region[0, 0].numel()
            for piece in pieces(region):
                target = region[piece]
                packed = [plane[piece[:2]].flatten(0, 1) for plane in planes]
                decoded = _unpack(packed, grid.bits)[:, :unit].float().view(target.shape)
                decoded.mul_(scale[piece]).add_(offset[piece])
                if len(centres):
                    decoded.add_(centres[piece[0]])
                if turning:
                    cosines, sines = (each[:, piece[1]] for each in turning)
                    decoded = turn(decoded.flatten(3), cosines, sines).view(target.shape)
                target.copy_(decoded)
        if rows.data_ptr() != by_head.data_ptr():  # wide heads, which are no view of rows
            by_head.copy_(rows.view(by_head.shape))


def _fit(grid: _Grid, numbers: Tensor, sections: _Sections) -> tuple[Tensor, Tensor]:
    """Write scales and zero points; return both: a number is offset + code · scale.

    Each group's numbers are then at most half a scale away from a code.
    """
    least, greatest = torch.empty(grid.scales), torch.empty(grid.scales)
    axis = 4 if grid.kind == _PER_TOKEN else 2
    for region, low, high in zip(
        grid.cut(numbers), grid.shares(least), grid.shares(greatest), strict=True
    ):
        for piece in pieces(region):
            low[piece] = region[piece].amin(axis, keepdim=True)
            high[piece] = region[piece].amax(axis, keepdim=True)
    middle = (least + greatest).mul_(0.5)
    scales = torch.maximum((greatest - least).div_(2**grid.bits - 1), middle.abs() / _FARTHEST)
    base = scales.amax().clamp_(min=_LEAST_BASE)
    sections.base.copy_(base[None])
    steps = (base / scales).log2_().mul_(_STEPS).sub_(1e-3).floor_().clamp_(0, 255)
    sections.exponents.copy_(steps)
    scales = base * _POWERS[sections.exponents.int()]
    sections.zeros.copy_((middle / scales).add_(0.5).round_().clamp_(-127, 127))
    return _scales(sections, grid)


def _scales(sections: _Sections, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Return scales and offsets of an encoded part. Raises `Damaged`."""
    base = sections.base
    if not bool(base.isfinite()) or float(base) < _LEAST_BASE:
        raise Damaged("the base of the scales is no finite number above zero")
    scales = base * _POWERS[sections.exponents.int()]
    return scales, (sections.zeros.float() - 2 ** (grid.bits - 1)).mul_(scales)


def _range_error(numbers: Tensor, grid: _Grid) -> float:
    """Return the mean of the squared ranges, which the squared error of a code is proportional to.

    ``numbers`` [rows, tokens, width] are of one run.
    """
    if grid.kind == _PER_TOKEN:
        numbers = numbers - (numbers.amax(1, keepdim=True) + numbers.amin(1, keepdim=True)) / 2
        numbers = numbers.view(*numbers.shape[:2], -1, grid.group)
        ranges = numbers.amax(3) - numbers.amin(3)
    else:
        ranges = numbers.amax(1) - numbers.amin(1)
    return float(ranges.double().square().mean())


def _padded(count: int) -> int:
    """Return ``count`` up to a multiple of 64: a plane of one bit has whole words then."""
    return -(-count // 64) * 64


def _unpack(planes: Sequence[Tensor], bits: int) -> Tensor:
    """Return the codes [units, padded numbers] of ``planes`` [units, bytes], contiguous, uint8."""
    codes: Tensor | None = None
    shift = 0
    for plane, width in zip(planes, _PLANES[bits], strict=True):
        if width == 8:
            return plane
        words = plane.view(torch.int32)
        full = torch.empty((len(words), 8 // width, words.shape[1]), dtype=torch.int32)
        for place in range(8 // width):
            # The sign that >> repeats is masked like the bits of the neighbours.
            down = words >> _SHIFTS[place * width] if place else words
            torch.bitwise_and(down, _MASKS[width], out=full[:, place])
        full = full.flatten(1)
        codes = full if codes is None else codes.bitwise_or_(full << _SHIFTS[shift])
        shift += width
    assert codes is not None
    return codes.view(torch.uint8)


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
    count = math.ceil(math.log(_BASES[1] / _BASES[0]) / math.log(_STEP))
    bases = _BASES[0] * _STEP ** torch.arange(count + 1, dtype=torch.float64)
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
