"""`History`: the prompts of recent requests, by what they contain; and where two of them differ."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.core.keys import root_key
from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.spans import AFTER, BEFORE

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.explain.spans import Span

    Grams = npt.NDArray[np.uint64]

__all__ = ["Difference", "History", "Record", "difference"]

GRAM = 8
"""Tokens of the shortest run that two prompts are said to have in common."""
_SKETCH = 64  # runs by which a prompt is found
_MOST_COMPARED = 3
_PROMPT_TOKENS = 64  # that a short prompt counts as, by the memory that it needs
_MOST_STRETCHES = 64
_LEAST = 16  # equal tokens behind a difference
_LONG = 64
_SHORT = 48  # tokens of a difference; longer ones are a sixteenth of what is equal at most
_MIX = tuple(np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F))
_FOLDS = tuple(
    np.uint64(word) for word in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_HALF = np.uint64(32)


@dataclass(slots=True, eq=False)
class Record:
    """One request: its prompt, the spans of it, and its end.

    ``row`` has the tokens for comparisons, ``shown`` those for people: they differ at tokens with
    bytes. Both are None once the prompt is forgotten. ``judged`` are the spans by the pool's
    reasons, ``spans`` by the store's, too. The first ``public`` tokens are a public prefix.
    """

    id: str
    at: float
    namespace: Namespace
    tokens: int
    row: TokenArray | None
    shown: TokenArray | None
    kind: str = ""
    session: str | None = None
    store: bool = True
    sequence: int | None = None
    public: int = 0
    judged: list[Span] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    outcome: str | None = None
    generated: int | None = None
    ttft_s: float | None = None
    seconds: float | None = None
    grams: Grams | None = None
    sketch: list[int] = field(default_factory=list)

    def common(self, other: Record) -> int:
        """Return how many leading tokens equal those of another; 0 if either is forgotten."""
        if self.row is None or other.row is None:
            return 0
        return common_length(self.row, other.row)


class Difference(NamedTuple):
    """A prompt differs from another from ``position`` on, and has ``stretches`` of it behind."""

    position: int
    stretches: list[tuple[int, int]]
    evidence: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of the stretches."""
        return sum(stop - start for start, stop in self.stretches)


