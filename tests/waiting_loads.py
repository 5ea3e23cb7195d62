"""In the place of an engine's choice: loads are waited for, whatever computing takes.

A busy machine may compute what a tier does not bring in time. In the test's process the fixture
`load_first` takes this; code for another process begins with `LOADING`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.store import LoadChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.cost import CostModel
    from kvkeep.store import LoadPiece

LOADING = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import waiting_loads
waiting_loads.wait_for_all()
"""


def wait_for_all() -> None:
    """Let the engines of this process wait for all that is stored, up to their `load_timeout`."""
    offload = vars(import_module("kvkeep.serve.engine.offload.offload"))
    offload["choose_load"], offload["lookup_patience_s"] = load_all, whole_timeout


def load_all(
    cost: CostModel, start: int, tokens: int, pieces: Sequence[LoadPiece], **_how: Any
) -> LoadChoice:
    """As `choose_load`; all that is stored is worth loading."""
    return LoadChoice(start, pieces[-1].stop, pieces[-1].stop, 0.0, 0.0, 0.0, None, ())


def whole_timeout(compute_s: float | None, timeout: float) -> float:
    """As `lookup_patience_s`, whatever computing takes."""
    return timeout
