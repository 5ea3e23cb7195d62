"""Rotary embeddings, found in the keys themselves.

Rotary embeddings rotate pairs of channels (i, i + dim/2) by the token's position times
base^(-2i/dim). A key's channels then swing with the position, although what they say hardly
changes: turned back, each channel has a large mean and a small spread. Turning back needs the base
alone: a constant rotation of the whole block (its position) does no harm. The base is whatever
makes the means of a sample largest; a block's record names it, so that readers need not search.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BASES", "find_base", "turn", "turns"]

BASES = (1e3, 1e8)
"""The smallest and the largest base that is searched for."""

_STEP = 1.03  # between two bases searched: a phase that is wrong by a tenth at the block's end
_SAMPLE_TOKENS = 128
_LEAST_SHARE = 0.1  # of the energy that must be in the means, and was not before turning


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
