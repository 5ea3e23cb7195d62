"""Replay: traces through the code that serves, with virtual memory and a virtual clock."""

from __future__ import annotations

from kvkeep.bench.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.bench.replay.candidates import PlanCandidate
from kvkeep.bench.replay.grouping import GroupSizes, WindowSize
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.outcome import GROUP_REASONS, REASONS, Outcome, Spans
from kvkeep.bench.replay.pace import LOADINGS
from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.replay.planning import Advice, PlannedMemory
from kvkeep.bench.replay.runs import BOUNDS, ReplayRun, RunLog, replay
from kvkeep.bench.replay.sharing import simulate_shares, simulate_tier_shares
from kvkeep.bench.replay.simulate import simulate
from kvkeep.bench.replay.summary import TraceSummary, summarise
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.bench.replay.workload import Workload
from kvkeep.core.cost import PrefillCost

__all__ = [
    "BELADY",
    "BOUNDS",
    "GROUP_REASONS",
    "INFINITE",
    "LOADINGS",
    "REASONS",
    "Advice",
    "GroupSizes",
    "Outcome",
    "Paging",
    "PlanCandidate",
    "PlannedMemory",
    "PrefillCost",
    "ReplayRun",
    "RunLog",
    "Spans",
    "TraceSummary",
    "WindowSize",
    "Workload",
    "belady",
    "infinite",
    "replay",
    "simulate",
    "simulate_loop",
    "simulate_shares",
    "simulate_tier_shares",
    "simulate_tiers",
    "summarise",
]
