"""Rendezvous hashing: an order of all instances for each key, the same at every router.

Nobody stores who is where: each instance has a weight for a key, and the heaviest one is first. If
an instance goes, only its keys move, and they spread over all others.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.tokens import TokenArray

    Hashes = npt.NDArray[np.uint64]

__all__ = ["heaviest", "name_hash", "prompt_hash", "random_hash"]

_TAIL: Final = 4096  # tokens of a prompt that decide, from its end


def name_hash(*names: str) -> int:
    """Return 64 bits for a name, or several; the same in every process."""
    text = "\n".join(names).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def prompt_hash(tokens: TokenArray, lora: str, salt: str) -> int:
    """Return 64 bits for a prompt: its end, its length and its namespace. Cost: below 20 µs."""
    digest = hashlib.blake2b(tokens[-_TAIL:].tobytes(), digest_size=8)
    digest.update(repr((len(tokens), lora, salt)).encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")


def random_hash() -> int:
    """Return 64 bits for a request of which nothing is known, to spread such requests."""
    return secrets.randbits(64)


def heaviest(hashes: Hashes, key: int) -> int:
    """Return the position of the first in the order of ``key``. Cost: 2 ns each.

    The weight is SplitMix64's finalizer over both (Steele et al., 2014).
    """
    weights = hashes ^ np.uint64(key)
    weights ^= weights >> np.uint64(30)
    weights *= np.uint64(0xBF58476D1CE4E5B9)
    weights ^= weights >> np.uint64(27)
    weights *= np.uint64(0x94D049BB133111EB)
    weights ^= weights >> np.uint64(31)
    return int(weights.argmax())
