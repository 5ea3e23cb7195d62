"""Causes shared by the last requests, in the order to look at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.observe.explain.sentences import cause_sentence
from kvkeep.observe.explain.spans import BEFORE, REASONS

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

    Prompts that "diverged" do so at the same place if the tokens before it are the same, or those
    that one of two prompts has and the other has not. ``position`` is None if such prompts differ
    at several positions. ``difference`` is the evidence of the example, for `around`: the text that
    breaks the prefix. ``tokens_per_hour`` is what a cause costs, since the first of the requests.
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
    tokens_per_hour: float = 0.0
    difference: Mapping[str, Any] | None = None


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


# By reason, and by what its evidence says: "why", or the cause of an eviction. "" is for all other.
_ADVICE: Final[Mapping[str, Mapping[str, str]]] = {
    "diverged": {
        "": "Move what changes (a time, names, ids, the order of tools) behind what stays."
    },
    "evicted": {
        "": "Give the pool more memory, or the store another tier, or pin the prefix.",
        "asked": "Somebody had it evicted: pin prefixes that are to stay.",
        "cleared": "The cache was cleared; it fills again by itself.",
        "dropped": "Its request gave it up; it is kept once a request computes it to its end.",
    },
    "not_admitted": {
        "reuse_off": "Start the server without --no-reuse.",
        "store_false": "Requests had store: false; leave that out where prompts come again.",
        "answer": "Store answers as well, if later prompts contain them.",
        "admission": "The tier takes blocks used more often; --tiering inclusive takes all.",
        "lossy": "The tier takes exact KV only: use one kind of codec in all tiers.",
        "queue_full": "Writes were dropped: use a faster tier, or give memory more bytes.",
        "no_room": "Give the tier more room (size=).",
        "write_failed": "Look at the tier's errors: writes failed.",
        "given_up": "Requests ended before they published it; give clients more time.",
    },
    "other_namespace": {"": "Use one cache_salt for users who may share."},
    "tier_unavailable": {
        "": "Look at the tier's errors: reads failed.",
        "breaker": "Look at the tier: it failed, and is left alone until it answers again.",
        "late": "Use a faster tier, or give loads more time (--load-timeout).",
    },
    "damaged": {"": "Look at the disk if it happens again: records failed their checksum."},
}


def advice(reason: str, evidence: Mapping[str, Any]) -> str | None:
    """Return what to do against tokens that were computed for ``reason``; None: nothing.

    ``reason`` is one of `REASONS`; ``evidence`` is that of a span with it.
    """
    texts = _ADVICE.get(reason, {})
    return texts.get(evidence.get("why") or evidence.get("cause") or "", texts.get(""))


_MOST_TENANTS: Final = 3  # that each have a cause of their own


class _Places:
    """Numbers the places where prompts diverge; equal ones have the same number.

    The tokens before a place are compared, and those from it on: `_CONTEXT` of each. Values that
    change may begin in the same way, so a place may lie `_SHIFT` tokens behind another.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def number(self, evidence: Mapping[str, Any]) -> int:
        """Return the number of the place of a difference."""
        given, cached = evidence["given"], evidence["cached"]
        at = min(BEFORE, evidence["position"])
        before = (*(BEFORE - at) * [-1], *given[:at])
        last = BEFORE - _CONTEXT
        ends = [before[start : start + _CONTEXT] for start in range(last - _SHIFT, last + 1)]
        texts = [("text", tuple(side[at : at + BEFORE])) for side in (given, cached)]
        # Of two places that are the same, the end of one is among the shifted ends of the other.
        known = [("end", end) for end in ends] + [("shifted", ends[-1]), *texts]
        number = next((self._numbers[key] for key in known if key in self._numbers), None)
        if number is None:
            number = len(self._numbers)
        for key in (("end", ends[-1]), *(("shifted", end) for end in ends), *texts):
            self._numbers.setdefault(key, number)
        return number


_CONTEXT: Final = 6
_SHIFT: Final = BEFORE - _CONTEXT


class _What(NamedTuple):
    """What makes spans of one request, and requests of one tenant, one cause."""

    reason: str
    detail: str
    place: int | None
    public: bool


@dataclass(slots=True)
class _Group:
    """Spans of several requests with the same cause."""

    tokens: int = 0
    requests: int = 0
    most: int = 0
    example: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    positions: set[int] = field(default_factory=set)
    tenants: int = 1

    def add(self, record: Record, tokens: int, evidence: Mapping[str, Any]) -> None:
        self.tokens += tokens
        self.requests += 1
        if "position" in evidence:
            self.positions.add(evidence["position"])
        if tokens > self.most:
            self.most, self.example, self.evidence = tokens, record.id, evidence

    def merge(self, other: _Group) -> None:
        self.tokens += other.tokens
        self.requests += other.requests
        self.tenants += other.tenants
        self.positions |= other.positions
        if other.most > self.most:
            self.most, self.example, self.evidence = other.most, other.example, other.evidence

    @property
    def position(self) -> int | None:
        """Where the example differs; None if others do so elsewhere."""
        if not self.positions or max(self.positions) - min(self.positions) > _SHIFT:
            return None
        return int(self.evidence["position"])


_LEAST_S: Final = 60.0


def summarise(records: Iterable[Record], now: float) -> ExplainSummary:
    """Sum up these requests at time ``now``. Cost: one pass over their spans."""
    groups: dict[_What, dict[str | None, _Group]] = {}
    reused: dict[str, int] = {}
    computed: dict[str, int] = {}
    requests = prompt_tokens = 0
    places, oldest = _Places(), now
    for record in records:
        requests += 1
        prompt_tokens += record.tokens
        oldest = min(oldest, record.at)
        place: int | None = None
        of_one: dict[_What, list[Span]] = {}
        for span in record.spans:
            if span.source is not None:
                reused[span.source] = reused.get(span.source, 0) + span.tokens
            elif span.reason is not None:
                computed[span.reason] = computed.get(span.reason, 0) + span.tokens
                diverged = span.reason == "diverged"
                if diverged and place is None:
                    place = places.number(span.evidence)
                detail = span.evidence.get("why") or span.evidence.get("cause") or ""
                what = _What(
                    span.reason, detail, place if diverged else None, "public" in span.evidence
                )
                of_one.setdefault(what, []).append(span)
        for what, spans in of_one.items():
            longest = max(spans, key=lambda span: span.tokens)
            total = sum(span.tokens for span in spans)
            tenants = groups.setdefault(what, {})
            tenants.setdefault(record.namespace.tenant, _Group()).add(
                record, total, longest.evidence
            )
    total = sum(computed.values())
    hours = max(now - oldest, _LEAST_S) / 3600
    causes = [
        _cause(what.reason, tenant, group, total, hours)
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


def _cause(reason: str, tenant: str | None, group: _Group, total: int, hours: float) -> Cause:
    share, evidence, position = group.tokens / total, group.evidence, group.position
    said = cause_sentence(
        reason, share, tenant, {**evidence, "position": position}, tenants=group.tenants
    )
    return Cause(
        reason=reason,
        tokens=group.tokens,
        share=share,
        requests=group.requests,
        tenant=tenant,
        position=position,
        example=group.example,
        sentence=said,
        tenants=group.tenants,
        advice=advice(reason, evidence),
        tokens_per_hour=group.tokens / hours,
        difference=evidence if reason == "diverged" else None,
    )
