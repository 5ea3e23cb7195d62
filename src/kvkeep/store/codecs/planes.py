"""Codes of 2 to 8 bits in bytes, as planes that a few operations on whole tensors pack and unpack.

Codes of one *unit* (N numbers) are split into planes of 8, 4, 2 or 1 bits, the lowest bits first:
5 bits are a plane of 4 and one of 1. A plane of w bits has M = ⌈N·w/8⌉ bytes; byte k contains the
bits of the numbers k, k + M, k + 2M, …, the first one lowest. Numbers beyond the N-th are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BITS", "PLANES", "pack", "plane_bytes", "unpack"]

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the planes of a code, the lowest bits first."""

BITS = tuple(PLANES)
"""How long a code may be."""


def plane_bytes(count: int, width: int) -> int:
    """Return the bytes of a plane of ``width`` bits for ``count`` numbers."""
    return -(-count * width // 8)


def pack(codes: Tensor, planes: list[Tensor], bits: int) -> None:
    """Pack uint8 ``codes`` [units, N] into ``planes``, each [units, M], uint8. Alters nothing else.

    ``planes`` are in the order of `PLANES`.
    """
    count = codes.shape[1]
    shift = 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        if width == 8:
            plane.copy_(codes)
            return
        part = (codes >> shift) & ((1 << width) - 1) if len(planes) > 1 else codes
        length = plane.shape[1]
        plane.copy_(part[:, :length])
        for place in range(1, 8 // width):
            share = part[:, place * length : min(count, (place + 1) * length)]
            if share.shape[1]:
                plane[:, : share.shape[1]] |= share << (place * width)
        shift += width


def unpack(planes: list[Tensor], bits: int, count: int) -> Tensor:
    """Return the codes [units, ``count``] of ``planes``, uint8; a view of a new tensor, or of them."""
    if bits == 8:
        return planes[0]
    codes: Tensor | None = None
    shift = 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        mask = (1 << width) - 1
        units, length = plane.shape
        full = torch.empty((units, length * (8 // width)), dtype=torch.uint8)
        for place in range(8 // width):
            share = full[:, place * length : (place + 1) * length]
            torch.bitwise_right_shift(plane, place * width, out=share)
            if place < 8 // width - 1:
                share &= mask
        full = full[:, :count]
        codes = full if codes is None else codes.add_(full << shift)
        shift += width
    assert codes is not None
    return codes
