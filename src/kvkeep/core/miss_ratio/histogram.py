"""`DistanceHistogram`: reuse distances of blocks, counted per namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

__all__ = ["DistanceHistogram"]

_EXACT = 512
"""Distances below this have a bin each."""
_STEPS = 128
"""Bins per octave above that: each less than 0.8 % wide."""
_TOO_HEAVY = 2.0**200


class DistanceHistogram:
    """Weighted counts of sampled distances in ``rows`` rows; recent ones may weigh more.

    Blocks that were *repeated* a moment ago are counted apart from all others. How many blocks
    there are of either kind is known exactly, not only from the sample:

    - Of blocks that were not repeated, the sample gives the share of hits.
    - Repeated blocks are few and hot, and it is chance whether they are sampled. Only their misses
      come from the sample; all others are hits (SHARDS' adjustment of counts).

    ``half_life`` is the number of requested blocks after which a count weighs half. New counts get
    heavier instead of old ones lighter, and all are divided now and then.

    Cost: 20 ns a distance. Memory: 16 bytes for each row and bin, 512 bins and 128 per octave.
    """

    def __init__(self, rows: int, furthest: float, half_life: float | None) -> None:
        self._half_life = half_life
        self._weight = 1.0
        self._bins = int(_bin(np.array([furthest]))[0]) + 1
        # Row 0: not repeated; row 1: repeated.
        self._near = np.zeros((2, rows, self._bins))
        self._sampled = np.zeros((2, rows))  # weight of all in the sample, misses too
        self._requested = np.zeros((2, rows))  # weight of all that were requested

    def add(self, rows: Ints, repeated: Ints, distances: Floats) -> None:
        """Count distances of the sample; infinite ones are misses in any memory."""
        bins = _bin(distances)
        near = bins < self._bins
        cells = repeated * self._sampled.shape[1] + rows
        flat = cells[near] * self._bins + bins[near]
        np.add.at(self._near.reshape(-1), flat, self._weight)
        counts = np.bincount(cells, minlength=self._sampled.size) * self._weight
        self._sampled += counts.reshape(self._sampled.shape)

    def requested(self, blocks: Ints, repeated: Ints) -> None:
        """Count the blocks requested in each row, and how many of them were repeated."""
        self._requested[0] += (blocks - repeated) * self._weight
        self._requested[1] += repeated * self._weight

    def age(self, blocks: int) -> None:
        """Reduce the weight of all counts so far, as ``blocks`` were requested since."""
        if self._half_life is None:
            return
        self._weight *= 2.0 ** min(blocks / self._half_life, 500.0)
        if self._weight > _TOO_HEAVY:
            self._near /= self._weight
            self._sampled /= self._weight
            self._requested /= self._weight
            self._weight = 1.0

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
