"""`PromptHistory`: the latest prompts, and the nearest of them to a new prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.keys import root_key
from kvkeep.core.public import public_namespace
from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.alike import GRAM, Stretch, alike

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.alike import Anchors
    from kvkeep.observe.explain.ledger import Requester, UnitLedger

__all__ = ["Nearest", "PromptHistory", "SeenPrompt"]

_VOTED = 4
_ANCHOR_TOKENS = 16
_PROMPT_TOKENS = 64
_ENOUGH = 32
"""Tokens that must be equal behind the difference; half of the missing ones if those are fewer."""


@dataclass(slots=True, eq=False)
class SeenPrompt:
    """One prompt: its tokens, the names of its full units, and of the tail behind them.

    ``tokens`` are compared: negative numbers stand for tokens with extras. ``shown`` has the
    tokens themselves. The first ``public`` units are those of a public prefix, in the namespace of
    all tenants.
    """

    requester: Requester
    namespace: Namespace
    tokens: TokenArray
    names: list[bytes]
    tail: bytes | None
    anchors: Anchors
    shown: TokenArray
    public: int = 0
    number: int = -1

    @property
    def id(self) -> str:
        """The id of its request."""
        return self.requester.id

    def space(self, unit: int) -> Namespace:
        """Return the namespace of its full unit number ``unit``."""
        return public_namespace(self.namespace) if unit < self.public else self.namespace

    def salted(self) -> list[int]:
        """Return the hashes of the prompt's anchors, salted with its namespace."""
        salt = np.frombuffer(root_key(self.namespace)[:8], np.uint64)
        salted: list[int] = (self.anchors.hashes ^ salt).tolist()
        return salted


@dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """A cached prompt, and the stretches in which our prompt equals it behind a difference.

    Our prompt differs from ``position`` on, and is equal again from ``resumes`` on.
    """

    prompt: SeenPrompt
    position: int
    resumes: int
    stretches: tuple[Stretch, ...]

    @property
    def would_reuse(self) -> int:
        """Tokens of our prompt that could be reused if the tokens before them were equal."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches)


class PromptHistory:
    """Remembers the latest prompts, up to ``most_tokens`` in total.

    A prompt that continues or equals another replaces it. Thread safety: none. Memory: 4 bytes a
    token, and up to 7 more for the names of its units.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self._anchors = 0
        self._numbered = 0
        self._prompts: OrderedDict[int, SeenPrompt] = OrderedDict()
        self._by_anchor: dict[int, int] = {}  # salted hash → number of the newest prompt with it

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, number: int) -> SeenPrompt | None:
        """Return the prompt of that number, if it is remembered."""
        return self._prompts.get(number)

    def add(self, prompt: SeenPrompt, before: int) -> None:
        """Remember ``prompt`` and number it; it may continue the prompt of number ``before``."""
        other = self._prompts.get(before)
        if other is not None and np.array_equal(prompt.tokens[: len(other.tokens)], other.tokens):
            self._drop(before)
        self._numbered += 1
        number = prompt.number = self._numbered
        self._prompts[number] = prompt
        self.tokens += len(prompt.tokens)
        self._anchors += len(prompt.anchors.hashes)
        self._by_anchor.update(dict.fromkeys(prompt.salted(), number))
        while len(self._prompts) > 1 and (
            self.tokens > self.most_tokens
            or self._anchors * _ANCHOR_TOKENS > self.most_tokens
            or len(self._prompts) * _PROMPT_TOKENS > self.most_tokens
        ):
            self._drop(next(iter(self._prompts)))

    def _drop(self, number: int) -> None:
        prompt = self._prompts.pop(number)
        self.tokens -= len(prompt.tokens)
        self._anchors -= len(prompt.anchors.hashes)
        by_anchor = self._by_anchor
        for anchor in prompt.salted():
            if by_anchor.get(anchor) == number:
                del by_anchor[anchor]

    def candidates(self, ours: SeenPrompt, near: Iterable[int]) -> list[SeenPrompt]:
        """Return prompts to compare: ``near`` ones, and those with most anchors in common."""
        get = self._by_anchor.get
        votes = Counter(number for anchor in ours.salted() if (number := get(anchor)) is not None)
        numbers = [*near, *(number for number, _ in votes.most_common(_VOTED))]
        found = [self.get(number) for number in dict.fromkeys(numbers)]
        return [one for one in found if one is not None and one.namespace == ours.namespace]

    def nearest(
        self, query: SeenPrompt, candidates: Iterable[SeenPrompt], ledger: UnitLedger, missing: int
    ) -> Nearest | None:
        """Return the candidate with the most tokens that could be reused but for the difference.

        Only our tokens from ``missing`` on count. None if no candidate has enough equal tokens.
        Ties go to the longer common prefix, then to the newer prompt.
        """
        ours = query.tokens
        best: tuple[int, int, int, Nearest] | None = None
        for prompt in candidates:
            position = common_length(ours, prompt.tokens)
            if position >= min(len(ours), len(prompt.tokens)):
                continue
            cached = cached_tokens(prompt, ledger)
            if cached <= position:
                continue
            found = alike(ours, prompt.tokens, query.anchors, prompt.anchors, position)
            if not found:
                continue
            stretches = _within(found, missing, cached)
            nearest = Nearest(prompt, position, found[0].start, stretches)
            score = (nearest.would_reuse, position, prompt.number)
            if best is None or score > best[:3]:
                best = (*score, nearest)
        if best is None:
            return None
        enough = max(GRAM, min(_ENOUGH, (len(ours) - missing) // 2))
        return best[3] if best[0] >= enough else None


def cached_tokens(prompt: SeenPrompt, ledger: UnitLedger) -> int:
    """Return how many leading tokens of ``prompt`` are in the cache."""
    space, tail = ledger.spaces.get(prompt.namespace), prompt.requester.tail
    shared = ledger.spaces.get(public_namespace(prompt.namespace)) if prompt.public else None
    units = ledger.cached_units(shared, prompt.names[: prompt.public])
    if units == prompt.public:
        units += ledger.cached_units(space, prompt.names[units:])
    if units == len(prompt.names) and tail is not None and ledger.cached(space, tail):
        return len(prompt.tokens)
    return units * ledger.unit_tokens


def _within(stretches: Iterable[Stretch], missing: int, cached: int) -> tuple[Stretch, ...]:
    """Cut stretches at both ends.

    What remains begins at token ``missing`` of our prompt or later, and ends within the first
    ``cached`` tokens of the other prompt.
    """
    cut = []
    for start, stop, other in stretches:
        first = max(start, missing)
        last = min(stop, start + cached - other)
        if last > first:
            cut.append(Stretch(first, last, other + first - start))
    return tuple(cut)
