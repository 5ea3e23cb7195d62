"""`PrefixKeys`: a 64-bit key for each prefix of a prompt, computed for all prefixes in one pass.

    key(t[0..n]) = (root(namespace) + Σ (t[i] + 1) · R[i]  modulo 2⁴²) · 2²² + n

with secret random R. The keys of all prefixes of a prompt take one product and one running sum over
an array; the key of a later block follows from its parent's key. Keys contain neither block sizes
nor the instances' own hashes, so instances that differ in both can be compared.

Two different prefixes of equal length have the same key with a probability of about 2⁻⁴⁰. Without
the secret nobody can search for such a pair, and a collision only places a request badly: KV is not
looked up by these keys (but by those of `kvkeep.core.keys`).

Prompts that begin with a public prefix, which all salts share, have `PublicKeys`: their salt counts
from the first private block on. So the public part has one key for all salts, as servers of ours
announce it:

    PUBLIC_SALT ── public part ── mark of the salt + first private block ── …

vLLM announces the public part under each salt that sent it. With `KVKeepConnector` and the same
prefixes it shares that part in its tiers, of which there are no events. So where a whole public
part is held under one salt, it counts as held for the others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.tokens import TOKEN_DTYPE
from kvkeep.serve.kv_events.wire import PUBLIC_SALT, salt_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvkeep.core.public import PublicPrefixes
    from kvkeep.core.tokens import TokenArray

    Numbers = npt.NDArray[np.uint64]

__all__ = ["MAX_TOKENS", "PrefixKeys", "PublicKeys", "length_of"]


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


_SALTS = 2
"""Salts that are remembered of each place: those that stored the beginning of a prefix last."""


class PublicKeys:
    """Computes keys with ``keys``; ``prefixes`` are the declared rows. Thread safety: none.

    Cost: nothing without prefixes, or for prompts that begin with none; else that of one lookup
    more, and of one of the public part for each salt that is remembered: two a place.
    """

    def __init__(self, keys: PrefixKeys, prefixes: PublicPrefixes) -> None:
        self._keys = keys
        self._prefixes = prefixes
        self._salts: dict[object, deque[tuple[str, str]]] = {}

    def stored(
        self, place: object, lora: str, salt: str, tokens: Sequence[int], block_size: int
    ) -> None:
        """Note that a place stored the first blocks of a prompt, under a salt."""
        if salt == PUBLIC_SALT or not self._prefixes.begins(
            np.array(tokens[:block_size], TOKEN_DTYPE)
        ):
            return
        known = self._salts.setdefault(place, deque(maxlen=_SALTS))
        if (lora, salt) in known:
            known.remove((lora, salt))
        known.append((lora, salt))

    def forget(self, place: object) -> None:
        """Forget the salts of a place."""
        self._salts.pop(place, None)

    def after(self, tokens: TokenArray, step: int, lora: str, salt: str) -> list[int]:
        """Return the keys of the prefixes of a prompt, ``step`` tokens apart.

        Empty if it has no public part; then those of its salt are all.
        """
        tokens = tokens[:MAX_TOKENS]
        public = self._prefixes.length(tokens, step)
        if not public:
            return []
        shared = self._keys.after(self._keys.root(lora, PUBLIC_SALT), tokens[:public], step)
        marks = np.zeros((len(tokens) - public) // step, np.uint64)
        # As an event says of the first private block, see `CacheBlocks`.
        marks[:1] = self._keys.mark(repr([salt_digest(salt)]))
        return shared + self._keys.after(shared[-1], tokens[public:], step, marks)

    def of_others(self, tokens: TokenArray, step: int, lora: str, salt: str) -> Iterator[list[int]]:
        """Yield the keys of the public part under other salts that are remembered.

        They count only where all of them are held: a part may be that of another prompt.
        """
        tokens = tokens[:MAX_TOKENS]
        public = self._prefixes.length(tokens, step)
        others = {one for known in self._salts.values() for one in known} if public else ()
        for adapter, other in others:
            if adapter == lora and other != salt:
                yield self._keys.after(self._keys.root(lora, other), tokens[:public], step)
