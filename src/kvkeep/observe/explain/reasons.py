"""`Reasons`: finds why tokens of a prompt are computed and not reused from the pool."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.answer import BEFORE, BEHIND, Span, painted
from kvkeep.observe.explain.ledger import Eviction, Requester
from kvkeep.observe.explain.nearest import GRAM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.groups import GroupLayout
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.ledger import NamespaceUnits, Rows, UnitLedger, UnitState
    from kvkeep.observe.explain.nearest import Nearest, PromptHistory, SeenPrompt

__all__ = ["QueriedPrompt", "Reasons", "evicted"]

_NEW, _REMAINDER, _UNRESUMED = "new", "page_remainder", "not_resumable"
_NEAR = 4
_SPACES = 16
_POLICY_CAUSES = frozenset({"pressure", "asked"})
"""Causes of evictions in which the policy chose the pages."""


@dataclass(frozen=True, slots=True, eq=False)
class QueriedPrompt:
    """A prompt looked up at time ``at``: ``cached`` leading tokens came from the pool.

    ``stored`` leading tokens have their KV there, more if a request could not resume behind them.
    ``space`` is None for an unknown namespace, ``rows`` are those of its full units. ``opened`` is
    the number of the event that opened its sequence, None if unknown.
    """

    prompt: SeenPrompt
    space: NamespaceUnits | None
    rows: Rows
    cached: int
    at: float
    opened: int | None
    sequence: int | None
    stored: int

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.prompt.id

    @property
    def tokens(self) -> TokenArray:
        """The tokens of the prompt."""
        return self.prompt.tokens

    @property
    def names(self) -> list[bytes]:
        """The names of its full units."""
        return self.prompt.names


@dataclass(frozen=True, slots=True, eq=False)
class _Late:
    """The unit was published after the prompt was looked up, by request ``by``."""

    by: str | None


Verdict = Requester | Eviction | _Late | str
"""Why a unit was not reused: the request that computes or computed it, its eviction, or a reason.
"""


class Reasons:
    """Finds the reasons in a `UnitLedger` and a `PromptHistory`; changes neither."""

    def __init__(
        self,
        ledger: UnitLedger,
        prompts: PromptHistory,
        policy: str,
        groups: GroupLayout | None = None,
    ) -> None:
        self._groups = groups
        self._ledger = ledger
        self._prompts = prompts
        self._policy = policy
        self._size = ledger.unit_tokens

    def spans(self, query: QueriedPrompt) -> list[Span]:
        """Return the spans of the prompt: tokens from the pool, then a reason for each other token.

        Cost: about 0.3 µs a missing unit, and comparisons with a few prompts if any unit is new.
        """
        spans = [Span(0, query.cached, "pool", None)] if query.cached else []
        rows = query.rows
        verdicts = self._verdicts(query)
        before = takewhile(lambda part: part[0] != _NEW, verdicts)
        known = query.cached // self._size + sum(units for _, units in before)
        spans += self._of_units(query, verdicts)
        spans += self._of_tail(query, query.space, _NEW)
        if spans[-1].reason == _NEW:
            spans = self._elsewhere(query, spans, known)
            spans = self._alike(query, spans, rows[:known], known)
        return spans

    # --- full units --------------------------------------------------------------------------

    def contradicted(self, query: QueriedPrompt) -> Rows:
        """Return rows marked as cached that the lookup did not find: their eviction was lost."""
        first = max(query.cached, query.stored) // self._size
        if len(query.tokens) == (first + 1) * self._size:
            first += 1  # the last page is never reused whole: its last token is computed
        rows = query.rows[first:]
        if query.opened is None or not len(rows):
            return rows[:0]
        rows = rows[rows >= 0]
        return rows[(self._ledger.page[rows] >= 0) & (self._ledger.since[rows] <= query.opened)]

    def _verdicts(self, query: QueriedPrompt) -> list[tuple[Verdict, int]]:
        """Return verdicts on the units not wholly from the pool, each with its number of units."""
        ledger = self._ledger
        first = query.cached // self._size
        missing = query.rows[first:]
        if not len(missing):
            return []
        states = ledger.state[missing]
        states[missing < 0] = None
        there = (missing >= 0) & (ledger.page[missing] >= 0)
        late = there & (ledger.since[missing] > (0 if query.opened is None else query.opened))
        unresumed = max(0, query.stored // self._size - first)
        states[:unresumed] = None
        there[:unresumed], late[:unresumed] = False, False
        changes = (states[1:] != states[:-1]) | np.diff(there) | np.diff(late)
        if 0 < unresumed < len(missing):
            changes[unresumed - 1] = True
        if there[-1] and len(query.rows) * self._size == len(query.tokens):
            changes[-1:] = True  # the last page is judged separately
        begins = [0, *(np.flatnonzero(changes) + 1).tolist(), len(missing)]
        verdicts: list[tuple[Verdict, int]] = []
        for begin, end in pairwise(begins):
            state = states[begin]
            if begin < unresumed:
                verdicts.append((_UNRESUMED, end - begin))
            elif there[begin]:
                last = (first + end) * self._size == len(query.tokens)
                if last and not (late[begin] and query.opened is not None):
                    verdicts.append((_REMAINDER, 1))
                else:
                    verdicts.append((self._published(query, state), end - begin))
            elif missing[begin] < 0:
                verdicts.append((_NEW, end - begin))
            else:
                assert isinstance(state, (Requester, Eviction)), (
                    "a unit out of the cache has a state"
                )
                verdicts.append((state, end - begin))
        return verdicts

    @staticmethod
    def _published(query: QueriedPrompt, state: UnitState) -> Verdict:
        """Judge a unit published since the lookup: new if by this request, else late."""
        if isinstance(state, Requester):
            return _NEW if state.id == query.id else _Late(state.id)
        return _NEW if state is not None and state == query.sequence else _Late(None)

    def _of_units(
        self, query: QueriedPrompt, verdicts: list[tuple[Verdict, int]]
    ) -> Iterable[Span]:
        start = query.cached
        stop = query.cached // self._size * self._size
        for _, group in groupby(verdicts, lambda part: _group_of(part[0])):
            same = list(group)
            stop += sum(units for _, units in same) * self._size
            yield self._span(query, start, stop, [verdict for verdict, _ in same])
            start = stop

    def _span(self, query: QueriedPrompt, start: int, stop: int, verdicts: list[Verdict]) -> Span:
        """Return the span of units with verdicts of one group."""
        first = verdicts[0]
        evidence: dict[str, Any]
        if isinstance(first, Eviction):
            reason, evidence = "evicted", self._eviction(query, verdicts)
        elif isinstance(first, _Late):
            reason, evidence = "computing", {"by": first.by}
        elif isinstance(first, Requester):
            if first.running and first.store and first.reuse:
                reason, evidence = "computing", {"by": first.id}
            else:
                reason, evidence = "not_admitted", {"why": first.why_not, "tier": None}
        elif first == _REMAINDER:
            reason, evidence = first, {"page_size": self._size}
        elif first == _UNRESUMED:
            reason, evidence = first, self._unresumed(query)
        else:
            reason, evidence = first, {}
        return Span(start, stop, None, reason, evidence)

    def _eviction(self, query: QueriedPrompt, verdicts: Iterable[Verdict]) -> dict[str, Any]:
        """Return the evidence of the last of these evictions, and their number."""
        several = {id(one): one for one in verdicts if isinstance(one, Eviction)}
        last = max(several.values(), key=lambda one: one.at)
        policy = self._policy if last.cause in _POLICY_CAUSES else None
        return {
            **evicted(last.at, query.at, tier="pool", policy=policy, cause=last.cause),
            "by": last.by,
            "needed_pages": last.needed_pages,
            "evictions": len(several),
        }

    def _unresumed(self, query: QueriedPrompt) -> dict[str, Any]:
        """Return why a request could not resume where its KV ends, but earlier."""
        size, groups = self._size, self._groups
        first, stop = query.cached // size, query.stored // size
        said: dict[str, Any] = {
            "group": "window" if groups is not None and groups.state is None else "state",
            "stored": stop * size,
            "nearest": query.cached,
            "why": "never",
            "checkpoint": None,
            "at": None,
            "ago_s": None,
            "cause": None,
            "grid": None if groups is None else groups.grid * size,
        }
        if said["group"] == "window":
            return said | {"why": "window"}
        rows = query.rows[first:stop]
        points = [] if groups is None else self._ledger.point[rows].tolist()
        for at in range(len(points) - 1, -1, -1):
            point = points[at]
            if rows[at] < 0 or point is None:
                continue
            place = {"checkpoint": (first + at + 1) * size}
            if isinstance(point, Eviction):
                ago = max(0.0, query.at - point.at)
                gone = {"at": point.at, "ago_s": ago, "cause": point.cause}
                return said | place | {"why": "evicted"} | gone
            if query.opened is not None and point <= query.opened:
                return said | place | {"why": "no_room"}
        if groups is not None and groups.floor(stop) <= first:
            said["why"] = "grid"
        return said

    # --- the tail behind the last full unit --------------------------------------------------

    def _of_tail(
        self, query: QueriedPrompt, space: NamespaceUnits | None, reason: str
    ) -> list[Span]:
        """Return the span of the tail: tokens requested before, or ``reason``."""
        start = max(query.cached, len(query.names) * self._size)
        if start >= len(query.tokens):
            return []
        stop = len(query.tokens)
        assert query.prompt.tail is not None
        rows = [int(row) for row in self._ledger.find(space, [query.prompt.tail]) if row >= 0]
        if not rows:
            return [Span(start, stop, None, reason)]
        if not query.prompt.requester.reuse:
            return [self._span(query, start, stop, [query.prompt.requester])]
        gone = self._filled_and_gone(space, rows[0])
        if gone is not None and space is query.space:
            return [self._span(query, start, stop, [gone])]
        return [Span(start, stop, None, _REMAINDER, {"page_size": self._size})]

    def _filled_and_gone(self, space: NamespaceUnits | None, tail: int) -> Eviction | None:
        """Return the eviction of the full page that generated tokens made of a tail, if any."""
        requester = self._ledger.state[tail]
        if space is None or not isinstance(requester, Requester) or requester.tail is None:
            return None
        row = space.rows.get(requester.tail, -1)
        if row < 0 or self._ledger.page[row] >= 0:
            return None
        state = self._ledger.state[row]
        return state if isinstance(state, Eviction) else None

    # --- units new to the namespace ----------------------------------------------------------

    def _elsewhere(self, query: QueriedPrompt, spans: list[Span], known: int) -> list[Span]:
        """Mark the units from ``known`` on that another namespace has in the cache."""
        names, ours = query.names, query.prompt.namespace
        low, high = known, len(names)
        while low < high:  # a namespace that has a unit has all units before it
            middle = (low + high) // 2
            if self._ledger.holders(names[middle], ours):
                low = middle + 1
            else:
                high = middle
        if low == known:
            return spans
        others = self._ledger.holders(names[low - 1], ours, _SPACES)
        theirs = min(others, key=lambda space: len(_differing(ours, space.namespace)))
        span = Span(
            known * self._size,
            low * self._size,
            None,
            "other_namespace",
            {"fields": _differing(ours, theirs.namespace)},
        )
        spans = painted(spans, span, {_NEW})
        if low == len(names):
            for tail in self._of_tail(query, theirs, _NEW):
                spans = painted(spans, tail, {_NEW})
        return spans

    def _alike(self, query: QueriedPrompt, spans: list[Span], rows: Rows, known: int) -> list[Span]:
        """Mark tokens that recent prompts have behind a difference."""
        if query.space is None or spans[-1].reason != _NEW:
            return spans
        rows = rows[query.prompt.public :]
        numbers = self._ledger.prompt[rows[rows >= 0]][::-1].tolist()
        near = [*dict.fromkeys(numbers)][:_NEAR]
        others = self._prompts.candidates(query.prompt, [*near, query.space.prompt])
        spans = self._same_page(query, spans, others, known)
        missing = next((span.start for span in spans if span.reason == _NEW), len(query.tokens))
        if len(query.tokens) - missing < GRAM:
            return spans
        found = self._prompts.nearest(query.prompt, others, self._ledger, missing)
        if found is not None:
            evidence = _divergence(query.prompt, found)
            for start, stop, _ in found.stretches:
                spans = painted(spans, Span(start, stop, None, "diverged", evidence), {_NEW})
            # Fewer tokens than in the stretches: those with another known reason keep it.
            reusable = (span.tokens for span in spans if span.reason == "diverged")
            evidence["would_reuse"] = sum(reusable)
        return spans

    def _same_page(
        self, query: QueriedPrompt, spans: list[Span], others: list[SeenPrompt], known: int
    ) -> list[Span]:
        """Mark the leading tokens that the first new page has in common with another prompt's."""
        start, stop = known * self._size, (known + 1) * self._size
        common = 0
        for prompt in others:
            shared = min(stop, common_length(query.tokens, prompt.tokens))
            if shared > max(start, common) and self._there(prompt, known):
                common = shared
        if common > start:
            evidence = {"page_size": self._size}
            spans = painted(spans, Span(start, common, None, _REMAINDER, evidence), {_NEW})
        return spans

    def _there(self, prompt: SeenPrompt, unit: int) -> bool:
        """Whether page ``unit`` of ``prompt`` is cached, or is its last one and was never full."""
        space = self._ledger.spaces.get(prompt.space(unit))
        if unit < len(prompt.names):
            return self._ledger.cached(space, prompt.names[unit])
        full = prompt.requester.tail
        return full is None or self._ledger.cached(space, full)


