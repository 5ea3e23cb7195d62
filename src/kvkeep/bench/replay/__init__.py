"""Replay: traces through the code that serves, with virtual memory and a virtual clock."""

from __future__ import annotations

from kvkeep.bench.replay.advising import Advice, PlanCandidate, PlannedMemory, advise
from kvkeep.bench.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.outcome import GROUP_REASONS, REASONS, Outcome
from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.replay.runs import BOUNDS, ReplayRun, replay
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
    "REASONS",
    "Advice",
    "Outcome",
    "Paging",
    "PlanCandidate",
    "PlannedMemory",
    "PrefillCost",
    "ReplayRun",
    "TraceSummary",
    "Workload",
    "advise",
    "belady",
    "infinite",
    "replay",
    "simulate",
    "simulate_loop",
    "simulate_tiers",
    "summarise",
]
