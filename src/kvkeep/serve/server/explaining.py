"""Explanations as JSON for ``/kv/explain``, ``/kv/requests`` and ``/kv/summary``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain import around, why_of
from kvkeep.serve.server.text import showable, showable_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.observe.explain import Cause, ExplainSummary, Explanation, Span

    Decode = Callable[[Sequence[int]], str]

__all__ = ["as_answer", "as_line", "as_summary"]

# Fields of evidence that have tokens of prompts.
_TOKENS = ("given", "cached")


def as_line(explained: Explanation, *, id: str | None) -> dict[str, Any]:
    """Return the entry of a list of requests."""
    session = explained.session
    return {
        "id": id,
        "at": explained.at,
        "endpoint": explained.kind,
        "cache_salt": showable(explained.namespace.tenant),
        "session": None if session is None else showable(session),
        "prompt_tokens": explained.prompt_tokens,
        "generated_tokens": explained.generated_tokens,
        "ttft_s": explained.ttft_s,
        "seconds": explained.seconds,
        "outcome": explained.outcome,
        "reused": {showable(source): tokens for source, tokens in explained.reused.items()},
        "computed": dict(explained.computed),
        "sentence": showable(explained.sentence),
    }


def as_answer(explained: Explanation, *, id: str | None, decode: Decode | None) -> dict[str, Any]:
    """Return the whole explanation; without ``decode``, without text and tokens of prompts."""
    diverged = next((span for span in explained.spans if span.reason == "diverged"), None)
    return {
        **as_line(explained, id=id),
        "spans": [_span(span, text=decode is not None) for span in explained.spans],
        "text": None if decode is None or diverged is None else _text(diverged, decode),
    }


def as_summary(summary: ExplainSummary) -> dict[str, Any]:
    """Return the summary as JSON has it; the order of the causes is kept."""
    return {
        "requests": summary.requests,
        "prompt_tokens": summary.prompt_tokens,
        "reused": {showable(source): tokens for source, tokens in summary.reused.items()},
        "computed": dict(summary.computed),
        "causes": [_cause(cause) for cause in summary.causes],
    }


def _span(span: Span, *, text: bool) -> dict[str, Any]:
    evidence = {
        name: _shown(value) for name, value in span.evidence.items() if text or name not in _TOKENS
    }
    why = why_of(span)
    return {
        "start": span.start,
        "stop": span.stop,
        "source": None if span.source is None else showable(span.source),
        "reason": span.reason,
        "why": None if why is None else showable(why),
        "evidence": evidence,
    }


def _text(diverged: Span, decode: Decode) -> dict[str, Any] | None:
    words = around(diverged.evidence, decode)
    if not words:
        return None
    given, at_given = showable_at(words["given_text"], words["at_given"])
    cached, at_cached = showable_at(words["cached_text"], words["at_cached"])
    return {
        "given_text": given,
        "cached_text": cached,
        "at_given": at_given,
        "at_cached": at_cached,
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "reason": cause.reason,
        "tokens": cause.tokens,
        "share": cause.share,
        "requests": cause.requests,
        "cache_salt": None if cause.tenant is None else showable(cause.tenant),
        "position": cause.position,
        "example": cause.example,
        "sentence": showable(cause.sentence),
        "tenants": cause.tenants,
        "advice": cause.advice,
    }


def _shown(value: Any) -> Any:
    """Return a piece of evidence with all texts made safe to display (see `showable`)."""
    if isinstance(value, str):
        return showable(value)
    if isinstance(value, dict):
        return {showable(str(name)): _shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value
