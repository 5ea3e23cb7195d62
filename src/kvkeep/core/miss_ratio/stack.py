"""`Stack`, `DistanceHistogram`: reuse distances of prefixes, and how many there are of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]
    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

__all__ = ["COLD", "DistanceHistogram", "Stack"]

COLD = -1
"""The distance of a block that is not in the stack."""
_PIECE = 32
_EARLIER = np.tri(_PIECE, k=-1, dtype=bool).T


class Stack:
    """The last ``depth`` distinct blocks, in the order of their last use.

    A prompt is touched from its last block to its first, so a block always lies above what follows
    it, and distances only grow along a prompt. Therefore an LRU memory of ``c`` blocks holds
    exactly the leading blocks with a distance below ``c``. A block below ``depth`` is a miss in
    every memory up to that size, and is forgotten.

    Prompts come in batches, for speed; the distances are those of one prompt after the other.
    Memory: 16 bytes a block, twice that during a batch. Cost per batch: 10 ns for each block in the
    stack, 0.2 µs for each block touched, and as much for each stretch of blocks that lay together.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._keys = np.empty(0, np.uint64)  # sorted
        self._places = np.empty(0, np.int64)  # of each key; 0 is the least recently used

    def __len__(self) -> int:
        return len(self._keys)

    def touch(self, keys: Words, counts: Ints) -> Ints:
        """Touch prompts one after the other; return the distance of each key before its own prompt.

        ``keys`` are those of all prompts, the first block of each prompt first; ``counts`` is how
        many each has. Equal keys are equal prefixes; no key occurs twice in a prompt.
        """
        total, below = len(keys), len(self._keys)
        if not total:
            return np.empty(0, np.int64)
        ends = np.cumsum(counts)
        starts = ends - counts
        # The order of touching: each prompt's blocks in reverse.
        mirror = np.repeat(starts + ends - 1, counts) - np.arange(total)
        before = self._touch(keys[mirror])
        begun = below + np.repeat(starts, counts)
        # All places in between, except those whose blocks were touched again in this batch.
        distances = begun - before - 1 - _moved(before, begun)
        # Keys that do not stand for prefixes could give a negative distance.
        np.maximum(distances, 0, out=distances)
        distances[before == COLD] = COLD
        return distances[mirror]

    def _touch(self, keys: Words) -> Ints:
        """Return the place of each key when it was touched, and move them all to the top.

        Places from the length of the stack on are those of the batch itself.
        """
        total, below = len(keys), len(self._keys)
        times = _by_key(keys)
        ordered = keys[times]
        new = np.ones(total, bool)
        np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
        first = np.flatnonzero(new)
        unique = ordered[first]
        last = times[np.append(first[1:], total) - 1]  # when each was touched last

        before = np.empty(total, np.int64)
        before[times[1:]] = times[:-1] + below
        at = np.searchsorted(self._keys, unique)
        known = np.zeros(len(unique), bool)
        inside = at < below
        known[inside] = self._keys[at[inside]] == unique[inside]
        before[times[first]] = COLD
        before[times[first[known]]] = self._places[at[known]]

        stays = np.ones(below, np.int64)  # not bool: its cumsum takes ten times as long
        stays[self._places[at[known]]] = 0
        rank = np.cumsum(stays)
        remain = below - int(known.sum())
        top = np.empty(len(unique), np.int64)
        top[np.argsort(last)] = np.arange(remain, remain + len(unique))
        self._places = rank[self._places] - 1
        self._places[at[known]] = top[known]
        self._insert(at[~known], unique[~known], top[~known])
        return before

    def _insert(self, at: Ints, keys: Words, places: Ints) -> None:
        """Add new keys, each before the one ``at`` which it sorts; drop those below the depth."""
        total = len(self._keys) + len(keys)
        where = at + np.arange(len(at))
        old = np.ones(total, bool)
        old[where] = False
        all_keys, all_places = np.empty(total, np.uint64), np.empty(total, np.int64)
        all_keys[old], all_keys[where] = self._keys, keys
        all_places[old], all_places[where] = self._places, places
        if total > self.depth:
            all_places -= total - self.depth
            deep = all_places >= 0
            all_keys, all_places = all_keys[deep], all_places[deep]
        self._keys, self._places = all_keys, all_places

    def check(self) -> None:
        """Assert that keys and places agree."""
        assert len(self._keys) == len(self._places) <= self.depth
        assert (self._keys[1:] > self._keys[:-1]).all(), "keys are not sorted"
        assert sorted(self._places.tolist()) == list(range(len(self._keys)))


def _by_key(keys: Words) -> Ints:
    """Return the order of the keys, by key and then by time."""
    # Positions in the lowest bits make one sort of integers do, five times as fast as argsort. The
    # other bits nearly always tell keys apart; if not, argsort.
    low = np.uint64((1 << len(keys).bit_length()) - 1)
    mixed = (keys & ~low) | np.arange(len(keys), dtype=np.uint64)
    mixed.sort()
    times = (mixed & low).astype(np.int64)
    ordered = keys[times]
    if (ordered[1:] < ordered[:-1]).any():
        return np.argsort(keys, kind="stable")
    return times


