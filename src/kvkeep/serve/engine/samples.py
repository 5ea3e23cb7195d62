"""What `kvkeep calibrate` needs to know of a runner: the name of its device, and sample KV."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.geometry import KVGeometry

__all__ = ["device_name", "sample_kv"]

_MOST = 100  # characters


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() if device.type == "cpu" else str(device)


def sample_kv(geometry: KVGeometry, tokens: int) -> Tensor | tuple[tuple[Tensor, Tensor], ...]:
    """Return KV of ``tokens`` tokens of a plain model, as `KVStore.put` takes it.

    Its numbers are normally distributed: codecs find in them what they find in KV.
    """
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    if geometry.latent_dim is not None:
        return torch.randn(geometry.layers, tokens, geometry.head_dim).to(dtype)
    keys, values = (
        torch.randn(geometry.layers, tokens, geometry.rank_heads, width).to(dtype)
        for width in (geometry.head_dim, geometry.value_dim)
    )
    return tuple(zip(keys, values, strict=True))


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name" and value.strip():
                    return value.strip()[:_MOST]
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine() or "cpu"
