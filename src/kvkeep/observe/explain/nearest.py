"""`PromptHistory`: those asked lately, and which of them a new one differs from the least."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.keys import root_key
from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.alike import GRAM, Stretch, alike

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.alike import Anchors
    from kvkeep.observe.explain.fates import Asker
    from kvkeep.observe.explain.ledger import UnitLedger

__all__ = ["Nearest", "PromptHistory", "SeenPrompt"]

_VOTED = 4
_ANCHOR_TOKENS = 16
_PROMPT_TOKENS = 64
_ENOUGH = 32
"""So many tokens have to go on the same; of less that is missing, half."""


@dataclass(slots=True, eq=False)
class SeenPrompt:
    """One prompt: its tokens, the names of its full units, and of what follows the last.

    Tokens with extras are negative numbers in ``tokens``, which are compared, and themselves in
    ``shown``.
    """

    asker: Asker
    namespace: Namespace
    tokens: TokenArray
    names: list[bytes]
    tail: bytes | None
    anchors: Anchors
    shown: TokenArray
    number: int = -1

    @property
    def id(self) -> str:
        """The request's."""
        return self.asker.id

    def salted(self) -> list[int]:
        """Its anchors, told apart from those of other namespaces."""
        salt = np.frombuffer(root_key(self.namespace)[:8], np.uint64)
        salted: list[int] = (self.anchors.hashes ^ salt).tolist()
        return salted


@dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """A cached prompt, the first token at which ours differs, and where it goes on the same.

    Ours differs at ``position``, until it first goes on the same at ``resumes``.
    """

    prompt: SeenPrompt
    position: int
    resumes: int
    stretches: tuple[Stretch, ...]

    @property
    def would_reuse(self) -> int:
        """Tokens of ours that the other one's KV stands for, but for what is before them."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches)


class PromptHistory:
    """Remembers prompts up to ``most_tokens`` in total, the oldest forgotten.

    A prompt that continues another, or is the same, takes its place. Thread safety: none. Memory:
    4 bytes a token, and up to 7 more for the names of its units.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self._anchors = 0
        self._numbered = 0
        self._prompts: OrderedDict[int, SeenPrompt] = OrderedDict()
        self._by_anchor: dict[int, int] = {}  # hash, of a namespace, to the newest that has it

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, number: int) -> SeenPrompt | None:
        """The prompt of that number, if it is still remembered."""
        return self._prompts.get(number)

    def add(self, prompt: SeenPrompt, before: int) -> None:
        """Remember ``prompt``; its number is set. ``before`` is that of one it may continue."""
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
        """Those worth comparing with: ``near`` by, and with most anchors of the same namespace."""
        get = self._by_anchor.get
        votes = Counter(number for anchor in ours.salted() if (number := get(anchor)) is not None)
        numbers = [*near, *(number for number, _ in votes.most_common(_VOTED))]
        found = [self.get(number) for number in dict.fromkeys(numbers)]
        return [one for one in found if one is not None and one.namespace == ours.namespace]

    def nearest(
        self, asked: SeenPrompt, candidates: Iterable[SeenPrompt], ledger: UnitLedger, missing: int
    ) -> Nearest | None:
        """Of ``candidates``, the one of which most would be reused but for the difference.

        Of our tokens those from ``missing`` on are of interest. None if of no other enough goes
        on the same. Of equals the one that has more leading tokens in common, then the newer.
        """
        ours = asked.tokens
        best: tuple[int, int, int, Nearest] | None = None
        for prompt in candidates:
            position = common_length(ours, prompt.tokens)
            if position >= min(len(ours), len(prompt.tokens)):
                continue
            cached = cached_tokens(prompt, ledger)
            if cached <= position:
                continue
            found = alike(ours, prompt.tokens, asked.anchors, prompt.anchors, position)
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
    """How many leading tokens of ``prompt`` are in the cache."""
    space, tail = ledger.spaces.get(prompt.namespace), prompt.asker.tail
    units = ledger.cached_units(space, prompt.names)
    if units == len(prompt.names) and tail is not None and ledger.cached(space, tail):
        return len(prompt.tokens)
    return units * ledger.unit_tokens


def _within(stretches: Iterable[Stretch], missing: int, cached: int) -> tuple[Stretch, ...]:
    """What of ``stretches`` is missing here and cached there."""
    cut = []
    for start, stop, other in stretches:
        first = max(start, missing)
        last = min(stop, start + cached - other)
        if last > first:
            cut.append(Stretch(first, last, other + first - start))
    return tuple(cut)
