"""`pick_device`: the torch device that a name stands for, if this machine has it."""

from __future__ import annotations

import torch

from kvkeep.core.errors import InvalidValue

__all__ = ["pick_device"]


def pick_device(device: str | torch.device) -> torch.device:
    """Return the torch device named ``device``; "auto" is the GPU if there is one.

    A GPU that is named without a number is the current one, and the answer has its number, which
    `torch.cuda.set_device` asks for.

    Raises `InvalidValue` for a device that this machine, or this build of PyTorch, does not have.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidValue(f"no torch device is named {device!r}; try auto, cpu or cuda") from error
    try:
        return torch.empty(0, device=found).device
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        raise InvalidValue(f"{_missing(found)}; give auto or cpu") from error


def _missing(device: torch.device) -> str:
    """Return why no tensor can be made on ``device``."""
    if device.type != "cuda":
        return f"there is no device {str(device)!r} here"
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"device {str(device)!r} needs a PyTorch with CUDA, and {torch.__version__} is without"
        )
    if not torch.cuda.is_available():
        return f"device {str(device)!r} needs a GPU that CUDA can use, and there is none here"
    count = torch.cuda.device_count()
    return f"there is no device {str(device)!r}: there are {count} GPUs, from cuda:0"
