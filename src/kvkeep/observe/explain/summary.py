"""Causes shared by the last requests, ranked by computed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain.answer import Cause, ExplainSummary
from kvkeep.observe.explain.sentences import cause_sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvkeep.observe.explain.answer import Span
    from kvkeep.observe.explain.explained import ExplainedRequest

__all__ = ["add_up", "summarise"]


@dataclass(slots=True)
class _Group:
    """Spans of several requests with the same cause."""

    tokens: int = 0
    requests: int = 0
    most: int = 0
    example: str = ""
    evidence: Mapping[str, Any] | None = None

    def add(self, record: ExplainedRequest, tokens: int, evidence: Mapping[str, Any]) -> None:
        self.tokens += tokens
        self.requests += 1
        if tokens > self.most:
            self.most, self.example, self.evidence = tokens, record.requester.id, evidence


def add_up(spans: Iterable[Span], reused: dict[str, int], computed: dict[str, int]) -> None:
    """Add the tokens of ``spans`` to both counts."""
    for span in spans:
        if span.source is not None:
            reused[span.source] = reused.get(span.source, 0) + span.tokens
        elif span.reason is not None:
            computed[span.reason] = computed.get(span.reason, 0) + span.tokens


def summarise(records: Iterable[ExplainedRequest]) -> ExplainSummary:
    """Sum up these requests. Cost: one pass over their spans."""
    groups: dict[tuple[str, str, int | None, bool], _Group] = {}
    reused: dict[str, int] = {}
    computed: dict[str, int] = {}
    requests = prompt_tokens = 0
    for record in records:
        requests += 1
        prompt_tokens += record.tokens
        add_up(record.spans, reused, computed)
        of_one: dict[tuple[str, int | None, bool], list[Span]] = {}
        for span in record.spans:
            if span.reason is not None:
                position, public = span.evidence.get("position"), "public" in span.evidence
                of_one.setdefault((span.reason, position, public), []).append(span)
        for (reason, position, public), spans in of_one.items():
            key = (reason, record.namespace.tenant, position, public)
            longest = max(spans, key=lambda span: span.tokens)
            total = sum(span.tokens for span in spans)
            groups.setdefault(key, _Group()).add(record, total, longest.evidence)
    total = sum(computed.values())
    ranked = sorted(groups.items(), key=lambda item: -item[1].tokens)
    causes = tuple(_cause(*key[:3], group, total) for key, group in ranked)
    return ExplainSummary(requests, prompt_tokens, reused, computed, causes)


def _cause(reason: str, tenant: str, position: int | None, group: _Group, total: int) -> Cause:
    share = group.tokens / total
    return Cause(
        reason=reason,
        tokens=group.tokens,
        share=share,
        requests=group.requests,
        tenant=tenant,
        position=position,
        example=group.example,
        sentence=cause_sentence(reason, share, tenant, group.evidence or {}),
    )
