"""Codecs by name (in options) and by number (in records)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, did_you_mean, require
from kvkeep.store.codecs.encrypted import ENCRYPTED, EncryptedCodec, inner_number
from kvkeep.store.codecs.kinds import KindsCodec
from kvkeep.store.codecs.lossless import LosslessCodec
from kvkeep.store.codecs.raw import RawCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.codecs.base import BlockShape, Codec

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
        from kvkeep.store.codecs.int8 import Int8Codec  # noqa: PLC0415

        return Int8Codec(shape)
    from kvkeep.store.codecs.int8 import Fp8Codec  # noqa: PLC0415

    return Fp8Codec(shape)
