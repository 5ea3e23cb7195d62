"""`KindsCodec`: one codec for each kind of record of a store.

Encoded bytes are those of the kind's codec, then the number of the kind, one byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.codecs.base import Codec, Damaged

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KindsCodec"]


class KindsCodec(Codec):
    """Encodes records whose last raw byte is the number of their kind.

    It has the name and number of the first kind's codec: KV comes first, states last. The kinds of
    a store belong to its namespace, so no other store meets these records.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self._codecs = codecs
        self.name = codecs[0].name
        self.number = codecs[0].number
        self.exact = all(codec.exact for codec in codecs)

    def bound(self, raw_bytes: int) -> int:
        """Return the largest bound of all kinds, and the byte of the kind."""
        return max(codec.bound(max(0, raw_bytes - 1)) for codec in self._codecs) + 1

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode by the codec of the kind that the last byte names."""
        kind = raw[-1]
        size = self._codecs[kind].encode(raw[:-1], out[:-1], bound_to)
        out[size] = kind
        return size + 1

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decode by the codec of the kind that the last byte names."""
        if not len(encoded) or not len(out) or encoded[-1] >= len(self._codecs):
            raise Damaged(f"{len(encoded)} bytes do not end with a kind below {len(self._codecs)}")
        self._codecs[encoded[-1]].decode(encoded[:-1], out[:-1], bound_to)
        out[-1] = encoded[-1]
