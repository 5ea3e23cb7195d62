"""`ExplainedRequest`: the record that an explainer keeps of one request, and its explanation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain.answer import (
    Explanation,
    Missing,
    Span,
    covering,
    of_public,
    painted,
    with_last_token,
)
from kvkeep.observe.explain.reasons import evicted
from kvkeep.observe.explain.sentences import sentence_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.observe.explain.ledger import Requester

__all__ = ["ExplainedRequest"]

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
