"""Replay: a trace through the very code that serves, its memory and its clock virtual."""

from __future__ import annotations

from kvkeep.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.replay.outcome import REASONS, Outcome, Spans
from kvkeep.replay.simulate import Paging, simulate
from kvkeep.replay.workload import Workload

__all__ = [
    "BELADY",
    "INFINITE",
    "REASONS",
    "Outcome",
    "Paging",
    "Spans",
    "Workload",
    "belady",
    "infinite",
    "simulate",
]
