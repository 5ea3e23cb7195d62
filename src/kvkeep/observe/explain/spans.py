"""Spans of a prompt: painting one over others, and joining equal neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.observe.explain.answer import Span

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["covering", "of_public", "painted", "with_last_token"]


def painted(spans: list[Span], new: Span, over: Container[str | None]) -> list[Span]:
    """Return ``spans`` with ``new`` painted over those whose reason is in ``over``."""
    found: list[Span] = []
    for span in spans:
        first, last = max(span.start, new.start), min(span.stop, new.stop)
        if first >= last or span.reason not in over:
            found.append(span)
            continue
        if span.start < first:
            found.append(_cut(span, span.start, first))
        found.append(_cut(new, first, last))
        if last < span.stop:
            found.append(_cut(span, last, span.stop))
    return found


def _cut(span: Span, start: int, stop: int) -> Span:
    return Span(start, stop, span.source, span.reason, span.evidence)


def with_last_token(spans: list[Span], tokens: int) -> list[Span]:
    """Give the last token its own reason if no other token had to be computed.

    Tokens with the reason "page_remainder" do not count as such.
    """
    reasons = {span.reason for span in spans if span.start < tokens - 1 and span.reason}
    if reasons <= {"page_remainder"}:
        return painted(spans, Span(tokens - 1, tokens, None, "last_token"), _Anything())
    return spans


def of_public(spans: Iterable[Span], tokens: int) -> list[Span]:
    """Say of the spans within the first ``tokens`` tokens that these are of a public prefix."""
    found: list[Span] = []
    for span in spans:
        middle = max(span.start, min(tokens, span.stop))
        if span.start < middle:
            evidence = {**span.evidence, "public": True}
            found.append(Span(span.start, middle, span.source, span.reason, evidence))
        if middle < span.stop:
            found.append(_cut(span, middle, span.stop))
    return found


class _Anything:
    """A container that contains everything."""

    def __contains__(self, item: object) -> bool:
        return True


def covering(spans: Iterable[Span], tokens: int) -> tuple[Span, ...]:
    """Join equal neighbours, and assert that the spans cover all tokens, each once.

    Cost: one pass.
    """
    found: list[Span] = []
    at = 0
    for span in spans:
        assert span.start == at, f"spans have a gap or overlap at token {at}"
        assert span.stop > span.start, f"an empty span at token {at}"
        assert (span.source is None) != (span.reason is None), f"two minds about token {at}"
        at = span.stop
        last = found[-1] if found else None
        if (
            last is not None
            and (last.source, last.reason) == (span.source, span.reason)
            and (last.evidence is span.evidence or last.evidence == span.evidence)
        ):
            found[-1] = _cut(last, last.start, span.stop)
        else:
            found.append(span)
    assert at == tokens, f"spans cover {at} of {tokens} tokens"
    return tuple(found)
