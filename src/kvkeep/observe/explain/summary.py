"""`ExplainedRequest`, and causes shared by the last requests, in the order to look at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.observe.explain.answer import (
    REASONS,
    Cause,
    ExplainSummary,
    Explanation,
    Missing,
    Span,
    covering,
    of_public,
    painted,
    with_last_token,
)
from kvkeep.observe.explain.reasons import evicted
from kvkeep.observe.explain.sentences import cause_sentence, sentence_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.observe.explain.ledger import Requester

__all__ = ["ExplainedRequest", "add_up", "advice", "summarise"]

# Reasons that a store's report replaces: the store is looked up after the pool.
_STORE_KNOWS = frozenset({"new", "diverged", "evicted", "not_admitted"})


@dataclass(slots=True, eq=False)
class ExplainedRequest:
    """One request: ``judged`` are the spans of its prompt when it was opened.

    The first ``public`` tokens of the prompt are a public prefix.
    """

    requester: Requester
    at: float
    namespace: Namespace
    kind: str
    session: str | None
    tokens: int
    judged: list[Span]
    public: int = 0
    spans: tuple[Span, ...] = ()
    generated: int | None = None
    ttft_s: float | None = None
    seconds: float | None = None

    def settle(self, sources: Sequence[tuple[int, int, str]], missing: Sequence[Missing]) -> None:
        """Set the spans from ``judged``, tokens loaded from a store, and its reasons for others."""
        spans = self.judged
        for one in missing:
            evidence = self._evidence(one)
            spans = painted(
                spans, Span(one.start, one.stop, None, one.reason, evidence), _STORE_KNOWS
            )
        for start, stop, tier in sources:
            # The last token is always computed.
            given = Span(start, min(stop, self.tokens - 1), tier, None)
            spans = painted(spans, given, {span.reason for span in spans} - {None})
        spans = with_last_token(spans, self.tokens)
        self.spans = covering(of_public(spans, self.public), self.tokens)

    def _evidence(self, one: Missing) -> dict[str, Any]:
        """Return the store's evidence, complete with the fields of its reason."""
        said = dict(one.evidence)
        tier = said.get("tier")
        if one.reason == "evicted":
            whole = evicted(said.get("at"), self.at, tier=tier or "", policy=None, cause="pressure")
            return whole | {"evictions": 1} | said
        if one.reason == "not_admitted":
            return {"why": "unknown", "tier": None} | said
        if one.reason == "not_loaded":
            return {"tier": None, "why": "expected", "load_s": None, "compute_s": None} | said
        if one.reason == "tier_unavailable":
            return {"tier": None, "why": "error", "waited_s": None} | said
        return {"tier": None} | said

    def explanation(self) -> Explanation:
        """Return the explanation, as far as known now."""
        requester = self.requester
        return Explanation(
            id=requester.id,
            at=self.at,
            namespace=self.namespace,
            kind=self.kind,
            session=self.session,
            prompt_tokens=self.tokens,
            spans=self.spans,
            generated_tokens=self.generated,
            ttft_s=self.ttft_s,
            seconds=self.seconds,
            outcome=None if requester.running else requester.outcome,
            sentence=sentence_of(self.spans, self.tokens),
        )


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
_NOT_RESUMABLE: Final = {
    "evicted": "Give the pool more memory, or pin the prefix: the state was evicted.",
    "no_room": "Give the pool more memory: there was no room for the state.",
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
        case "not_resumable":
            return _NOT_RESUMABLE.get(why)
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
