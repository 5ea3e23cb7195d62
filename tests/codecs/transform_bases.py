"""Bases fitted to random numbers, and KV that such a basis fits: correlated, with turned keys."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvkeep.store.codecs import BlockShape
from kvkeep.store.codecs.basis_fit import BasisFit
from kvkeep.store.codecs.transform import TransformCodec

if TYPE_CHECKING:
    from kvkeep.store.codecs.basis import Basis

TURNED = BlockShape("bfloat16", "NHD", ((2, 32), (2, 32)) * 2)
"""Two layers; `turned_kv` gives keys with a rotary embedding."""

SPEEDS = 100.0 ** (-np.arange(12) / 12)  # of 24 channels: 8 are not rotated
LONGEST = 4096


@cache
def basis_of(shape: BlockShape, noise: float = 0.03, width: int = 96, seed: int = 0) -> Basis:
    """A basis for random normals in blocks of ``shape``, none of them rotated."""
    return _fitted(shape.parts, (), width, noise, seed)


@cache
def turned_basis(noise: float = 0.03, width: int = 128, seed: int = 0) -> Basis:
    """A basis for `turned_kv`."""
    return _fitted(TURNED.parts, (0, 2), width, noise, seed)


@cache
def codec_for(shape: BlockShape) -> TransformCodec:
    return TransformCodec(shape, [basis_of(shape)])


def _fitted(parts, rotated, width: int, noise: float, seed: int) -> Basis:
    speeds = SPEEDS if rotated else np.empty(0)
    fit = BasisFit(parts, rotated, speeds, width)
    generator = torch.Generator().manual_seed(seed)
    if rotated:
        fit.add_numbers(turned_kv(2048, 0, seed))
    else:
        for _ in range(2):
            fit.add_numbers([torch.randn(600, *part, generator=generator) for part in parts])
    for _ in range(2):
        gradients = [torch.randn(600, *part, generator=generator) for part in parts]
        fit.add_gradients([one * (1 + number % 3) for number, one in enumerate(gradients)], 100)
    return fit.basis(noise, "random numbers", LONGEST)


def turned_kv(tokens: int, start: int, seed: int) -> list[torch.Tensor]:
    """Parts [tokens, heads, dim] of `TURNED`, from position ``start`` on: a few causes, mixed."""
    channels = sum(heads * dim for heads, dim in TURNED.parts)
    world = torch.Generator().manual_seed(7)  # the same whatever the seed
    mixing = torch.randn(24, channels, generator=world) / 3
    mean = torch.randn(channels, generator=world) * 3
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(tokens, 24, generator=generator)
    noise = torch.randn(tokens, channels, generator=generator) / 20
    parts = list((causes @ mixing + mean + noise).view(tokens, 4, 2, 32).unbind(1))
    angles = torch.arange(start, start + tokens)[:, None] * torch.from_numpy(SPEEDS)
    cosines, sines = angles.cos()[:, None].float(), angles.sin()[:, None].float()
    for number in (0, 2):
        first, second, rest = parts[number].split([12, 12, 8], 2)
        turned = [first * cosines - second * sines, second * cosines + first * sines, rest]
        parts[number] = torch.cat(turned, 2)
    return parts


def raw_kv(tokens: int, start: int, seed: int, dtype: str = "bfloat16", layout="NHD") -> bytes:
    parts = turned_kv(tokens, start, seed)
    if layout == "HND":
        parts = [part.transpose(0, 1) for part in parts]
    flat = torch.cat([part.reshape(-1) for part in parts]).to(getattr(torch, dtype))
    return bytes(flat.view(torch.uint8).numpy().tobytes())
