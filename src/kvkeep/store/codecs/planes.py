"""Codes of 2 to 8 bits in bytes, as planes that a few operations on whole tensors pack and unpack.

The codes of one *unit*, N numbers and zeros up to a multiple of 64, are split into planes of 8, 4,
2 or 1 bits, the lowest bits first: 5 bits are a plane of 4 and one of 1. A plane of w bits has
M = N·w/8 bytes; byte k contains the bits of the numbers k, k + M, k + 2M, …, the first one lowest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BITS", "PLANES", "pack", "padded", "plane_bytes", "unpack"]

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
