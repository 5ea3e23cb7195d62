"""Raw: the bytes as they are."""

from __future__ import annotations

from kvkeep.store.codecs.base import Codec, Damaged

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Keeps bytes as they are. One copy each way."""

    name = "raw"
    number = 0

    def bound(self, raw_bytes: int) -> int:
        """As many as there are."""
        return raw_bytes

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Copy ``raw``."""
        del bound_to
        out[: len(raw)] = raw
        return len(raw)

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Copy it back; `Damaged` when the lengths differ."""
        del bound_to
        if len(encoded) != len(out):
            raise Damaged(f"{len(encoded)} raw bytes where there must be {len(out)}")
        out[:] = encoded
