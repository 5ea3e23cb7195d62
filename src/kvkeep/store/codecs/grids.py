"""Rows, runs and groups of `int4`: which numbers share a scale and a zero point.

A *row* is a head, or an equal share of at most 128 channels of a head wider than 256. A *run* is
128 consecutive tokens of a row (64 where rows are wider than 128); the last run is longer by the
remainder. A *group* shares a scale and a zero point: one channel of a run, or some adjacent
channels of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.store.codecs.base import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = [
    "AS_IS",
    "BITS",
    "PER_CHANNEL",
    "PER_TOKEN",
    "PLANES",
    "ROTATED",
    "Grid",
    "PartRows",
    "Sections",
    "pack",
    "padded",
    "plane_bytes",
    "range_error",
    "unpack",
]

AS_IS, PER_CHANNEL, PER_TOKEN, ROTATED = 0, 1, 2, 3
"""Kinds of a part. `ROTATED` is per channel, of keys turned back by their rotary embedding."""

_RUN = 128
_WIDEST = 256  # channels of a row
_GROUP = 64  # channels of a token that share a scale
_CENTRED_TOKENS = 128  # with so many, centres of channels cost an eighth of a bit at most
_PIECE = 1 << 15  # numbers processed at once; for more, torch would use its thread pool
_STEPS = 16.0  # scales in an octave
_LEAST_BASE = 2.0**-100  # of a part's scales; all have finite reciprocals
_FARTHEST = 126.0  # steps between a group's middle and zero
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the planes of a code, the lowest bits first."""

BITS = tuple(PLANES)
"""How long a code may be."""

_MULTIPLE = 64  # numbers: a plane of one bit has whole words then
_LANES = 0x01010101  # four bytes are shifted and masked at once, as an int32
# Tensors, because torch converts a Python number anew in each operation: 3 µs of its 8.
_SHIFTS = torch.arange(8, dtype=torch.int32).unbind()
_MASKS = {
    width: torch.tensor(_LANES * ((1 << width) - 1), dtype=torch.int32) for width in (1, 2, 4)
}


