"""Files of costs of the commands that run a model: `kvkeep calibrate` and `kvkeep serve`."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli.tiers import cache_folder
from kvkeep.core.cost import CostFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.serve.engine import Runner

__all__ = ["kept_costs", "model_on"]

_EVERY_S = 300.0


def model_on(runner: Runner) -> str:
    """Return the name of a model on a device, by which its costs are told from others."""
    return f"{runner.identity} on {_device(runner)}"


@contextmanager
def kept_costs(
    path: Path | None, runner: Runner, tiers: Sequence[str]
) -> Iterator[CostFile | None]:
    """Open the file of costs, and write it at the end.

    Without ``path`` it is in the user's cache, by model, device and tiers; None if it cannot be
    there. Raises `InvalidValue` for a ``path`` with costs of another model, or with none.
    """
    model = model_on(runner)
    if path is not None:
        file: CostFile | None = CostFile.open(path, model, every_s=_EVERY_S)
    else:
        named = json.dumps([model, list(tiers)]).encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(named, digest_size=16).hexdigest()
        try:
            folder = cache_folder().parent / "costs"
        except RuntimeError:  # there is no home
            yield None
            return
        file = CostFile.begin(folder / f"{digest}.json", model, every_s=_EVERY_S)
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _device(runner: Runner) -> str:
    """Return the device's name: that of the GPU, or of the processor."""
    if runner.device.type == "cuda":
        import torch  # noqa: PLC0415 - loaded with the runner

        return torch.cuda.get_device_name(runner.device)
    if runner.device.type != "cpu":
        return str(runner.device)
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name" and value.strip():
                    return value.strip()[:100]
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine() or "cpu"
