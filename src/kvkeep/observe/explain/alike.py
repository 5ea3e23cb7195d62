"""Stretches in which two prompts are equal behind a difference, found by common anchors.

An anchor is a run of `GRAM` tokens whose hash ends in zeros, so both prompts have the same anchors
at any position. Anchors that each prompt has exactly once lie on diagonals; the heaviest chain of
diagonals that moves forward in both prompts is compared token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.tokens import TokenArray

    Words = npt.NDArray[np.uint64]
    Places = npt.NDArray[np.int64]

__all__ = ["GRAM", "Anchors", "Stretch", "alike"]

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
