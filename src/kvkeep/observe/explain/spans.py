"""`Span`: tokens of a prompt, reused from one source, or computed for one reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from kvkeep.core.keys import Namespace

__all__ = ["AFTER", "BEFORE", "REASONS", "Explanation", "Span", "around", "complete", "painted"]

REASONS = (
    "new",
    "diverged",
    "evicted",
    "not_admitted",
    "other_namespace",
    "page_remainder",
    "not_resumable",
    "computing",
    "not_loaded",
    "tier_unavailable",
    "damaged",
    "last_token",
)
"""Reasons why a token was computed; every computed token has exactly one."""
BEFORE, AFTER = 8, 16
"""Tokens that are shown before the first differing token, and from it on."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` … ``stop`` (exclusive) of a prompt, with one source or one reason.

    Reused: ``source`` is "pool" or the name of a tier, ``reason`` None. Computed: ``source`` is
    None and ``reason`` one of `REASONS`; ``evidence`` is flat and fit for JSON.
    """

    start: int
    stop: int
    source: str | None
    reason: str | None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


def painted(spans: list[Span], news: Iterable[Span], over: Container[str | None]) -> list[Span]:
    """Return ``spans`` with ``news`` painted over those whose reason is in ``over``.

    Where two of ``news`` overlap, the one that starts first counts. Cost: one pass over both.
    """
    parts: list[Span] = []
    brushes = sorted(news, key=lambda new: new.start)
    at = 0
    for span in spans:
        start = span.start
        while span.reason in over and at < len(brushes) and brushes[at].start < span.stop:
            new = brushes[at]
            first, last = max(start, new.start), min(span.stop, new.stop)
            if first < last:
                parts += [_cut(span, start, first)] * (start < first) + [_cut(new, first, last)]
                start = last
            if new.stop > span.stop:  # it goes on in the next span
                break
            at += 1
        if start < span.stop:
            parts.append(_cut(span, start, span.stop))
    return parts


def _cut(span: Span, start: int, stop: int) -> Span:
    return Span(start, stop, span.source, span.reason, span.evidence)


def complete(spans: list[Span], tokens: int, public: int) -> tuple[Span, ...]:
    """Return the spans of a prompt of so many tokens, each token in one of them.

    The last token has its own reason if no other token had to be computed; parts of a page do not
    count as such. Spans within the first ``public`` tokens say so. Equal neighbours are joined.
    """
    reasons = {span.reason for span in spans if span.start < tokens - 1 and span.reason}
    if reasons <= {"page_remainder"}:
        everything = {None, *REASONS}
        spans = painted(spans, [Span(tokens - 1, tokens, None, "last_token")], everything)
    shared = [
        replace(span, stop=min(public, span.stop), evidence={**span.evidence, "public": True})
        for span in (spans if public else ())
    ]
    spans = painted(spans, shared, {None, *REASONS})
    joined = spans[:1]
    for span in spans[1:]:
        last = joined[-1]
        what = last.source, last.reason, last.evidence
        if what == (span.source, span.reason, span.evidence):
            joined[-1] = _cut(last, last.start, span.stop)
        else:
            joined.append(span)
    assert (joined[0].start, joined[-1].stop) == (0, tokens), "the spans do not cover the prompt"
    assert all(before.stop == span.start for before, span in pairwise(joined)), "a gap or overlap"
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one request's prompt, token by token.

    ``at`` is unix seconds, ``kind`` the endpoint. Fields that are known only at the end of a
    request are None before. ``spans`` cover the prompt from 0 to ``prompt_tokens``, in order,
    without gaps. ``sentence`` states the main reason; it quotes names with unprintable characters
    escaped.
    """

    id: str
    at: float
    namespace: Namespace
    kind: str
    session: str | None
    prompt_tokens: int
    spans: tuple[Span, ...]
    generated_tokens: int | None
    ttft_s: float | None
    seconds: float | None
    outcome: str | None
    sentence: str

    @property
    def reused(self) -> dict[str, int]:
        """Reused tokens by source."""
        return _sums((span.source, span.tokens) for span in self.spans)

    @property
    def computed(self) -> dict[str, int]:
        """Computed tokens by reason."""
        return _sums((span.reason, span.tokens) for span in self.spans)


def _sums(parts: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, tokens in parts:
        if name is not None:
            sums[name] = sums.get(name, 0) + tokens
    return sums


def around(evidence: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the text around the first differing token, of both prompts.

    ``given_text`` is that of the prompt, ``cached_text`` that of the cached prompt; ``at_given``
    and ``at_cached`` are the positions of the first differing token in them, in characters. Empty
    if the evidence has no tokens (its reason is not "diverged", or they were left out).
    """
    if "given" not in evidence or "cached" not in evidence:
        return {}
    before = min(BEFORE, int(evidence["position"]))
    texts: dict[str, Any] = {}
    for name in ("given", "cached"):
        tokens = evidence[name]
        text, head = decode(tokens), decode(tokens[:before])
        texts[f"{name}_text"] = text
        # A character may begin in one token and end in the next: it is part of the difference.
        pairs = enumerate(zip(text, head, strict=False))
        differing = (at for at, (char, other) in pairs if char != other)
        texts[f"at_{name}"] = next(differing, min(len(text), len(head)))
    return texts
