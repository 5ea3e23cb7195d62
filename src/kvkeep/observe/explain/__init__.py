"""Why tokens of a prompt were computed although others asked for the same, and what it costs."""

from __future__ import annotations

from kvkeep.observe.explain.answer import (
    REASONS,
    Cause,
    ExplainSummary,
    Explanation,
    Missing,
    Span,
    Totals,
    around,
)
from kvkeep.observe.explain.explainer import Explainer

__all__ = [
    "REASONS",
    "Cause",
    "ExplainSummary",
    "Explainer",
    "Explanation",
    "Missing",
    "Span",
    "Totals",
    "around",
]