def _divisor(number: int, most: int) -> int:
    return next((n for n in range(min(number, most), most // 2 - 1, -1) if number % n == 0), number)


@dataclass(frozen=True)
class PartRows:
    """The rows of a part, [count, tokens, width] in number, however the layout orders them."""

    heads: int
    tokens: int
    dim: int
    heads_first: bool

    @cached_property
    def width(self) -> int:
        """Channels of a row."""
        return self.dim if self.dim <= _WIDEST else _divisor(self.dim, _RUN)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.heads * self.dim // self.width

    @property
    def numbers(self) -> int:
        """Numbers of the part."""
        return self.heads * self.tokens * self.dim

    @property
    def rotatable(self) -> bool:
        """Whether a row is a head with pairs of channels."""
        return self.width == self.dim and self.dim % 2 == 0

    def lengths(self) -> list[int]:
        """Return the tokens of each run."""
        run = _RUN if self.width <= _RUN else _RUN // 2
        runs = max(1, self.tokens // run)
        return [run] * (runs - 1) + [self.tokens - run * (runs - 1)]

    def views(self, numbers: Tensor) -> list[Tensor]:
        """Return views [rows, tokens, width] of flat ``numbers`` that together are all rows."""
        shares = self.dim // self.width
        if self.heads_first:
            split = numbers.view(self.heads, self.tokens, shares, self.width).transpose(1, 2)
        else:
            split = numbers.view(self.tokens, self.heads, shares, self.width).permute(1, 2, 0, 3)
        return [split[:, 0]] if shares == 1 else list(split)

    def float32(self, numbers: Tensor) -> Tensor:
        """Return all rows in a new float32 tensor."""
        whole = torch.empty((self.count, self.tokens, self.width))
        at = 0
        for view in self.views(numbers):
            step = max(1, _PIECE // (self.tokens * self.width))
            for first in range(0, len(view), step):
                some = view[first : first + step]
                whole[at : at + len(some)] = some
                at += len(some)
        return whole

    def put(self, views: list[Tensor], rows: slice, tokens: slice, numbers: Tensor) -> None:
        """Write ``numbers`` [rows, tokens, width] into ``views``, as `views` made them."""
        if len(views) == 1:
            views[0][rows, tokens] = numbers
            return
        each = len(views[0])
        for row, some in zip(range(rows.start, rows.stop), numbers, strict=True):
            views[row // each][row % each, tokens] = some


class RunRegion(NamedTuple):
    """Consecutive runs of equal length, of all rows."""

    rows: int
    first: int  # token
    runs: int
    run: int  # tokens of each
    width: int
    at: int  # number of the first run

    @property
    def unit(self) -> int:
        """Numbers of one run of one row."""
        return self.run * self.width

    def pieces(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield rows, runs (of this region) and tokens of pieces of at most `_PIECE` numbers."""
        units = max(1, _PIECE // self.unit)
        runs = min(self.runs, units)
        rows = max(1, units // runs)
        for row, run in product(range(0, self.rows, rows), range(0, self.runs, runs)):
            end = min(run + runs, self.runs)
            yield (
                slice(row, min(row + rows, self.rows)),
                slice(run, end),
                slice(self.first + run * self.run, self.first + end * self.run),
            )


class Sections(NamedTuple):
    """Views of an encoded part. ``planes`` are those of each region, [rows, runs, bytes]."""

    base: Tensor
    centres: Tensor
    rotation: Tensor
    exponents: Tensor
    zeros: Tensor
    padding: Tensor
    planes: list[list[Tensor]]


@dataclass(frozen=True)
class Grid:
    """How a part is encoded: its kind and its bits (0 as it is), and where everything is."""

    rows: PartRows
    kind: int
    bits: int

    @cached_property
    def group(self) -> int:
        """Channels of one token that share a scale."""
        return _divisor(self.rows.width, _GROUP) if self.kind == PER_TOKEN else 1

    @property
    def groups(self) -> int:
        """Groups beside each other in a row."""
        return self.rows.width // self.group

    @property
    def centred(self) -> bool:
        """Whether the middle of each channel is stored and subtracted first."""
        return self.kind == PER_TOKEN and self.rows.tokens >= _CENTRED_TOKENS

    @cached_property
    def regions(self) -> tuple[RunRegion, ...]:
        """The runs of equal length, then the last one if it is longer."""
        rows, lengths = self.rows, self.rows.lengths()
        runs = len(lengths)
        if lengths[0] == lengths[-1]:
            return (RunRegion(rows.count, 0, runs, lengths[0], rows.width, 0),)
        return (
            RunRegion(rows.count, 0, runs - 1, lengths[0], rows.width, 0),
            RunRegion(rows.count, sum(lengths[:-1]), 1, lengths[-1], rows.width, runs - 1),
        )

    @cached_property
    def bytes(self) -> int:
        """Encoded size without padding; 0 of a part that stays as it is."""
        if self.kind == AS_IS:
            return 0
        planes = sum(
            plane_bytes(region.unit, width) * region.rows * region.runs
            for region in self.regions
            for width in PLANES[self.bits]
        )
        return self._before + planes

    @property
    def _before(self) -> int:
        """Bytes before the planes."""
        size = 4 * (1 + (self.kind == ROTATED)) + self._centres * 2 + self._scales * 2
        return -(-size // 8) * 8

    @property
    def _centres(self) -> int:
        return self.rows.count * self.rows.width if self.centred else 0

    @property
    def _along(self) -> int:
        return self.rows.tokens if self.kind == PER_TOKEN else len(self.rows.lengths())

    @property
    def _scales(self) -> int:
        return self.rows.count * self._along * self.groups

    def sections(self, part: Tensor) -> Sections:
        """Return views of ``part``, `bytes` bytes at a multiple of 8."""
        at = 0

        def take(size: int) -> Tensor:
            nonlocal at
            at += size
            return part[at - size : at]

        rows = self.rows
        base = take(4).view(torch.float32)
        rotation = take(4 * (self.kind == ROTATED)).view(torch.float32)
        centres = take(2 * self._centres).view(torch.int16)
        exponents = take(self._scales).view(rows.count, self._along, self.groups)
        zeros = take(self._scales).view(torch.int8).view(rows.count, self._along, self.groups)
        planes = []
        padding = take(self._before - at)
        for region in self.regions:
            each = [plane_bytes(region.unit, width) for width in PLANES[self.bits]]
            shape = region.rows, region.runs
            planes.append([take(size * shape[0] * shape[1]).view(*shape, size) for size in each])
        if self.centred:
            centres = centres.view(rows.count, rows.width)
        return Sections(base, centres, rotation, exponents, zeros, padding, planes)

    def cut(self, numbers: Tensor, region: RunRegion, rows: slice, tokens: slice) -> Tensor:
        """Return a view [rows, runs, tokens of a run, groups, group] of a piece of all numbers."""
        piece = numbers[rows, tokens]
        return piece.view(len(piece), -1, region.run, self.groups, self.group)

    def share(
        self, each: Tensor, region: RunRegion, rows: slice, runs: slice, tokens: slice
    ) -> Tensor:
        """Return a view of ``each`` [rows, runs or tokens, groups] that broadcasts with `cut`."""
        if self.kind == PER_TOKEN:
            piece = each[rows, tokens]
            return piece.view(len(piece), -1, region.run, self.groups, 1)
        return each[rows, region.at + runs.start : region.at + runs.stop][:, :, None, :, None]

    def extremes(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return least and greatest of each group, [rows, runs or tokens, groups]."""
        least = torch.empty((self.rows.count, self._along, self.groups))
        greatest = torch.empty_like(least)
        axis = 4 if self.kind == PER_TOKEN else 2
        for region in self.regions:
            for rows, runs, tokens in region.pieces():
                piece = self.cut(numbers, region, rows, tokens)
                places = rows, runs, tokens
                self.share(least, region, *places).copy_(piece.amin(axis, keepdim=True))
                self.share(greatest, region, *places).copy_(piece.amax(axis, keepdim=True))
        return least, greatest

    def fit(self, least: Tensor, greatest: Tensor, sections: Sections) -> tuple[Tensor, Tensor]:
        """Write scales and zero points; return both: a number is offset + code · scale.

        Each group's numbers are then at most half a scale away from a code.
        """
        middle = (least + greatest).mul_(0.5)
        scales = torch.maximum((greatest - least).div_(2**self.bits - 1), middle.abs() / _FARTHEST)
        base = scales.amax().clamp_(min=_LEAST_BASE)
        sections.base.copy_(base[None])
        steps = (base / scales).log2_().mul_(_STEPS).sub_(1e-3).floor_().clamp_(0, 255)
        sections.exponents.copy_(steps)
        scales = base * _powers()[sections.exponents.int()]
        zeros = (middle / scales).add_(0.5).round_().clamp_(-127, 127)
        sections.zeros.copy_(zeros)
        return scales, zeros.sub_(2 ** (self.bits - 1)).mul_(scales)

    def read(self, sections: Sections) -> tuple[Tensor, Tensor]:
        """Return scales and offsets of an encoded part.

        Raises:
            Damaged: no encoder writes these scales.
        """
        base = sections.base
        if not bool(base.isfinite()) or float(base) < _LEAST_BASE:
            raise Damaged("the base of the scales is no finite number above zero")
        scales = base * _powers()[sections.exponents.int()]
        return scales, (sections.zeros.float() - 2 ** (self.bits - 1)).mul_(scales)


def range_error(numbers: Tensor, kind: int, group: int) -> float:
    """Return the mean of the squared ranges, of one run [rows, tokens, width].

    The squared error of a code is proportional to it.
    """
    if kind == PER_TOKEN:
        numbers = numbers - (numbers.amax(1, keepdim=True) + numbers.amin(1, keepdim=True)) / 2
        numbers = numbers.view(len(numbers), -1, numbers.shape[2] // group, group)
        ranges = numbers.amax(3) - numbers.amin(3)
    else:
        ranges = numbers.amax(1) - numbers.amin(1)
    return float(ranges.double().square().mean())


@lru_cache(maxsize=1)
def _powers() -> Tensor:
    return torch.exp2(torch.arange(256, dtype=torch.float32) / -_STEPS)


def padded(count: int) -> int:
    """Return ``count`` up to a multiple of 64."""
    return -(-count // _MULTIPLE) * _MULTIPLE


def plane_bytes(count: int, width: int) -> int:
    """Return the bytes of a plane of ``width`` bits for a unit of ``count`` numbers."""
    return padded(count) * width // 8


def pack(codes: Tensor, bits: int) -> list[Tensor]:
    """Return the planes of ``codes``, each [units, M]. Cost: a few operations on an eighth of it.

    ``codes`` are uint8 below 2^bits, [units, padded numbers], contiguous.
    """
    words = codes.view(torch.int32)
    planes = []
    shift = 0
    for width in PLANES[bits]:
        if width == 8:
            return [codes]
        part = words
        if width < bits:
            part = (words >> _SHIFTS[shift] if shift else words) & _MASKS[width]
        shares = part.view(len(part), 8 // width, -1)
        plane = shares[:, 0].clone()
        for place in range(1, 8 // width):
            plane |= shares[:, place] << _SHIFTS[place * width]
        planes.append(plane.view(torch.uint8))
        shift += width
    return planes


def unpack(planes: Sequence[Tensor], bits: int) -> Tensor:
    """Return the codes [units, padded numbers] of ``planes`` [units, M], contiguous, uint8.

    It may be the only plane itself.
    """
    codes: Tensor | None = None
    shift = 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        if width == 8:
            return plane
        words = plane.view(torch.int32)
        units, length = words.shape
        full = torch.empty((units, 8 // width, length), dtype=torch.int32)
        for place in range(8 // width):
            # The sign that >> repeats is masked like the bits of the neighbours.
            down = words >> _SHIFTS[place * width] if place else words
            torch.bitwise_and(down, _MASKS[width], out=full[:, place])
        full = full.view(units, -1)
        codes = full if codes is None else codes.bitwise_or_(full << _SHIFTS[shift])
        shift += width
    assert codes is not None
    return codes.view(torch.uint8)
