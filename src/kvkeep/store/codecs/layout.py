"""What encoded parts of KV have in common: they begin at multiples of 8 bytes, for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALIGNED", "aligned", "bytes_of"]

ALIGNED: Final = 8


def aligned(size: int) -> int:
    """Return ``size`` rounded up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def bytes_of(buffer: memoryview) -> Tensor:
    """Return a buffer as a tensor of uint8; a read-only one is copied, as torch needs to write."""
    writable = bytearray(buffer) if buffer.readonly else buffer
    return torch.frombuffer(writable, dtype=torch.uint8)