def _moved(before: Ints, begun: Ints) -> Ints:
    """Return for each touch how many earlier ones moved a block from above its own.

    Touches of one prompt whose blocks lay together form a stretch: no other stretch lies between
    its blocks, so it is counted as a whole.
    """
    moved = np.zeros(len(before), np.int64)
    warm = np.flatnonzero(before != COLD)
    if not len(warm):
        return moved
    places, prompts = before[warm], begun[warm]
    cuts = np.ones(len(warm), bool)
    cuts[1:] = (places[1:] - places[:-1] != 1) | (prompts[1:] != prompts[:-1])
    heads = np.flatnonzero(cuts)
    sizes = np.diff(heads, append=len(warm))
    moved[warm] = np.repeat(_greater_before(places[heads], sizes), sizes)
    return moved


def _greater_before(values: Ints, weights: Ints) -> Ints:
    """Return for each of distinct ``values`` the weight of the greater ones before it.

    In pieces of 32: a table of the weights in all earlier pieces, and all pairs within a piece.
    Cost: O(n²) of very small steps, 0.1 µs a value for 1,000 of them.
    """
    count = len(values)
    pieces = -(-count // _PIECE)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(values)] = np.arange(count)
    at = np.arange(count) // _PIECE
    table = np.zeros((pieces + 1, count), np.int32)
    table[at + 1, ranks] = weights
    np.cumsum(table, axis=0, out=table)
    np.cumsum(table[:, ::-1], axis=1, out=table[:, ::-1])
    earlier = table[at, ranks]
    padded = np.full(pieces * _PIECE, -1, np.int64)
    padded[:count] = ranks
    heavy = np.zeros(pieces * _PIECE, np.int64)
    heavy[:count] = weights
    rows = padded.reshape(pieces, _PIECE)
    above = rows[:, :, None] > rows[:, None, :]  # (piece, the earlier one, the later one)
    above &= _EARLIER
    within = np.where(above, heavy.reshape(pieces, _PIECE, 1), 0).sum(axis=1)
    total: Ints = earlier + within.reshape(-1)[:count]
    return total


_EXACT = 512
"""Distances below this have a bin each."""
_STEPS = 128
"""Bins per octave above that: each less than 0.8 % wide."""


class DistanceHistogram:
    """Counts of sampled distances in ``rows`` rows.

    Blocks that were *repeated* a moment ago are counted apart from all others. How many blocks
    there are of either kind is known exactly, not only from the sample:

    - Of blocks that were not repeated, the sample gives the share of hits.
    - Repeated blocks are few and hot, and it is chance whether they are sampled. Only their misses
      come from the sample; all others are hits (SHARDS' adjustment of counts).

    Cost: 20 ns a distance. Memory: 16 bytes for each row and bin, 512 bins and 128 per octave.
    """

    def __init__(self, rows: int, furthest: float) -> None:
        self._bins = int(_bin(np.array([furthest]))[0]) + 1
        # Row 0: not repeated; row 1: repeated.
        self._near = np.zeros((2, rows, self._bins))
        self._sampled = np.zeros((2, rows))  # all in the sample, misses too
        self._requested = np.zeros((2, rows))  # all that were requested

    def add(self, rows: Ints, repeated: Ints, distances: Floats) -> None:
        """Count distances of the sample; infinite ones are misses in any memory."""
        bins = _bin(distances)
        near = bins < self._bins
        cells = repeated * self._sampled.shape[1] + rows
        flat = cells[near] * self._bins + bins[near]
        np.add.at(self._near.reshape(-1), flat, 1.0)
        counts = np.bincount(cells, minlength=self._sampled.size)
        self._sampled += counts.reshape(self._sampled.shape)

    def requested(self, blocks: Ints, repeated: Ints) -> None:
        """Count the blocks requested in each row, and how many of them were repeated."""
        self._requested[0] += blocks - repeated
        self._requested[1] += repeated

    def hit_rates(self, capacities: Floats, sample: float, row: int | None = None) -> Floats:
        """Return the hit rate of each capacity, in blocks; without ``row``, of all rows."""
        which = slice(None) if row is None else slice(row, row + 1)
        requested = self._requested[:, which].sum(axis=1)
        sampled = self._sampled[:, which].sum(axis=1)
        total = float(requested.sum())
        if not total:
            return np.zeros(len(capacities))
        sums = np.cumsum(self._near[:, which].sum(axis=1), axis=1)
        edges = _edges(self._bins + 1)
        first, again = (np.interp(capacities, edges, np.append(0.0, one)) for one in sums)
        share = first / sampled[0] if sampled[0] else np.zeros(len(capacities))
        missed = np.minimum((sampled[1] - again) / sample, requested[1])
        hits = requested[0] * share + requested[1] - missed
        return np.where(capacities >= 1, np.clip(hits / total, 0.0, 1.0), 0.0)


def _bin(distances: Floats) -> Ints:
    """Return the bin of each distance; a very large number for infinite ones."""
    capped = np.minimum(distances, 2.0**60)
    fraction, octave = np.frexp(np.maximum(capped, _EXACT) / _EXACT)  # 0.5 ≤ fraction < 1
    beyond = (octave - 1) * _STEPS + ((fraction * 2 - 1) * _STEPS).astype(np.int64)
    exact = np.minimum(capped, _EXACT).astype(np.int64)
    return np.where(capped < _EXACT, exact, _EXACT + beyond)


def _edges(count: int) -> Floats:
    """Return where the first ``count`` bins begin."""
    beyond = np.maximum(np.arange(count) - _EXACT, 0)
    edges = _EXACT * 2.0 ** (beyond // _STEPS) * (1 + beyond % _STEPS / _STEPS)
    edges[:_EXACT] = np.arange(min(count, _EXACT))
    return edges
