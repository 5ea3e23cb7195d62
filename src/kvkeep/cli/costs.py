"""The file of costs of `kvkeep serve`."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvkeep.cli.tiers import cache_folder
from kvkeep.core.cost import CostFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvkeep.serve.engine import Runner

__all__ = ["kept_costs"]

_EVERY_S = 300.0


def _model_on(runner: Runner) -> str:
    """Return the name of a model on a device, by which its costs are told from others."""
    from kvkeep.serve.engine.runner import device_name  # noqa: PLC0415 - loaded with the runner

    return f"{runner.identity} on {device_name(runner.device)}"


@contextmanager
def kept_costs(
    path: Path | None, runner: Runner, tiers: Sequence[str]
) -> Iterator[CostFile | None]:
    """Open the file of costs, and write it at the end.

    Without ``path`` it is in the user's cache, by model, device and tiers; None if it cannot be
    there. Raises `InvalidValue` for a ``path`` with costs of another model, or with none.
    """
    model = _model_on(runner)
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
