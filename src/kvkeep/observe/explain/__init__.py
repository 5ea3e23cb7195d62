"""Explanations: why tokens of prompts were computed and not reused, and which causes cost most."""

from __future__ import annotations

from kvkeep.observe.explain.answer import (
    REASONS,
    Cause,
    ExplainSummary,
    Explanation,
    Missing,
    Span,
    around,
)
from kvkeep.observe.explain.explainer import Explainer, missing
from kvkeep.observe.explain.sentences import why_of

__all__ = [
    "REASONS",
    "Cause",
    "ExplainSummary",
    "Explainer",
    "Explanation",
    "Missing",
    "Span",
    "around",
    "missing",
    "why_of",
]
