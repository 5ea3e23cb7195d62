"""Causes shared by the last requests, in the order to look at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.observe.explain.sentences import cause_sentence
from kvkeep.observe.explain.spans import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvkeep.observe.explain.history import Record
    from kvkeep.observe.explain.spans import Span

__all__ = ["Cause", "ExplainSummary", "advice", "summarise"]


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


_EVICTED: Final = {
    "pressure": "Give the pool more memory, or the store another tier, or pin the prefix.",
    "asked": "Somebody had it evicted: pin prefixes that are to stay.",
    "cleared": "The cache was cleared; it fills again by itself.",
    "dropped": "Its request gave it up; it is kept once a request computes it to its end.",
}
_NOT_ADMITTED: Final = {
    "reuse_off": "Start the server without --no-reuse.",
    "store_false": "Requests had store: false; leave that out where prompts come again.",
    "answer": "Store answers as well, if later prompts contain them.",
    "admission": "The tier takes blocks used more often; --tiering inclusive writes all at once.",
    "lossy": "The tier takes exact KV only: use one kind of codec in all tiers.",
    "queue_full": "Writes were dropped: use a faster tier, or give memory more bytes.",
    "no_room": "Give the tier more room (size=).",
    "write_failed": "Look at the tier's errors: writes failed.",
    "given_up": "Requests ended before they published it; give clients more time.",
}
_UNAVAILABLE: Final = {
    "breaker": "Look at the tier: it failed, and is left alone until it answers again.",
    "late": "Use a faster tier, or give loads more time (--load-timeout).",
    "error": "Look at the tier's errors: reads failed.",
}


def advice(reason: str, evidence: Mapping[str, Any]) -> str | None:
    """Return what to do against tokens that were computed for ``reason``; None: nothing.

    ``reason`` is one of `REASONS`; ``evidence`` is that of a span with it.
    """
    why = evidence.get("why") or ""
    match reason:
        case "diverged":
            return "Move what changes (a time, names, ids, the order of tools) behind what stays."
        case "evicted":
            return _EVICTED.get(evidence.get("cause") or "", _EVICTED["pressure"])
        case "not_admitted":
            return _NOT_ADMITTED.get(why)
        case "other_namespace":
            return "Use one cache_salt for users who may share."
        case "tier_unavailable":
            return _UNAVAILABLE.get(why, _UNAVAILABLE["error"])
        case "damaged":
            return "Look at the disk if it happens again: records failed their checksum."
        case _:
            return None


_MOST_TENANTS: Final = 3  # that each have a cause of their own


class _What(NamedTuple):
    """What makes spans of one request, and requests of one tenant, one cause."""

    reason: str
    detail: str
    position: int | None
    public: bool

    @classmethod
    def of(cls, reason: str, evidence: Mapping[str, Any]) -> _What:
        detail = evidence.get("why") or evidence.get("cause") or ""
        return cls(reason, str(detail), evidence.get("position"), "public" in evidence)


@dataclass(slots=True)
class _Group:
    """Spans of several requests with the same cause."""

    tokens: int = 0
    requests: int = 0
    most: int = 0
    example: str = ""
    evidence: Mapping[str, Any] | None = None
    tenants: int = 1

    def add(self, record: Record, tokens: int, evidence: Mapping[str, Any]) -> None:
        self.tokens += tokens
        self.requests += 1
        if tokens > self.most:
            self.most, self.example, self.evidence = tokens, record.id, evidence

    def merge(self, other: _Group) -> None:
        self.tokens += other.tokens
        self.requests += other.requests
        self.tenants += other.tenants
        if other.most > self.most:
            self.most, self.example, self.evidence = other.most, other.example, other.evidence


def summarise(records: Iterable[Record]) -> ExplainSummary:
    """Sum up these requests. Cost: one pass over their spans."""
    groups: dict[_What, dict[str | None, _Group]] = {}
    reused: dict[str, int] = {}
    computed: dict[str, int] = {}
    requests = prompt_tokens = 0
    for record in records:
        requests += 1
        prompt_tokens += record.tokens
        of_one: dict[_What, list[Span]] = {}
        for span in record.spans:
            if span.source is not None:
                reused[span.source] = reused.get(span.source, 0) + span.tokens
            elif span.reason is not None:
                computed[span.reason] = computed.get(span.reason, 0) + span.tokens
                of_one.setdefault(_What.of(span.reason, span.evidence), []).append(span)
        for what, spans in of_one.items():
            longest = max(spans, key=lambda span: span.tokens)
            total = sum(span.tokens for span in spans)
            tenants = groups.setdefault(what, {})
            tenants.setdefault(record.namespace.tenant, _Group()).add(
                record, total, longest.evidence
            )
    total = sum(computed.values())
    causes = [
        _cause(what.reason, what.position, tenant, group, total)
        for what, tenants in groups.items()
        for tenant, group in _merged(tenants).items()
    ]
    return ExplainSummary(requests, prompt_tokens, reused, computed, _in_order(causes))


def _in_order(causes: list[Cause]) -> tuple[Cause, ...]:
    """Return causes with advice, those of most tokens first, then those without, by reason.

    The latter are as they should be; their reasons are ranked by tokens, but ``new`` is last.
    """
    as_it_should_be: dict[str, int] = {}
    for cause in causes:
        if cause.advice is None:
            tokens = as_it_should_be.get(cause.reason, 0)
            as_it_should_be[cause.reason] = tokens + cause.tokens

    def rank(cause: Cause) -> tuple[bool, bool, int, int, int]:
        done = cause.advice is None
        of_reason = as_it_should_be[cause.reason] if done else 0
        place = REASONS.index(cause.reason)
        return done, done and cause.reason == "new", -of_reason, -cause.tokens, place

    return tuple(sorted(causes, key=rank))


def _merged(tenants: dict[str | None, _Group]) -> dict[str | None, _Group]:
    """Return the groups by tenant; those of many tenants as one, of None."""
    if len(tenants) <= _MOST_TENANTS:
        return tenants
    whole, *others = tenants.values()
    for other in others:
        whole.merge(other)
    return {None: whole}


def _cause(
    reason: str, position: int | None, tenant: str | None, group: _Group, total: int
) -> Cause:
    share = group.tokens / total
    evidence = group.evidence or {}
    return Cause(
        reason=reason,
        tokens=group.tokens,
        share=share,
        requests=group.requests,
        tenant=tenant,
        position=position,
        example=group.example,
        sentence=cause_sentence(reason, share, tenant, evidence, tenants=group.tenants),
        tenants=group.tenants,
        advice=advice(reason, evidence),
    )
