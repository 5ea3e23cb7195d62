"""Prefix-chained ids of units, from tokens or from ids of single units.

    sum[i] = mix(token[0] + 0·K) + … + mix(token[i] + i·K)      mod 2⁶⁴
    id of the unit that ends at token i = mix(sum[i]), without its highest bit

``mix`` is splitmix64's finaliser and K its increment. Unlike a hash that goes from token to token,
the sums of all prefixes are computed at once, in a few passes of NumPy per prompt.

Two different prefixes have the same id with a probability of 2⁻⁶³. The hash is not cryptographic:
collisions can be constructed, but only harm the trace that has them. Files for others to read are
written with a key, by `capture`.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.traces.request import MAX_ID, NO_UNITS

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.bench.traces.request import UnitArray

    Words = npt.NDArray[np.uint64]

__all__ = ["Growing", "chain_ids", "chain_tokens", "fresh_ids", "words_of"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ID = np.uint64(MAX_ID)


def _mix(words: Words) -> Words:
    """Apply splitmix64's finaliser, which wraps around, to ``words`` in place."""
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


def _positions(start: int, count: int) -> Words:
    return np.arange(start, start + count, dtype=np.uint64) * _STEP


def words_of(seed: int, count: int) -> Words:
    """Return ``count`` stand-ins for the tokens of a synthetic segment, different per seed."""
    return _mix(_positions(1, count) + np.uint64(seed & (2**64 - 1)))


def fresh_ids(number: int, count: int) -> UnitArray:
    """Return ids that occur nowhere else, for a prompt of known length only, one per ``number``.

    Two numbers share an id with a probability of 2⁻⁶³.
    """
    return chain_tokens(words_of(number * 0x2545F4914F6CDD1D + 1, count), 1)


def chain_ids(ids: UnitArray) -> UnitArray:
    """Return prefix-chained ids for ids that each depend on their own unit only."""
    return chain_tokens(ids.view(np.uint64), 1)


def chain_tokens(tokens: npt.NDArray[np.int32] | Words, unit_tokens: int) -> UnitArray:
    """Return the ids of a prompt's units; the last unit may have fewer tokens."""
    growing = Growing(unit_tokens)
    growing.append(tokens)
    return growing.units()


class Growing:
    """A prompt that grows at its end, and its ids. Not thread-safe."""

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self.length = 0
        self._sum = np.uint64(0)
        self._full: UnitArray = NO_UNITS

    def append(self, tokens: npt.NDArray[np.int32] | Words) -> None:
        """Append tokens. Cost: about 20 ns each."""
        count = len(tokens)
        if not count:
            return
        words = tokens.astype(np.uint64)
        words += _positions(self.length, count)
        sums = np.cumsum(_mix(words), dtype=np.uint64)
        sums += self._sum
        unit = self.unit_tokens
        ends = sums[unit - 1 - self.length % unit :: unit]
        if len(ends):
            self._full = np.concatenate((self._full, _as_ids(ends)))
        self.length += count
        self._sum = sums[-1]

    def fork(self) -> Growing:
        """Return another prompt that begins like this one."""
        return copy(self)  # arrays are replaced, never changed

    def full(self, start: int = 0) -> UnitArray:
        """Return the ids of its full units, from number ``start`` on."""
        return self._full[start:]

    def units(self) -> UnitArray:
        """Return the ids of all its units."""
        if self.length % self.unit_tokens == 0:
            return self._full
        return np.concatenate((self._full, _as_ids(np.array([self._sum], np.uint64))))


def _as_ids(sums: Words) -> UnitArray:
    ids: UnitArray = (_mix(sums.copy()) & _ID).view(np.int64)
    return ids
