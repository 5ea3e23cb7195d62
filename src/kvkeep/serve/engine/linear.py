"""Linear layers that are fast for 3 to 64 rows on a CPU.

Decoding many sequences, or verifying drafts, multiplies weights with 3 to 64 rows: more than one,
which costs no more than reading the weights, and too few for a plain matrix product to be
efficient. oneDNN has kernels for this range that need the weights in their own order. Measured on
one core, float32, 2048 × 768, ms a call, plain and packed:

    rows        1     2     4     9    16    32   128   512
    plain    0.22  0.23  0.44  0.66  0.59  0.80  2.40  21.8
    packed   0.26  0.27  0.27  0.34  0.44  0.70  2.53  25.5

So a layer keeps its weights twice and picks by the number of rows. The operators are those that
torch.compile substitutes for linear layers on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MOST_BYTES", "PackedLinear", "pack"]

MOST_BYTES: Final = 1 << 30
"""Bytes that a model's packed weights may take; larger models are not packed."""

_FEWEST, _MOST = 3, 64  # rows


class PackedLinear(nn.Linear):
    """`torch.nn.Linear` with a second copy of its weights in oneDNN's order; for inference only."""

    packed: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Turn ``linear`` itself into a `PackedLinear`, so that references to it stay valid."""
        assert type(linear) is nn.Linear, "a subclass has a forward of its own"
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.packed = packed
        return linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[…, features in] to […, features out]."""
        if not _FEWEST <= rows.numel() // rows.shape[-1] <= _MOST:
            return super().forward(rows)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias, "none", [], ""
        )
        return out


def pack(model: nn.Module) -> int:
    """Pack the linear layers of ``model`` where that pays; return the bytes this took.

    It pays on a CPU in float32; models that would take more than `MOST_BYTES` are left as they are.
    Layers that share their weights (tied embeddings) are packed too; the weights stay shared.
    """
    layers = list(_packable(model))
    taken = sum(layer.weight.nbytes for layer in layers)
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if taken > MOST_BYTES or not available:
        return 0
    with torch.inference_mode():
        for layer in layers:
            PackedLinear.of(layer)
    return taken


def _packable(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                yield module
