"""`PromptHistory`: the latest prompts, and the nearest of them to a new prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.keys import root_key
from kvkeep.core.public import public_namespace
from kvkeep.core.tokens import common_length

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.ledger import Requester, UnitLedger

    Words = npt.NDArray[np.uint64]
    Places = npt.NDArray[np.int64]

__all__ = ["GRAM", "Anchors", "Nearest", "PromptHistory", "SeenPrompt", "Stretch", "alike"]

# Stretches in which two prompts are equal behind a difference are found by common anchors.
#
# An anchor is a run of `GRAM` tokens whose hash ends in zeros, so both prompts have the same
# anchors at any position. Anchors that each prompt has exactly once lie on diagonals; the heaviest
# chain of diagonals that moves forward in both prompts is compared token by token.

GRAM = 8
"""Tokens of an anchor, and of the shortest stretch."""
_FEW = 128
_MOST_ZEROS = 5
_RUNS = 64
_MIX = tuple(np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F))
_FOLDS = tuple(
    np.uint64(word) for word in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_HALF = np.uint64(32)


class Stretch(NamedTuple):
    """Tokens ``start`` … ``stop`` of one prompt equal those of the other from ``other`` on."""

    start: int
    stop: int
    other: int


@dataclass(frozen=True, slots=True, eq=False)
class Anchors:
    """The anchors that a prompt has only once: their hashes in order, and their positions."""

    hashes: Words
    places: Places

    @classmethod
    def of(cls, tokens: TokenArray) -> Anchors:
        """Find the anchors of a prompt: all of a short one, about one in 32 tokens of a long one.

        Cost: about 10 ns a token.
        """
        if len(tokens) < GRAM:
            return cls(np.empty(0, np.uint64), np.empty(0, np.int64))
        hashes = tokens.astype(np.uint64) * _MIX[0] + _MIX[1]
        for step, fold in zip((1, 2, 4), _FOLDS, strict=True):
            hashes = hashes[:-step] * fold + (hashes[step:] ^ (hashes[step:] >> _HALF))
        hashes ^= hashes >> _HALF
        hashes *= _MIX[0]
        zeros = min(_MOST_ZEROS, max(0, (len(hashes) // _FEW).bit_length()))
        places = np.flatnonzero((hashes & np.uint64((1 << zeros) - 1)) == 0)
        chosen = hashes[places]
        order = np.argsort(chosen)
        chosen = chosen[order]
        once = np.ones(len(chosen), bool)
        same = chosen[1:] == chosen[:-1]
        once[1:] &= ~same
        once[:-1] &= ~same
        return cls(chosen[once], places[order[once]])


def alike(
    ours: TokenArray, theirs: TokenArray, our: Anchors, their: Anchors, start: int
) -> list[Stretch]:
    """Return the stretches in which both prompts are equal, behind their first ``start`` tokens.

    Stretches have `GRAM` tokens or more and move forward in both prompts. A stretch of less than
    about 32 equal tokens may be missed. Cost: below 0.3 ms.
    """
    _, mine, other = np.intersect1d(
        our.hashes, their.hashes, assume_unique=True, return_indices=True
    )
    i, j = our.places[mine], their.places[other]
    behind = (i >= start) & (j >= start)
    i, j = i[behind], j[behind]
    if not len(i):
        return []
    order = np.argsort(i)
    return _stretches(ours, theirs, _chained(_runs(i[order], j[order])), start)


def _runs(i: Places, j: Places) -> list[Stretch]:
    """Join consecutive anchors on one diagonal."""
    breaks = np.flatnonzero(np.diff(j - i) != 0) + 1
    first = np.concatenate(([0], breaks))
    last = np.concatenate((breaks, [len(i)])) - 1
    return [
        Stretch(begin, end + GRAM, other)
        for begin, end, other in zip(
            i[first].tolist(), i[last].tolist(), j[first].tolist(), strict=True
        )
    ]


def _chained(runs: list[Stretch]) -> list[Stretch]:
    """Return the heaviest chain of runs that moves forward in both prompts."""
    if len(runs) > _RUNS:
        runs = sorted(sorted(runs, key=lambda run: run.start - run.stop)[:_RUNS])
    best: list[tuple[int, int]] = []  # by run: weight of the best chain to it, and the run before
    for at, run in enumerate(runs):
        weight, before = 0, -1
        for back, (earlier, (so_far, _)) in enumerate(zip(runs[:at], best, strict=True)):
            forward = earlier.start < run.start and _end(earlier) <= run.other + GRAM
            if forward and earlier.other < run.other and so_far > weight:
                weight, before = so_far, back
        best.append((weight + run.stop - run.start, before))
    chain: list[Stretch] = []
    at = max(range(len(runs)), key=lambda at: best[at][0])
    while at >= 0:
        chain.append(runs[at])
        at = best[at][1]
    return chain[::-1]


def _end(run: Stretch) -> int:
    return run.other + run.stop - run.start


def _stretches(
    ours: TokenArray, theirs: TokenArray, chain: list[Stretch], start: int
) -> list[Stretch]:
    """Return the equal stretches on the diagonals of ``chain``, each up to the next diagonal."""
    found: list[Stretch] = []
    low, other_low = start, start
    for at, run in enumerate(chain):
        shift = run.other - run.start
        first = max(low, other_low - shift)
        stop = min(len(ours), len(theirs) - shift)
        same = ours[first:stop] == theirs[first + shift : stop + shift]
        if at + 1 < len(chain):  # up to the first difference; the rest is the next diagonal's
            end = max(0, run.stop - first)
            goes_on = same[end:]
            end += len(goes_on) if goes_on.all() else int(goes_on.argmin())
            same = same[:end]
        found += _equal(same, first, shift)
        if found:
            low, other_low = found[-1].stop, _end(found[-1])
    return found


def _equal(same: npt.NDArray[np.bool_], first: int, shift: int) -> list[Stretch]:
    """Return the runs of equal tokens that are long enough."""
    edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
    begins, ends = edges[::2], edges[1::2]
    long = ends - begins >= GRAM
    return [
        Stretch(first + begin, first + end, first + begin + shift)
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True)
    ]


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
