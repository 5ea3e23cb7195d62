"""Why tokens of a prompt are computed: what pool and store told at the miss, as spans."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain.history import difference
from kvkeep.observe.explain.spans import Span, painted

if TYPE_CHECKING:
    from kvkeep.core.events import PrefixMiss
    from kvkeep.core.groups import GroupLayout
    from kvkeep.core.keys import Namespace
    from kvkeep.observe.explain.history import History, Record
    from kvkeep.store import Miss

__all__ = ["STORE_KNOWS", "PoolReasons", "of_store"]

STORE_KNOWS = frozenset({"new", "diverged", "evicted", "not_admitted"})
"""Reasons of the pool that those of a store replace: it was the last place that could have it."""
_BY_POLICY = frozenset({"pressure", "asked"})


class PoolReasons:
    """Makes spans of what the pool told when a prompt was opened.

    The pool gives one reason for all tokens from the miss on. Recent prompts say how far it goes,
    and more of tokens that the pool has not seen: that another request had them and did not publish
    them, that they are those of another namespace, or those behind a difference.

    Thread safety: none.
    """

    def __init__(
        self,
        history: History,
        page_size: int,
        policy: str,
        groups: GroupLayout | None,
        *,
        reuse: bool,
    ) -> None:
        self._history = history
        self._size = page_size
        self._policy = policy
        self._groups = groups
        self._reuse = reuse

    def spans(
        self, record: Record, miss: PrefixMiss | None, other: Record | None, offset: float
    ) -> list[Span]:
        """Return the spans of a prepared record that missed so; None: all of it is cached.

        ``other`` is the request that computes the same. ``offset`` plus a time of the cache's clock
        is unix seconds.
        """
        last, size = record.tokens - 1, self._size
        start = last if miss is None else min(miss.token, last)
        spans = [Span(0, start, "pool", None)] if start else []
        if miss is None or start == last:
            return [*spans, Span(start, record.tokens, None, "last_token")]
        similar = self._history.similar(record)
        seen = max((record.common(before) for before in similar), default=0)
        reason, evidence, stop = "new", dict[str, Any](), record.tokens
        match miss.cause:
            case "evicted":
                at = None if miss.at is None else miss.at + offset
                policy = self._policy if miss.by in _BY_POLICY else None
                reason, evidence = "evicted", evicted(at, record.at, "pool", policy, miss.by)
                stop = self._reach(record, similar)
                stop = (
                    max((stop if stop > start else record.tokens) // size, start // size + 1) * size
                )
            case "computing":
                reason, evidence = "computing", {"by": None if other is None else other.id}
                stop = 0 if other is None else record.common(other)
            case "no state":
                reason, evidence = "not_resumable", self._unresumed(miss)
                stop = miss.until // size * size
            case "elsewhere":
                assert miss.namespace is not None
                reason, evidence = "other_namespace", _fields(record.namespace, miss.namespace)
                stop = record.tokens // size * size
            case "part of a page":
                reason, evidence = "page_remainder", {"page_size": size}
        if not start < stop <= record.tokens:
            stop = record.tokens
        spans.append(Span(start, stop, None, reason, evidence))
        if reason == "new":
            spans = self._unseen(record, similar, spans, start)
        elif stop < record.tokens:
            spans.append(Span(stop, record.tokens, None, "new"))
        part = Span(
            max(start, seen // size * size), seen, None, "page_remainder", {"page_size": size}
        )
        return painted(spans, [part], {"new"})

    @staticmethod
    def _reach(record: Record, similar: list[Record]) -> int:
        """Return how far the prompt equals a recent one with its answer."""
        reach = 0
        for before in similar:
            common = record.common(before)
            if common == before.tokens:
                common += before.generated or 0
            reach = max(reach, common)
        return min(reach, record.tokens)

    def _unresumed(self, miss: PrefixMiss) -> dict[str, Any]:
        groups, size = self._groups, self._size
        window = groups is not None and groups.state is None
        why = "window" if window else "state"
        if (
            groups is not None
            and not window
            and groups.floor(miss.until // size) * size <= miss.token
        ):
            why = "grid"
        return {
            "group": "window" if window else "state",
            "stored": miss.until // size * size,
            "nearest": miss.token,
            "why": why,
            "grid": None if groups is None else groups.grid * size,
        }

    def _unseen(
        self, record: Record, similar: list[Record], spans: list[Span], start: int
    ) -> list[Span]:
        """Say more of tokens from ``start`` on, which the pool has not seen."""
        new, size = frozenset({"new"}), self._size
        before = max(similar, key=record.common, default=None)
        common = 0 if before is None else record.common(before)
        unit = size if self._reuse else 1  # of what is stored
        if before is not None and common >= start + unit:
            stop = common // unit * unit
            return painted(spans, [self._lost(before, start, stop)], new)
        elsewhere = self._history.similar(record, elsewhere=True)
        theirs = [one for one in elsewhere if one.store and one.outcome in {None, "done"}]
        nearest = max(theirs, key=record.common, default=None)
        stop = 0 if nearest is None else record.common(nearest) // size * size
        if nearest is not None and stop >= start + size:
            evidence = _fields(record.namespace, nearest.namespace)
            return painted(spans, [Span(start, stop, None, "other_namespace", evidence)], new)
        found = difference(record, similar, start)
        if found is None:
            return spans
        evidence = {**found.evidence, "would_reuse": found.tokens}
        same = [Span(first, end, None, "diverged", evidence) for first, end in found.stretches]
        return painted(spans, same, new)

    def _lost(self, before: Record, start: int, stop: int) -> Span:
        """Return why tokens that a recent request had are not there."""
        if not self._reuse:
            why = "reuse_off"
        elif not before.store:
            why = "store_false"
        elif before.outcome in {None, "done"}:
            return Span(start, stop, None, "evicted", evicted(None, 0.0, "pool", None, "unknown"))
        else:
            why = "given_up"
        return Span(start, stop, None, "not_admitted", {"why": why, "tier": None})


def _fields(ours: Namespace, theirs: Namespace) -> dict[str, Any]:
    """Return the fields that differ, each with both values."""
    pairs = ((one.name, getattr(ours, one.name), getattr(theirs, one.name)) for one in fields(ours))
    return {"fields": {name: [here, there] for name, here, there in pairs if here != there}}


def evicted(
    at: float | None, now: float, tier: str | None, policy: str | None, cause: str
) -> dict[str, Any]:
    """Return the evidence of an eviction at ``at``, in unix seconds."""
    ago = None if at is None else max(0.0, now - at)
    return {"at": at, "ago_s": ago, "policy": policy, "cause": cause, "tier": tier}


_REMOVED = {"cleared": "cleared", "removed": "asked"}
_REFUSED = frozenset({"admission", "answer", "lossy", "unread"})


def of_store(miss: Miss, now: float, waited_s: float) -> Span | None:
    """Return what a store told of tokens as a span; None of tokens that it never had.

    ``waited_s`` is how long the request waited for the store.
    """
    word, tier = miss.detail.partition(": ")[0], miss.tier or None
    evidence: dict[str, Any] = {"tier": tier}
    match miss.what:
        case "never":
            return None
        case "evicted":
            reason, evidence = "evicted", evicted(miss.at, now, tier, word, "pressure")
        case "removed":
            reason = "evicted"
            evidence = evicted(miss.at, now, tier, None, _REMOVED.get(word, word))
        case "dropped":
            reason = "not_admitted"
            evidence["why"] = "queue_full" if word == "no time" else word.replace(" ", "_")
        case "refused":
            reason, evidence["why"] = "not_admitted", word if word in _REFUSED else "unknown"
        case "slower":
            reason = "not_loaded"
            evidence |= {"why": word, "load_s": miss.load_s, "compute_s": miss.compute_s}
        case "damaged":
            reason = "damaged"
        case _:
            late = "late" if miss.what == "late" else "error"
            why = "breaker" if word == "breaker" else late
            reason, evidence = "tier_unavailable", evidence | {"why": why, "waited_s": waited_s}
    return Span(miss.start, miss.stop, None, reason, evidence)
