"""Why each token of a prompt that the pool did not give has to be computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.alike import GRAM
from kvkeep.observe.explain.answer import BEFORE, BEHIND, Span
from kvkeep.observe.explain.fates import Asker, Eviction
from kvkeep.observe.explain.spans import painted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.fates import Fate
    from kvkeep.observe.explain.ledger import NamespaceUnits, Rows, UnitLedger
    from kvkeep.observe.explain.nearest import Nearest, PromptHistory, SeenPrompt

__all__ = ["Question", "Reasons", "evicted"]

_NEW, _REMAINDER = "new", "page_remainder"
_NEAR = 4
_SPACES = 16
_POLICY_CAUSES = frozenset({"pressure", "asked"})
"""Evictions in which the policy chose what goes."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt as it was asked: ``cached`` leading tokens came from the pool, ``at`` that time.

    ``space`` is None for a namespace of which nothing is known, ``rows`` are those of its full
    units. ``opened`` is the number of the event it was opened at, None where nobody knows.
    """

    prompt: SeenPrompt
    space: NamespaceUnits | None
    rows: Rows
    cached: int
    at: float
    opened: int | None
    sequence: int | None

    @property
    def id(self) -> str:
        """The request's."""
        return self.prompt.id

    @property
    def tokens(self) -> TokenArray:
        """The prompt's."""
        return self.prompt.tokens

    @property
    def names(self) -> list[bytes]:
        """Of its full units."""
        return self.prompt.names


@dataclass(frozen=True, slots=True, eq=False)
class _Late:
    """The unit was published after the prompt was opened, by request ``by``."""

    by: str | None


Verdict = Asker | Eviction | _Late | str
"""What speaks of a unit: who computes it or did, its eviction, or plainly a reason."""


