"""Part "machine": what all other figures were measured on."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import kvkeep
from kvkeep.core.geometry import format_bytes

if TYPE_CHECKING:
    from gpu_parts.figures import Report, Setting

__all__ = ["run"]

# The rest of what parts use; without one, a part says so.
_PACKAGES = (
    "transformers", "xxhash", "numcodecs", "pytest", "hypothesis", "triton", "flash_attn",
)  # fmt: skip


def run(report: Report, setting: Setting) -> None:
    """Tell the machine."""
    facts = {"kvkeep": kvkeep.__version__}
    if setting.on_gpu:
        found = torch.cuda.get_device_properties(setting.device)
        facts |= {
            "GPU": f"{found.name}, {format_bytes(found.total_memory)}",
            "compute capability": f"{found.major}.{found.minor}",
            "CUDA of PyTorch": str(torch.version.cuda),
            "driver": _driver(),
        }
    report.tell(facts | {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores for this process",
        "disk": _disk(setting.folder),
        "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "system": platform.system(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    } | {name: _version(name) for name in _PACKAGES} | {
        "flash_attn_interface": _flash3(),
    })  # fmt: skip


def _processor() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _disk(folder: Path) -> str:
    """Return the kind of the filesystem that is measured, and its free bytes."""
    free = f"{format_bytes(shutil.disk_usage(folder).free)} free"
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return free
    kinds = {Path(words[1]): words[2] for line in mounts.read_text().splitlines()
             if len(words := line.split()) > 2}  # fmt: skip
    path = folder.resolve()
    kind = next((kinds[one] for one in (path, *path.parents) if one in kinds), "unknown")
    return f"{kind}, {free}{' (in memory)' * (kind in {'tmpfs', 'ramfs'})}"


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return "not told"
    words = file.read_text().splitlines()[0].split()
    return next((word for word in words if word.count(".") and word[0].isdigit()), "not told")


def _flash3() -> str:
    """Return the version of FlashAttention 3, a module that several packages bring."""
    if find_spec("flash_attn_interface") is None:
        return "not installed"
    return str(getattr(import_module("flash_attn_interface"), "__version__", "installed"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
