"""`device_name`: the processor or GPU of a runner, by which learned costs are told apart."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["device_name"]

_MOST = 100  # characters


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() if device.type == "cpu" else str(device)


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