class Reasons:
    """Judges prompts by a `UnitLedger` and the `PromptHistory`. Changes neither."""

    def __init__(self, ledger: UnitLedger, prompts: PromptHistory, policy: str) -> None:
        self._ledger = ledger
        self._prompts = prompts
        self._policy = policy
        self._size = ledger.unit_tokens

    def spans(self, asked: Question) -> list[Span]:
        """The whole prompt: what the pool gave, then a reason for each token behind it.

        Cost: about 0.3 µs a unit that is missing, and some comparisons if any of it is new.
        """
        spans = [Span(0, asked.cached, "pool", None)] if asked.cached else []
        rows = asked.rows
        verdicts = self._verdicts(asked)
        before = takewhile(lambda said: said[0] != _NEW, verdicts)
        known = asked.cached // self._size + sum(units for _, units in before)
        spans += self._of_units(asked, verdicts)
        spans += self._of_tail(asked, asked.space, _NEW)
        if spans[-1].reason == _NEW:
            spans = self._elsewhere(asked, spans, known)
            spans = self._alike(asked, spans, rows[:known], known)
        return spans

    # --- full units --------------------------------------------------------------------------

    def contradicted(self, asked: Question) -> Rows:
        """Rows that are in the cache, we think, although the pool did not give them."""
        first = asked.cached // self._size
        if len(asked.tokens) == (first + 1) * self._size:
            first += 1  # the last page is not given as a whole: its last token is always computed
        rows = asked.rows[first:]
        if asked.opened is None or not len(rows):
            return rows[:0]
        rows = rows[rows >= 0]
        return rows[(self._ledger.page[rows] >= 0) & (self._ledger.since[rows] <= asked.opened)]

    def _verdicts(self, asked: Question) -> list[tuple[Verdict, int]]:
        """What speaks of the units that the pool did not give as a whole, and of how many."""
        ledger = self._ledger
        first = asked.cached // self._size
        missing = asked.rows[first:]
        if not len(missing):
            return []
        fates = ledger.fate[missing]
        fates[missing < 0] = None
        there = (missing >= 0) & (ledger.page[missing] >= 0)
        late = there & (ledger.since[missing] > (0 if asked.opened is None else asked.opened))
        changes = (fates[1:] != fates[:-1]) | np.diff(there) | np.diff(late)
        if there[-1] and len(asked.rows) * self._size == len(asked.tokens):
            changes[-1:] = True  # the last page is a matter of its own
        begins = [0, *(np.flatnonzero(changes) + 1).tolist(), len(missing)]
        said: list[tuple[Verdict, int]] = []
        for begin, end in pairwise(begins):
            fate = fates[begin]
            if there[begin]:
                last = (first + end) * self._size == len(asked.tokens)
                if last and not (late[begin] and asked.opened is not None):
                    said.append((_REMAINDER, 1))
                else:
                    said.append((self._published(asked, fate), end - begin))
            elif missing[begin] < 0:
                said.append((_NEW, end - begin))
            else:
                assert isinstance(fate, (Asker, Eviction)), "a unit out of the cache has a fate"
                said.append((fate, end - begin))
        return said

    @staticmethod
    def _published(asked: Question, fate: Fate) -> Verdict:
        """By whom it was published in between: itself, which means that it was new, or another."""
        if isinstance(fate, Asker):
            return _NEW if fate.id == asked.id else _Late(fate.id)
        return _NEW if fate is not None and fate == asked.sequence else _Late(None)

    def _of_units(self, asked: Question, verdicts: list[tuple[Verdict, int]]) -> Iterable[Span]:
        start = asked.cached
        stop = asked.cached // self._size * self._size
        for _, group in groupby(verdicts, lambda said: _alike_by(said[0])):
            same = list(group)
            stop += sum(units for _, units in same) * self._size
            yield self._span(asked, start, stop, [said for said, _ in same])
            start = stop

    def _span(self, asked: Question, start: int, stop: int, said: list[Verdict]) -> Span:
        """One span of units of which the same is said."""
        first = said[0]
        evidence: dict[str, Any]
        if isinstance(first, Eviction):
            reason, evidence = "evicted", self._eviction(asked, said)
        elif isinstance(first, _Late):
            reason, evidence = "computing", {"by": first.by}
        elif isinstance(first, Asker):
            if first.running and first.store and first.reuse:
                reason, evidence = "computing", {"by": first.id}
            else:
                reason, evidence = "not_admitted", {"why": first.why_not, "tier": None}
        elif first == _REMAINDER:
            reason, evidence = first, {"page_size": self._size}
        else:
            reason, evidence = first, {}
        return Span(start, stop, None, reason, evidence)

    def _eviction(self, asked: Question, said: Iterable[Verdict]) -> dict[str, Any]:
        """What is known of the last of these evictions, and how many there were."""
        several = {id(one): one for one in said if isinstance(one, Eviction)}
        last = max(several.values(), key=lambda one: one.at)
        policy = self._policy if last.cause in _POLICY_CAUSES else None
        return {
            **evicted(last.at, asked.at, tier="pool", policy=policy, cause=last.cause),
            "by": last.by,
            "needed_pages": last.needed_pages,
            "evictions": len(several),
        }

    # --- what follows the last full unit -----------------------------------------------------

    def _of_tail(self, asked: Question, space: NamespaceUnits | None, reason: str) -> list[Span]:
        """The last tokens, which fill no page: seen before, or ``reason``."""
        start = max(asked.cached, len(asked.names) * self._size)
        if start >= len(asked.tokens):
            return []
        stop = len(asked.tokens)
        assert asked.prompt.tail is not None
        rows = [int(row) for row in self._ledger.find(space, [asked.prompt.tail]) if row >= 0]
        if not rows:
            return [Span(start, stop, None, reason)]
        if not asked.prompt.asker.reuse:
            return [self._span(asked, start, stop, [asked.prompt.asker])]
        gone = self._filled_and_gone(space, rows[0])
        if gone is not None and space is asked.space:
            return [self._span(asked, start, stop, [gone])]
        return [Span(start, stop, None, _REMAINDER, {"page_size": self._size})]

    def _filled_and_gone(self, space: NamespaceUnits | None, tail: int) -> Eviction | None:
        """The eviction of the page that a tail had become part of, by what was generated."""
        asker = self._ledger.fate[tail]
        if space is None or not isinstance(asker, Asker) or asker.tail is None:
            return None
        row = space.rows.get(asker.tail, -1)
        if row < 0 or self._ledger.page[row] >= 0:
            return None
        fate = self._ledger.fate[row]
        return fate if isinstance(fate, Eviction) else None

    # --- what was never seen here ------------------------------------------------------------

    def _elsewhere(self, asked: Question, spans: list[Span], known: int) -> list[Span]:
        """What another namespace has of the units from ``known`` on."""
        names, ours = asked.names, asked.prompt.namespace
        low, high = known, len(names)
        while low < high:  # who has a unit has all before it
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
            for tail in self._of_tail(asked, theirs, _NEW):
                spans = painted(spans, tail, {_NEW})
        return spans

    def _alike(self, asked: Question, spans: list[Span], rows: Rows, known: int) -> list[Span]:
        """What prompts asked lately have of it, though it stands behind something else there."""
        if asked.space is None or spans[-1].reason != _NEW:
            return spans
        numbers = self._ledger.prompt[rows[rows >= 0]][::-1].tolist()
        near = [*dict.fromkeys(numbers)][:_NEAR]
        others = self._prompts.candidates(asked.prompt, [*near, asked.space.prompt])
        spans = self._same_page(asked, spans, others, known)
        missing = next((span.start for span in spans if span.reason == _NEW), len(asked.tokens))
        if len(asked.tokens) - missing < GRAM:
            return spans
        found = self._prompts.nearest(asked.prompt, others, self._ledger, missing)
        if found is not None:
            evidence = _divergence(asked.prompt, found)
            for start, stop, _ in found.stretches:
                spans = painted(spans, Span(start, stop, None, "diverged", evidence), {_NEW})
            # Where much was forgotten, some of them are known to have been lost otherwise.
            reusable = (span.tokens for span in spans if span.reason == "diverged")
            evidence["would_reuse"] = sum(reusable)
        return spans

    def _same_page(
        self, asked: Question, spans: list[Span], others: list[SeenPrompt], known: int
    ) -> list[Span]:
        """The first tokens of the first new page, where another's page begins with the same."""
        start, stop = known * self._size, (known + 1) * self._size
        common = 0
        for prompt in others:
            shared = min(stop, common_length(asked.tokens, prompt.tokens))
            if shared > max(start, common) and self._there(prompt, known):
                common = shared
        if common > start:
            evidence = {"page_size": self._size}
            spans = painted(spans, Span(start, common, None, _REMAINDER, evidence), {_NEW})
        return spans

    def _there(self, prompt: SeenPrompt, unit: int) -> bool:
        """Whether this page of ``prompt`` is cached, or is the last one and never was full."""
        space = self._ledger.spaces.get(prompt.namespace)
        if unit < len(prompt.names):
            return self._ledger.cached(space, prompt.names[unit])
        full = prompt.asker.tail
        return full is None or self._ledger.cached(space, full)


def _alike_by(said: Verdict) -> object:
    """Verdicts that make one span: evictions of the same cause, the same asker, the same reason."""
    if isinstance(said, Eviction):
        return said.cause
    if isinstance(said, _Late):
        return (said.by,)
    return said if isinstance(said, str) else id(said)


def _differing(ours: Namespace, theirs: Namespace) -> dict[str, list[str]]:
    """Field → what it is here and there, of those that differ."""
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
    if ours[position] == theirs[position]:  # the tokens are equal: what belongs to them is not
        evidence["extra"] = True
    return evidence


def evicted(
    at: float | None, now: float, *, tier: str, policy: str | None, cause: str
) -> dict[str, Any]:
    """Evidence of an eviction, by whom not yet said."""
    return {
        "at": at,
        "ago_s": None if at is None else max(0.0, now - at),
        "policy": policy,
        "cause": cause,
        "by": None,
        "needed_pages": None,
        "tier": tier,
    }
