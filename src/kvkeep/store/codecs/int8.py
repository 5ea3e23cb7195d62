"""int8: whole multiples of a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvkeep.store.codecs.quantised import QuantisedCodec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Int8Codec"]


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
