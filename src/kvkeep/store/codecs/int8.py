"""int8: whole multiples of a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvkeep.store.codecs.quantised import QuantisedCodec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fp8Codec", "Int8Codec"]


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
