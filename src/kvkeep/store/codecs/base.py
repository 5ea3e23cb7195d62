"""The contract of codecs: encode the KV of a block into bytes, and decode it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["BlockShape", "Codec", "Damaged", "OtherKey"]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The structure of a block's raw bytes.

    Raw bytes are a sequence of parts (a layer's K, its V, the next layer's K, …; one per layer for
    latent attention). Each part is a C-ordered array. The number of tokens follows from the number
    of bytes.

    Attributes:
        dtype: a key of `kvkeep.core.geometry.DTYPES`, or "" for opaque bytes.
        layout: order of a part's axes: "NHD" is ``[tokens, heads, dim]``, "HND" is
            ``[heads, tokens, dim]``.
        parts: (heads, dim) of each part.
        kinds: for a store with several kinds of records, the structure of each. The last byte of
            the raw bytes is then the number of the kind, which the bytes before it have; the other
            attributes stay empty. Opaque kinds are states: every codec keeps them exact.
    """

    dtype: str = ""
    layout: str = "NHD"
    parts: tuple[tuple[int, int], ...] = ()
    kinds: tuple[BlockShape, ...] = ()


class Damaged(Exception):
    """The encoded bytes are damaged: this codec never writes them for this block."""


class OtherKey(Exception):
    """The encoded bytes name a key that this codec does not have. They need not be damaged."""


class Codec(ABC):
    """Encodes the raw bytes of blocks of one `BlockShape`.

    Thread safety: codecs are immutable and used by many threads at once.

    Attributes:
        name: as in options: "raw", "lossless", "int8", …
        number: identifies the codec in a record's header; never reused.
        exact: whether decoding returns the identical bytes.
    """

    name: str
    number: int
    exact: bool = True

    @abstractmethod
    def bound(self, raw_bytes: int) -> int:
        """Return the maximum encoded size of ``raw_bytes`` bytes."""

    @abstractmethod
    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode ``raw`` into the front of ``out``, of at least `bound` bytes; return the size.

        ``bound_to`` are bytes that name the block (its record header). An encrypting codec
        authenticates them, others ignore them.
        """

    @abstractmethod
    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decode ``encoded`` into ``out``, which has exactly the raw size.

        Never reads or writes outside of the two buffers, whatever ``encoded`` contains.

        Raises:
            Damaged: ``encoded`` is invalid for this size and ``bound_to``; ``out`` is undefined.
                Only an encrypting codec detects every change: others rely on the checksum of the
                record.
            OtherKey: ``encoded`` was encrypted with another key.
        """
