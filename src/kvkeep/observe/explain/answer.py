"""Explanations: spans of a prompt, each reused, or computed for one reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from kvkeep.core.keys import Namespace

__all__ = [
    "BEFORE",
    "BEHIND",
    "REASONS",
    "STORE_REASONS",
    "Cause",
    "ExplainSummary",
    "Explanation",
    "Missing",
    "Span",
    "around",
    "covering",
    "of_public",
    "painted",
    "with_last_token",
]

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
STORE_REASONS = frozenset({"evicted", "not_admitted", "not_loaded", "tier_unavailable", "damaged"})
"""Reasons that a store can report for tokens that were not loaded from it."""
BEFORE, BEHIND = 8, 16
"""Tokens shown before the first differing token, and from it on."""


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


@dataclass(frozen=True, slots=True)
class Missing:
    """A store's reason for tokens that were not loaded from it.

    ``reason`` is one of `STORE_REASONS`; else `InvalidValue`.
    """

    start: int
    stop: int
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reason not in STORE_REASONS:
            raise InvalidValue(
                f"a store's reason is one of {', '.join(sorted(STORE_REASONS))}; "
                f"got {self.reason!r}"
            )


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
        found: dict[str, int] = {}
        for span in self.spans:
            if span.source is not None:
                found[span.source] = found.get(span.source, 0) + span.tokens
        return found

    @property
    def computed(self) -> dict[str, int]:
        """Computed tokens by reason."""
        found: dict[str, int] = {}
        for span in self.spans:
            if span.reason is not None:
                found[span.reason] = found.get(span.reason, 0) + span.tokens
        return found


@dataclass(frozen=True, slots=True)
class Cause:
    """Computed tokens of several requests with equal reason, tenant and place of divergence.

    ``share`` is of all computed tokens; ``example`` the id of the request with most of them.
    ``tenants`` is their number: a cause that more than three have is one cause, with ``tenant``
    None. ``advice`` is what an operator can do against it; None: nothing.
    """

    reason: str
    tokens: int
    share: float
    requests: int
    tenant: str | None
    position: int | None
    example: str
    sentence: str
    tenants: int = 1
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class ExplainSummary:
    """Tokens that the last ``requests`` reused and computed, and the causes of computed ones.

    Causes with advice come first, those of most tokens at the front; then those without, by
    reason, and tokens that were never seen before last.
    """

    requests: int
    prompt_tokens: int
    reused: dict[str, int]
    computed: dict[str, int]
    causes: tuple[Cause, ...]


def around(evidence: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the text around the first differing token, of both prompts.

    ``given_text`` is that of the prompt, ``cached_text`` that of the cached prompt; ``at_given``
    and ``at_cached`` are the positions of the first differing token in them, in characters. Empty
    if the evidence has no tokens (its reason is not "diverged", or they were left out).
    """
    if "given" not in evidence or "cached" not in evidence:
        return {}
    before = min(BEFORE, int(evidence["position"]))
    found: dict[str, Any] = {}
    for name in ("given", "cached"):
        tokens = evidence[name]
        text, head = decode(tokens), decode(tokens[:before])
        found[f"{name}_text"] = text
        # A character may begin in one token and end in the next: it is part of the difference.
        found[f"at_{name}"] = _same(text, head)
    return found


def _same(text: str, head: str) -> int:
    """Return how many leading characters are equal."""
    for at, (one, other) in enumerate(zip(text, head, strict=False)):
        if one != other:
            return at
    return min(len(text), len(head))
