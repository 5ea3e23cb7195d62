"""Causes shared by the last requests, in the order in which an operator looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.observe.explain.advice import advice
from kvkeep.observe.explain.answer import REASONS, Cause, ExplainSummary
from kvkeep.observe.explain.sentences import cause_sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvkeep.observe.explain.answer import Span
    from kvkeep.observe.explain.explained import ExplainedRequest

__all__ = ["add_up", "summarise"]

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

    def add(self, record: ExplainedRequest, tokens: int, evidence: Mapping[str, Any]) -> None:
        self.tokens += tokens
        self.requests += 1
        if tokens > self.most:
            self.most, self.example, self.evidence = tokens, record.requester.id, evidence

    def merge(self, other: _Group) -> None:
        self.tokens += other.tokens
        self.requests += other.requests
        self.tenants += other.tenants
        if other.most > self.most:
            self.most, self.example, self.evidence = other.most, other.example, other.evidence


def add_up(spans: Iterable[Span], reused: dict[str, int], computed: dict[str, int]) -> None:
    """Add the tokens of ``spans`` to both counts."""
    for span in spans:
        if span.source is not None:
            reused[span.source] = reused.get(span.source, 0) + span.tokens
        elif span.reason is not None:
            computed[span.reason] = computed.get(span.reason, 0) + span.tokens


def summarise(records: Iterable[ExplainedRequest]) -> ExplainSummary:
    """Sum up these requests. Cost: one pass over their spans."""
    groups: dict[_What, dict[str | None, _Group]] = {}
    reused: dict[str, int] = {}
    computed: dict[str, int] = {}
    requests = prompt_tokens = 0
    for record in records:
        requests += 1
        prompt_tokens += record.tokens
        add_up(record.spans, reused, computed)
        of_one: dict[_What, list[Span]] = {}
        for span in record.spans:
            if span.reason is not None:
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
