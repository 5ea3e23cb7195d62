"""Prefix-chained ids of units, from tokens or from ids of single units, a whole prompt at a time.

    sum[i] = mix(token[0] + 0·K) + … + mix(token[i] + i·K)      mod 2⁶⁴
    id of the unit that ends at token i = mix(sum[i]), without its highest bit

``mix`` is splitmix64's finaliser and K its increment. A sum can be taken of all prefixes at once,
which a hash that goes from token to token cannot; so a prompt costs a few passes of NumPy.

Two different prefixes share an id with a chance of 2⁻⁶³, unless somebody looks for such: this is no
cryptographic hash, and is for traces alone, which can lie about nothing but themselves. What is
written to files for others to read is made with a key, by `capture`.
"""

from __future__ import annotations

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
    """splitmix64's finaliser; wraps around as it must. ``words`` are consumed."""
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


def _positions(start: int, count: int) -> Words:
    return np.arange(start, start + count, dtype=np.uint64) * _STEP


def words_of(seed: int, count: int) -> Words:
    """``count`` stand-ins for tokens that nothing else has: the text of a synthetic segment."""
    return _mix(_positions(1, count) + np.uint64(seed & (2**64 - 1)))


def fresh_ids(number: int, count: int) -> UnitArray:
    """Ids that occur once, for a prompt of which only the length is known: its ``number`` is one.

    Two numbers share an id with a chance of 2⁻⁶³.
    """
    return chain_tokens(words_of(number * 0x2545F4914F6CDD1D + 1, count), 1)


def chain_ids(ids: UnitArray) -> UnitArray:
    """Chained ids, from ids of what is in each unit alone; what is chained already stays so."""
    return chain_tokens(ids.view(np.uint64), 1)


def chain_tokens(tokens: npt.NDArray[np.int32] | Words, unit_tokens: int) -> UnitArray:
    """The ids of a prompt's units, the last one of fewer tokens where they do not go evenly."""
    growing = Growing(unit_tokens)
    growing.append(tokens)
    return growing.units()


class Growing:
    """A prompt that grows at its end; its ids are made as it does. Thread safety: none."""

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self.length = 0
        self._sum = np.uint64(0)
        self._full: UnitArray = NO_UNITS

    def append(self, tokens: npt.NDArray[np.int32] | Words) -> None:
        """More tokens. Cost: about 20 ns each."""
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
        """Another prompt that begins like this one."""
        other = Growing(self.unit_tokens)
        other.length, other._sum, other._full = self.length, self._sum, self._full
        return other

    def full(self, start: int = 0) -> UnitArray:
        """The ids of its full units from number ``start`` on."""
        return self._full[start:]

    def units(self) -> UnitArray:
        """The ids of all its units."""
        if self.length % self.unit_tokens == 0:
            return self._full
        return np.concatenate((self._full, _as_ids(np.array([self._sum], np.uint64))))


def _as_ids(sums: Words) -> UnitArray:
    ids: UnitArray = (_mix(sums.copy()) & _ID).view(np.int64)
    return ids
