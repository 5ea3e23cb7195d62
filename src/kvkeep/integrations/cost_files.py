"""Files with costs: one that was measured before, and beside it what an engine has learned since.

Beside ``cost.json`` that is ``cost.learned.json``, which is read instead once it is newer.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvkeep.core.cost import CostModel, OtherCostVersion
from kvkeep.core.errors import InvalidValue

__all__ = ["costs_in", "write_costs"]

_LOG = logging.getLogger("kvkeep.costs")


def costs_in(path: str, model: str) -> CostModel:
    """Return the costs of ``model`` in a file; with nothing in them if ``path`` is empty.

    Raises `InvalidValue` if the file is none of costs. Costs of another model are left out, and
    that is logged.
    """
    if not path:
        return CostModel(model=model)
    given, learned = Path(path), _beside(Path(path))
    found = CostModel.read(given)
    try:
        if learned.stat().st_mtime >= given.stat().st_mtime:
            found = CostModel.read(learned)
    except (OSError, InvalidValue):
        pass  # there is none yet, or it was damaged: it will be written anew
    if found.model and found.model != model:
        _LOG.warning("%s has costs of %s; nothing is taken from it", path, found.model)
        return CostModel(model=model)
    found.model = model
    return found


def write_costs(cost: CostModel, path: str) -> None:
    """Write what was learned beside the file that was given; nothing if ``path`` is empty.

    A file of another version of the format stays as it is, and that is logged.
    """
    if path and cost.prefill.known:
        learned = _beside(Path(path))
        try:
            _check_version(learned)
            cost.write(learned)
        except InvalidValue as error:
            _LOG.warning("costs were not saved: %s", error)


def _check_version(path: Path) -> None:
    """Raise `OtherCostVersion` for a file of another version; a damaged one may be replaced."""
    try:
        CostModel.read(path)
    except OtherCostVersion:
        raise
    except InvalidValue:
        pass


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.learned{path.suffix}")
