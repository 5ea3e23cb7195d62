"""`DeclaredRows`: the public prefix that a prompt was meant to begin with, and where it differs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.keys import chain_keys
from kvkeep.core.public import public_namespace
from kvkeep.core.tokens import TOKEN_DTYPE, common_length
from kvkeep.observe.explain.alike import GRAM, Anchors, Stretch, alike
from kvkeep.observe.explain.answer import BEFORE, BEHIND, Span
from kvkeep.observe.explain.spans import painted

if TYPE_CHECKING:
    from kvkeep.core.public import PublicPrefixes
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.ledger import UnitLedger
    from kvkeep.observe.explain.nearest import SeenPrompt

__all__ = ["DeclaredRows", "Unshared"]

_VOTED = 2
_ENOUGH = 32
"""Tokens that must be equal behind the difference; half of the prefix if that is shorter."""


@dataclass(frozen=True, slots=True, eq=False)
class Unshared:
    """A prompt that begins almost like a public prefix, and so shares nothing of it.

    It differs from ``row`` at ``position``. ``stretches`` are the tokens that both have: those
    before, and those behind.
    """

    row: TokenArray
    position: int
    stretches: tuple[Stretch, ...]

    @property
    def tokens(self) -> int:
        """Tokens that both have."""
        return sum(one.stop - one.start for one in self.stretches)

    def evidence(self, shown: TokenArray) -> dict[str, Any]:
        """Return what to say of a prompt whose tokens are ``shown``."""
        position = self.position
        window = slice(max(0, position - BEFORE), position + BEHIND)
        behind = [one.start for one in self.stretches if one.start > position]
        return {
            "position": position,
            "nearest": None,
            "public": True,
            "given": shown[window].tolist(),
            "cached": self.row[window].tolist(),
            "differs": behind[0] - position if behind else 0,
            "would_reuse": 0,
        }


class DeclaredRows:
    """Finds the declared prefix that is nearest to a prompt, in pages of ``page_size`` tokens.

    Thread safety: none. Cost: 10 ns a token of all prefixes, once; then two comparisons of a prompt
    with its neighbours in order, and two more with those that have most anchors in common.
    """

    def __init__(self, prefixes: PublicPrefixes, page_size: int) -> None:
        self._prefixes = prefixes
        self._size = page_size
        self._known: tuple[bytes, ...] = ()
        self._rows: list[bytes] = []  # sorted: neighbours have most in common at their beginning
        self._anchors: list[Anchors] = []
        self._by_anchor: dict[int, int] = {}

    def marked(self, prompt: SeenPrompt, spans: list[Span], ledger: UnitLedger) -> list[Span]:
        """Mark the new tokens that a prompt has in common with a prefix that it differs from."""
        if not len(self._prefixes) or prompt.public or all(span.reason != "new" for span in spans):
            return spans
        found = self.nearest(prompt.tokens, prompt.anchors)
        if found is None:
            return spans
        evidence = found.evidence(prompt.shown)
        for start, stop, _ in found.stretches:
            spans = painted(spans, Span(start, stop, None, "diverged", evidence), {"new"})
        names = chain_keys(b"", found.row.tobytes(), ledger.unit_bytes)
        shared = ledger.spaces.get(public_namespace(prompt.namespace))
        if ledger.cached_units(shared, names) == len(names):
            reusable = (span.tokens for span in spans if span.reason == "diverged")
            evidence["would_reuse"] = sum(reusable)
        return spans

    def nearest(self, tokens: TokenArray, anchors: Anchors) -> Unshared | None:
        """Return the prefix that a private prompt differs from; None if it has little of any.

        Little is less than a page at the beginning, and less than 32 tokens behind a difference.
        """
        if self._prefixes.rows is not self._known:
            self._read()
        if not self._rows:
            return None
        place = bisect_left(self._rows, tokens.tobytes())
        get = self._by_anchor.get
        rows = map(get, anchors.hashes.tolist())
        votes = Counter(row for row in rows if row is not None)
        numbers = {*range(max(0, place - 1), min(place + 1, len(self._rows)))}
        numbers |= {row for row, _ in votes.most_common(_VOTED)}
        found = [self._compared(number, tokens, anchors) for number in numbers]
        return max(filter(None, found), key=lambda one: one.tokens, default=None)

    def _compared(self, number: int, tokens: TokenArray, anchors: Anchors) -> Unshared | None:
        row = np.frombuffer(self._rows[number], TOKEN_DTYPE)
        position = common_length(tokens, row)
        if position >= min(len(tokens), len(row)):
            return None  # a part of it, or all of it
        behind = alike(tokens, row, anchors, self._anchors[number], position)
        same = sum(one.stop - one.start for one in behind)
        if position < self._size and same < max(GRAM, min(_ENOUGH, len(row) // 2)):
            return None
        before = [Stretch(0, position, 0)] if position else []
        return Unshared(row, position, (*before, *behind))

    def _read(self) -> None:
        self._known = self._prefixes.rows
        unit = self._size * np.dtype(TOKEN_DTYPE).itemsize
        whole = {row[: len(row) // unit * unit] for row in self._known}
        self._rows = sorted(whole - {b""})
        self._anchors = [Anchors.of(np.frombuffer(row, TOKEN_DTYPE)) for row in self._rows]
        self._by_anchor = {
            anchor: number
            for number, anchors in enumerate(self._anchors)
            for anchor in anchors.hashes.tolist()
        }
