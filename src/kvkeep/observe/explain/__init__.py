"""Explanations: why tokens of prompts were computed and not reused, and which causes cost most."""

from __future__ import annotations

from kvkeep.observe.explain.explainer import Explainer
from kvkeep.observe.explain.sentences import why_of
from kvkeep.observe.explain.spans import REASONS, Explanation, Span, around
from kvkeep.observe.explain.summary import Cause, ExplainSummary

__all__ = [
    "REASONS",
    "Cause",
    "ExplainSummary",
    "Explainer",
    "Explanation",
    "Span",
    "around",
    "why_of",
]
