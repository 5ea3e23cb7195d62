"""The contract of codecs: the KV of a block into bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["BlockShape", "Codec", "Damaged", "OtherKey"]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a codec may know of a block's raw bytes.

    ``dtype`` is a key of `kvkeep.core.geometry.DTYPES`, or "" for bytes that mean nothing here. Raw
    bytes are ``parts`` after another (a layer's K, its V, the next layer's K, …; one a layer for
    latent attention), each part a C-ordered array of ``[tokens, heads, dim]`` (layout "NHD") or
    ``[heads, tokens, dim]`` ("HND"). ``parts`` lists (heads, dim) of each. How many tokens follows
    from the number of bytes.
    """

    dtype: str = ""
    layout: str = "NHD"
    parts: tuple[tuple[int, int], ...] = ()


class Damaged(Exception):
    """Encoded bytes that this codec cannot have written, or not for this block."""


class OtherKey(Exception):
    """Encoded bytes that name a key which this codec does not have: not damaged, not readable."""


class Codec(ABC):
    """Encodes raw bytes of blocks of one `BlockShape`. Immutable, used by many threads at once.

    Attributes:
        name: as options spell it: "raw", "lossless", "int8", …
        number: what stands in the header of a record; never given to another codec.
        exact: decoding gives back the very bytes.
    """

    name: str
    number: int
    exact: bool = True

    @abstractmethod
    def bound(self, raw_bytes: int) -> int:
        """Bytes that `encode` may need at most for so many raw ones."""

    @abstractmethod
    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Write the encoded form of ``raw`` to the front of ``out``; how many bytes it took.

        ``out`` has at least `bound` bytes. ``bound_to`` are bytes that name the block (its record
        header); an encrypting codec authenticates them, others ignore them.
        """

    @abstractmethod
    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Fill ``out``, as long as the raw bytes were, from ``encoded``.

        Raises:
            Damaged: ``encoded`` is not what `encode` writes for these lengths and names; what
                ``out`` holds then means nothing. Never reads or writes outside of the two. Only
                an encrypting codec notices every change: under the others a checksum must stand.
            OtherKey: ``encoded`` was encrypted with another key.
        """
