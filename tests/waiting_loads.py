"""In the place of `kvkeep.core.cost.take_turns`: loads are waited for, whatever computing takes.

A busy machine may compute what a tier does not bring in time. In the test's process the fixture
`load_first` takes this; code for another process begins with `LOADING`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.core.cost import PromptTurn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.cost import LoadProgress


LOADING = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from kvkeep.serve.engine.offload import overlaps
from waiting_loads import wait_for_all
overlaps.take_turns = wait_for_all
"""


def wait_for_all(
    loads: Sequence[LoadProgress], compute_s: object, **_how: float
) -> list[PromptTurn]:
    """As `take_turns`; nothing is computed of a prompt that is being loaded."""
    turns = []
    for one in loads:
        prompt = one.prompt
        stop = at = prompt.computed
        if at >= prompt.loaded or one.over:
            stop = prompt.loaded if at < prompt.loaded < prompt.stop else prompt.tokens
        turns.append(PromptTurn(at, stop))
    return turns
