"""Raw: unchanged bytes."""

from __future__ import annotations

from kvkeep.store.codecs.base import Codec, Damaged

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Copies the bytes unchanged."""

    name = "raw"
    number = 0

    def bound(self, raw_bytes: int) -> int:
        """Return ``raw_bytes``."""
        return raw_bytes

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Copy ``raw``."""
        del bound_to
        out[: len(raw)] = raw
        return len(raw)

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Copy ``encoded``; raise `Damaged` if the lengths differ."""
        del bound_to
        if len(encoded) != len(out):
            raise Damaged(f"{len(encoded)} raw bytes where {len(out)} are expected")
        out[:] = encoded
