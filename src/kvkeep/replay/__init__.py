"""Replay: a trace through the very code that serves, its memory and its clock virtual."""

from __future__ import annotations

from kvkeep.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.replay.costs import PrefillCost
from kvkeep.replay.loop import simulate_loop
from kvkeep.replay.outcome import REASONS, Outcome, Spans
from kvkeep.replay.planning import Advice, Plan
from kvkeep.replay.runs import BOUNDS, Journal, Run, replay
from kvkeep.replay.simulate import Paging, simulate
from kvkeep.replay.tiered import simulate_tiers
from kvkeep.replay.workload import Workload

__all__ = [
    "BELADY",
    "BOUNDS",
    "INFINITE",
    "REASONS",
    "Advice",
    "Journal",
    "Outcome",
    "Paging",
    "Plan",
    "PrefillCost",
    "Run",
    "Spans",
    "Workload",
    "belady",
    "infinite",
    "replay",
    "simulate",
    "simulate_loop",
    "simulate_tiers",
]
