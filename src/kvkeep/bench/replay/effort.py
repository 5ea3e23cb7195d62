"""How long replays take, compared with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.replay.runs import BOUNDS

if TYPE_CHECKING:
    from kvkeep.bench.replay.runs import ReplayRun

__all__ = ["effort"]

_BOUND = 0.25
_POLICIES = {"returns": 1.3}
_TIERS = 2.0
_TIMED = 1.3


def effort(run: ReplayRun) -> float:
    """Return about how long a replay takes, in times of LRU's in memory alone.

    By medians over policies and traces: one replay may take half or twice as long.
    """
    if run.policy in BOUNDS:
        return _BOUND
    times = _POLICIES.get(run.policy, 1.0)
    if run.below:
        times *= _TIERS
    return times * (1.0 if run.cost is None else _TIMED)
