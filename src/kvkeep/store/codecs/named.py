"""Codecs by name (in options) and by number (in records)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, did_you_mean, require
from kvkeep.store.codecs.base import Codec, Damaged
from kvkeep.store.codecs.encrypted import ENCRYPTED, EncryptedCodec, inner_number
from kvkeep.store.codecs.lossless import LosslessCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.codecs.base import BlockShape

__all__ = ["CODECS", "codec_name", "codec_of", "make_codec"]

CODECS = ("raw", "lossless", "int8", "fp8", "int4")
"""Names of codecs; a codec's index is its number."""

_RESERVED = {5: "transform"}
"""Numbers of codecs that no longer exist: never given to another one. Their records are misses."""


def make_codec(
    name: str, shape: BlockShape, key: bytes | None = None, old_keys: Sequence[bytes] = ()
) -> Codec:
    """Return the codec ``name`` for blocks of ``shape``, encrypting if there is a ``key``.

    ``old_keys`` are for reading only.

    Raises:
        InvalidValue: the name is unknown, or the codec cannot encode such blocks.
        MissingExtra: the codec needs a package that is not installed.
    """
    if name not in CODECS:
        raise InvalidValue(
            f"codec is {name!r}; it is one of {', '.join(CODECS)}{did_you_mean(name, CODECS)}"
        )
    codec = _make(name, shape)
    return codec if key is None else EncryptedCodec(codec, key, old_keys)


def codec_name(number: int) -> str:
    """Return the name of a codec, by its number in records."""
    inside = inner_number(number)
    if inside is not None:
        return f"encrypted {codec_name(inside)}"
    return CODECS[number] if number < len(CODECS) else _RESERVED.get(number, f"codec {number}")


def codec_of(
    number: int, shape: BlockShape, key: bytes | None = None, old_keys: Sequence[bytes] = ()
) -> Codec | None:
    """Return the codec that decodes records of ``number``. Call it once per number, not per record.

    None if the number is unknown, encrypted and there is no ``key``, or needs an element type that
    ``shape`` does not have.

    Raises:
        MissingExtra: the codec needs a package that is not installed.
    """
    inside = inner_number(number)
    plain = number if inside is None else inside
    if not 0 <= plain < len(CODECS) or (inside is not None and key is None):
        return None
    try:
        codec = _make(CODECS[plain], shape)
    except InvalidValue:
        return None
    if inside is None or key is None:
        return codec
    return EncryptedCodec(codec, key, old_keys, with_id=number >= ENCRYPTED)


def _make(name: str, shape: BlockShape) -> Codec:
    if name == "raw" or (shape.kinds and name != "lossless" and not shape.kinds[0].dtype):
        return RawCodec()  # of states alone, there is nothing that a lossy codec may change
    if shape.kinds:
        exact = "lossless" if name == "lossless" else "raw"
        return KindsCodec([_make(name if kind.dtype else exact, kind) for kind in shape.kinds])
    if name == "lossless":
        return LosslessCodec(shape)
    require("torch", "store")
    if name == "int4":
        from kvkeep.store.codecs.int4 import Int4Codec  # noqa: PLC0415

        return Int4Codec(shape)
    if name == "int8":
        from kvkeep.store.codecs.quantised import Int8Codec  # noqa: PLC0415

        return Int8Codec(shape)
    from kvkeep.store.codecs.quantised import Fp8Codec  # noqa: PLC0415

    return Fp8Codec(shape)


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