def _group_of(verdict: Verdict) -> object:
    """Return a key: verdicts with equal keys make one span."""
    if isinstance(verdict, Eviction):
        return verdict.cause
    if isinstance(verdict, _Late):
        return (verdict.by,)
    return verdict if isinstance(verdict, str) else id(verdict)


def _differing(ours: Namespace, theirs: Namespace) -> dict[str, list[str]]:
    """Return the fields that differ, each with both values."""
    return {
        field.name: [getattr(ours, field.name), getattr(theirs, field.name)]
        for field in fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    }


def _divergence(prompt: SeenPrompt, found: Nearest) -> dict[str, Any]:
    position = found.position
    window = slice(max(0, position - BEFORE), position + BEHIND)
    ours, theirs = prompt.shown, found.prompt.shown
    evidence = {
        "position": position,
        "nearest": found.prompt.id,
        "given": ours[window].tolist(),
        "cached": theirs[window].tolist(),
        "differs": max(0, found.resumes - position),
    }
    if ours[position] == theirs[position]:  # the tokens are equal, their extras are not
        evidence["extra"] = True
    return evidence


def evicted(
    at: float | None, now: float, *, tier: str, policy: str | None, cause: str
) -> dict[str, Any]:
    """Return the evidence of an eviction, without the request that needed the pages."""
    return {
        "at": at,
        "ago_s": None if at is None else max(0.0, now - at),
        "policy": policy,
        "cause": cause,
        "by": None,
        "needed_pages": None,
        "tier": tier,
    }
