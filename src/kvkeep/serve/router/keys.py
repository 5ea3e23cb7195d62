"""`PrefixKeys`: a 64-bit key for each prefix of a prompt, computed for all prefixes in one pass.

    key(t[0..n]) = (root(namespace) + Σ (t[i] + 1) · R[i]  modulo 2⁴²) · 2²² + n

with secret random R. The keys of all prefixes of a prompt take one product and one running sum over
an array; the key of a later block follows from its parent's key. Keys contain neither block sizes
nor the instances' own hashes, so instances that differ in both can be compared.

Two different prefixes of equal length have the same key with a probability of about 2⁻⁴⁰. Without
the secret nobody can search for such a pair, and a collision only places a request badly: KV is not
looked up by these keys (but by those of `kvkeep.core.keys`).
"""

from __future__ import annotations

import hashlib
import secrets
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Numbers = npt.NDArray[np.uint64]

__all__ = ["MAX_TOKENS", "PrefixKeys", "length_of"]

_LENGTH_BITS = 22
_LENGTH = (1 << _LENGTH_BITS) - 1
_ALL = (1 << 64) - 1
MAX_TOKENS = _LENGTH
"""Length of the longest prefix that has a key."""
_FIRST = 1 << 15


class PrefixKeys:
    """Computes keys. Keys of two objects are unrelated.

    Memory: 8 bytes per token of the longest prompt so far. Thread safety: none.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(secrets.randbits(128))
        self._secret = secrets.token_bytes(32)
        self._numbers: Numbers = np.empty(0, np.uint64)

    def root(self, *names: str) -> int:
        """Return the key before the first token, in the namespace of these names."""
        return self.mark(repr(names))

    def mark(self, what: str) -> int:
        """Return the number to add to a key at a block with the further input ``what``."""
        text = what.encode("utf-8", "surrogatepass")
        number = hashlib.blake2b(text, key=self._secret, digest_size=8).digest()
        return int.from_bytes(number, "little") << _LENGTH_BITS & _ALL

    def after(
        self, key: int, tokens: npt.NDArray[np.generic], step: int, marks: Numbers | None = None
    ) -> list[int]:
        """Return the keys of the prefixes 1·``step``, 2·``step``, … tokens longer than ``key``'s.

        A remainder shorter than ``step`` has none. ``marks`` has one addend per step. The prefixes
        must not exceed `MAX_TOKENS`. Cost: about 5 ns per token.
        """
        start = key & _LENGTH
        count = len(tokens) // step
        stop = start + count * step
        if stop > len(self._numbers):
            self._grow(stop)
        terms = tokens[: count * step].astype(np.uint64)
        terms += np.uint64(1)
        terms *= self._numbers[start:stop]
        steps = terms.reshape(count, step).sum(axis=1, dtype=np.uint64)
        if marks is not None:
            steps += marks
        keys = np.cumsum(steps, dtype=np.uint64)
        keys += np.uint64(key - start)
        keys += np.arange(start + step, stop + 1, step, dtype=np.uint64)
        ready: list[int] = keys.tolist()
        return ready

    def after_few(self, key: int, tokens: Sequence[int], step: int) -> list[int]:
        """`after` without marks, for few tokens, where arrays cost more than they save."""
        start = key & _LENGTH
        stop = start + len(tokens)
        if stop > len(self._numbers):
            self._grow(stop)
        numbers = self._numbers[start:stop].tolist()
        keys = []
        for at in range(0, len(tokens) - step + 1, step):
            some = numbers[at : at + step]
            total = sum(map(mul, tokens[at : at + step], some)) + sum(some)
            key = (key + total + step) & _ALL
            keys.append(key)
        return keys

    def _grow(self, length: int) -> None:
        length = max(_FIRST, 1 << (length - 1).bit_length())
        more = self._random.integers(
            0, _ALL, length - len(self._numbers), dtype=np.uint64, endpoint=True
        )
        more <<= np.uint64(_LENGTH_BITS)
        self._numbers = np.concatenate((self._numbers, more))


def length_of(key: int) -> int:
    """Return the length, in tokens, of the prefix with this key."""
    return key & _LENGTH
