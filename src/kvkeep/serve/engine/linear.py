"""Linear layers that are quick for a handful of rows on a CPU.

Decoding many sequences, or verifying drafts, multiplies weights with 3 to some 60 rows: more than
one, for which reading the weights is all there is to do, and too few for a plain matrix product to
be at its best. oneDNN has kernels for that which read weights in an order of their own. Measured
on one core, float32, 2048 × 768, ms a call, plain and packed:

    rows        1     2     4     9    16    32   128   512
    plain    0.22  0.23  0.44  0.66  0.59  0.80  2.40  21.8
    packed   0.26  0.27  0.27  0.34  0.44  0.70  2.53  25.5

So a layer keeps its weights twice and takes the better one. The operators are those that
torch.compile puts in the place of linear layers on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MOST_BYTES", "PackedLinear", "pack"]

MOST_BYTES: Final = 1 << 30
"""What packed weights of a model may take; the layers of larger models stay as they are."""

_FEWEST, _MOST = 3, 64  # rows


class PackedLinear(nn.Linear):
    """`torch.nn.Linear` with its weights a second time, in oneDNN's order; for inference."""

    packed: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """``linear`` itself, made into one: whoever refers to it goes on to do so."""
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
    """Pack the linear layers of ``model`` where that pays; returns the bytes this took.

    That is on a CPU, in float32, and within `MOST_BYTES` in all. Layers that share their weights
    with others (tied embeddings) are packed too: the others keep what they have.
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
