"""Replay: traces through the code that serves, with virtual memory and a virtual clock."""

from __future__ import annotations

from kvkeep.bench.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.bench.replay.costs import PrefillCost
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.outcome import REASONS, Outcome, Spans
from kvkeep.bench.replay.planning import Advice, PlannedMemory
from kvkeep.bench.replay.runs import BOUNDS, ReplayRun, RunLog, replay
from kvkeep.bench.replay.simulate import Paging, simulate
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.bench.replay.workload import Workload

__all__ = [
    "BELADY",
    "BOUNDS",
    "INFINITE",
    "REASONS",
    "Advice",
    "Outcome",
    "Paging",
    "PlannedMemory",
    "PrefillCost",
    "ReplayRun",
    "RunLog",
    "Spans",
    "Workload",
    "belady",
    "infinite",
    "replay",
    "simulate",
    "simulate_loop",
    "simulate_tiers",
]
