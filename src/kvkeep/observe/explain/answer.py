"""What an explanation is made of: spans of a prompt, each reused, or computed for one reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    "Totals",
    "around",
]

REASONS = (
    "new",
    "diverged",
    "evicted",
    "not_admitted",
    "other_namespace",
    "page_remainder",
    "computing",
    "tier_unavailable",
    "damaged",
    "last_token",
)
"""Why a token was computed. Every computed token has exactly one of these."""
STORE_REASONS = frozenset({"evicted", "not_admitted", "tier_unavailable", "damaged"})
"""What a store can say of tokens that it did not give."""
BEFORE, BEHIND = 8, 16
"""So many tokens before the first differing one are shown, and so many from it on."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` … ``stop`` (exclusive) of a prompt, which fared alike.

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
        """How many tokens it covers."""
        return self.stop - self.start

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "start": self.start,
            "stop": self.stop,
            "source": self.source,
            "reason": self.reason,
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """What a store says of tokens that it did not give: why not.

    ``reason``: "evicted", "not_admitted", "tier_unavailable" or "damaged"; else `InvalidValue`.
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
    """What became of one request's prompt, token by token.

    ``at`` is unix seconds, ``kind`` the endpoint. What is known only at the end of a request is
    None before. ``spans`` cover the prompt from 0 to ``prompt_tokens``, in order, without gaps.
    ``sentence`` tells the main reason in plain words; it quotes names with everything that is
    not printable escaped.
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
        """Source → tokens that came from there."""
        found: dict[str, int] = {}
        for span in self.spans:
            if span.source is not None:
                found[span.source] = found.get(span.source, 0) + span.tokens
        return found

    @property
    def computed(self) -> dict[str, int]:
        """Reason → tokens that were computed for it."""
        found: dict[str, int] = {}
        for span in self.spans:
            if span.reason is not None:
                found[span.reason] = found.get(span.reason, 0) + span.tokens
        return found

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "id": self.id,
            "at": self.at,
            "cache_salt": self.namespace.tenant,
            "endpoint": self.kind,
            "session": self.session,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
            "outcome": self.outcome,
            "reused": self.reused,
            "computed": self.computed,
            "spans": [span.as_dict() for span in self.spans],
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True)
class Cause:
    """Computed tokens of several requests that share reason, tenant and place of divergence.

    ``share`` is of all computed tokens; ``example`` the id of the request that it cost most.
    """

    reason: str
    tokens: int
    share: float
    requests: int
    tenant: str | None
    position: int | None
    example: str
    sentence: str


@dataclass(frozen=True, slots=True)
class ExplainSummary:
    """What the last ``requests`` reused and computed, and the causes, ranked by tokens."""

    requests: int
    prompt_tokens: int
    reused: dict[str, int]
    computed: dict[str, int]
    causes: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """What all requests of one namespace reused and computed since the beginning."""

    namespace: Namespace
    requests: int
    prompt_tokens: int
    reused: dict[str, int]
    computed: dict[str, int]


def around(evidence: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """The text around the first differing token, of both prompts.

    ``given_text`` is the prompt's, ``cached_text`` the cached one's; ``at_given`` and
    ``at_cached`` are where the first differing token begins in them, in characters. Empty when
    the evidence has no tokens (it is not of "diverged", or they were left out).
    """
    if "given" not in evidence or "cached" not in evidence:
        return {}
    before = min(BEFORE, int(evidence["position"]))
    found: dict[str, Any] = {}
    for name in ("given", "cached"):
        tokens = evidence[name]
        text, head = decode(tokens), decode(tokens[:before])
        found[f"{name}_text"] = text
        # A character may begin in one token and end in the next: it belongs to what differs.
        found[f"at_{name}"] = _same(text, head)
    return found


def _same(text: str, head: str) -> int:
    """How many leading characters are the same."""
    for at, (one, other) in enumerate(zip(text, head, strict=False)):
        if one != other:
            return at
    return min(len(text), len(head))