class History:
    """Finds recent prompts that have much in common with another, anywhere in it.

    A prompt is found by the `_SKETCH` runs of `GRAM` tokens with the smallest hashes: similar
    prompts have most of them in common. Prompts of ``most_tokens`` tokens are remembered.

    Thread safety: none. Cost: 10 ns a token, and 0.1 ms. Memory: 4 bytes a token, and up to 20 KiB
    a prompt.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self._prompts: OrderedDict[int, Record] = OrderedDict()  # by `id` of the record
        self._newest: dict[int, Record] = {}  # by hash, and by hash with namespace

    def prepare(self, record: Record) -> None:
        """Compute by what a record is found."""
        assert record.row is not None
        record.grams = _grams(record.row)
        smallest = record.grams
        if len(smallest) > _SKETCH:
            smallest = np.partition(smallest, _SKETCH)[:_SKETCH]
        record.sketch = smallest.tolist()

    def add(self, record: Record) -> None:
        """Remember a prepared record; forget the oldest beyond the bound."""
        record.grams = None
        self._prompts[id(record)] = record
        self.tokens += max(_PROMPT_TOKENS, record.tokens)
        self._newest.update(dict.fromkeys(_keys(record), record))
        while self.tokens > self.most_tokens and len(self._prompts) > 1:
            self.forget(next(iter(self._prompts.values())))

    def forget(self, record: Record) -> None:
        """Forget a prompt, if it is remembered."""
        if self._prompts.pop(id(record), None) is None:
            return
        self.tokens -= max(_PROMPT_TOKENS, record.tokens)
        for key in _keys(record):
            if self._newest.get(key) is record:
                del self._newest[key]
        record.row = record.shown = None
        record.sketch = []

    def similar(self, record: Record, *, elsewhere: bool = False) -> list[Record]:
        """Return the prompts most similar to a prepared one, of its namespace or of others."""
        salt = 0 if elsewhere else _salt(record.namespace)
        votes = Counter(
            id(other) for hash in record.sketch
            if (other := self._newest.get(hash ^ salt)) is not None
        )  # fmt: skip
        found = [self._prompts[number] for number, _ in votes.most_common(_MOST_COMPARED)]
        return [other for other in found if (other.namespace != record.namespace) is elsewhere]


def _keys(record: Record) -> list[int]:
    salt = _salt(record.namespace)
    return [*record.sketch, *(hash ^ salt for hash in record.sketch)]


def _salt(namespace: Namespace) -> int:
    return int.from_bytes(root_key(namespace)[:8], "little") | 1


def _grams(row: TokenArray) -> Grams:
    """Return the hash of each run of `GRAM` tokens."""
    if len(row) < GRAM:
        return np.empty(0, np.uint64)
    hashes: Grams = row.astype(np.uint64) * _MIX[0] + _MIX[1]
    for step, fold in zip((1, 2, 4), _FOLDS, strict=True):
        hashes = hashes[:-step] * fold + (hashes[step:] ^ (hashes[step:] >> _HALF))
    hashes ^= hashes >> _HALF
    hashes *= _MIX[0]
    return hashes


def difference(ours: Record, others: list[Record], cached: int) -> Difference | None:
    """Return where a prepared prompt differs from one of ``others``, and goes on the same behind.

    Only tokens behind the ``cached`` ones count. None without a prompt that equals ours in two
    thirds of the shorter rest of both, behind a short difference: prompts that tell of other things
    may quote the same file, or end in the same words.
    """
    return max(
        (found for other in others if (found := _behind(ours, other, cached)) is not None),
        key=lambda found: (found.tokens, found.position),
        default=None,
    )


def _behind(ours: Record, other: Record, cached: int) -> Difference | None:
    assert ours.grams is not None
    if other.row is None or ours.row is None:
        return None
    position = ours.common(other)
    if position >= min(ours.tokens, other.tokens):
        return None
    same = np.isin(ours.grams[position:], _grams(other.row[position:]))
    edges = np.zeros(ours.tokens - position + 1, np.int32)
    edges[: len(same)] += same
    edges[GRAM : GRAM + len(same)] -= same
    inside = np.flatnonzero(np.diff(np.cumsum(edges) > 0, prepend=False)) + position
    stretches = list(zip(inside[::2].tolist(), inside[1::2].tolist(), strict=True))
    tokens = sum(stop - start for start, stop in stretches)
    rest = min(ours.tokens, other.tokens) - position
    if tokens < max(_LEAST, rest * 2 / 3):
        return None
    long = min(_LONG, tokens // 2)  # shorter ones are words that stand between any two texts
    resumes = next((start for start, stop in stretches if stop - start >= long), ours.tokens)
    if resumes - position > max(_SHORT, tokens // 16):
        return None
    evidence = _evidence(ours, other, position, stretches[0][0])
    computed = [(max(start, cached), stop) for start, stop in stretches if stop > cached]
    longest = sorted(computed, key=lambda part: part[0] - part[1])[:_MOST_STRETCHES]
    return Difference(position, sorted(longest), evidence) if longest else None


def _evidence(ours: Record, other: Record, position: int, resumes: int) -> dict[str, Any]:
    assert ours.shown is not None
    assert other.shown is not None
    window = slice(max(0, position - BEFORE), position + AFTER)
    evidence = {
        "position": position,
        "nearest": other.id,
        "given": ours.shown[window].tolist(),
        "cached": other.shown[window].tolist(),
        "differs": max(0, resumes - position),
    }
    if ours.shown[position] == other.shown[position]:  # tokens are equal, their bytes are not
        evidence["extra"] = True
    return evidence
