"""Lossless: byte planes compressed by zstd.

Signs and exponents of floating point numbers repeat, mantissas are noise. Blosc groups the bytes of
many numbers by significance (all highest bytes, then all second ones, …), so zstd finds the
repeating bytes side by side and skips the others quickly.

Encoded bytes are frames (`Frames`), one per mebibyte of raw bytes, the last one
shorter.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import require
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs.base import Codec, Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.codecs.base import BlockShape

__all__ = ["LosslessCodec"]

_SAMPLES = 4
_SAMPLE = 1 << 16
_WORTH = 0.97  # compressed / raw size of the sample; above it, decoding costs more than it saves
FRAME_BYTES = 1 << 20
"""The most raw bytes of a frame."""

FRAME_HEAD = 4
"""Bytes by which a frame that does not shrink exceeds its raw bytes."""

_LENGTH = struct.Struct("<I")
_AS_IS = 1 << 31
_BLOSC = struct.Struct("<BBBBIII")  # version, zstd's, flags, item size, raw, block, whole size
_BLOSC_VERSION = 2
_BLOSC_ZSTD = 4  # in the flags' highest three bits
_BLOSC_COPIED = 2  # flag of uncompressed buffers; frames store those without Blosc


class LosslessCodec(Codec):
    """Byte planes and zstd: exact, 1.2 to 1.6 times smaller for floats.

    Data that does not compress (random or already compressed bytes) is detected on a sample of
    256 KiB and stored raw. Opaque bytes are tried as items of 2, 4 and 1 bytes.

    The GIL is released while Blosc works, in one thread per call. Memory: one frame beside the two
    buffers. Needs numcodecs (extra ``store``).
    """

    name = "lossless"
    number = 1

    def __init__(self, shape: BlockShape) -> None:
        self._frames = BloscFrames()
        self._item_sizes = (DTYPES[shape.dtype],) if shape.dtype else (2, 4, 1)

    def bound(self, raw_bytes: int) -> int:
        """Return the raw size plus 4 bytes per mebibyte."""
        return raw_bytes + FRAME_HEAD * -(-raw_bytes // FRAME_BYTES)

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Compress frame by frame: 0.5 GB/s per core on bfloat16, 6 GB/s on random bytes."""
        del bound_to
        item_size = self._item_size(raw)
        at = 0
        for frame in _cut(raw):
            at += self._frames.write(frame, item_size, out[at:])
        return at

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decompress directly into ``out``: 1.6 GB/s per core on bfloat16."""
        del bound_to
        at = 0
        for frame in _cut(out):
            at += self._frames.read(encoded[at:], frame)
        if at != len(encoded):
            raise Damaged(f"{len(encoded) - at} bytes after the last frame")

    def _item_size(self, raw: memoryview) -> int:
        """Return the item size that compresses a sample best; 0 if compression does not pay."""
        if len(raw) <= _SAMPLES * _SAMPLE:
            if len(self._item_sizes) == 1:
                return self._item_sizes[0]  # small: compress it directly instead of a sample
            sample = raw
        else:
            step = (len(raw) - _SAMPLE) // (_SAMPLES - 1) & ~4095  # whole items of any size
            pieces = [raw[i * step : i * step + _SAMPLE] for i in range(_SAMPLES)]
            sample = memoryview(b"".join(pieces))
        if not sample:
            return 0
        sizes = {
            len(self._frames.compress(sample, size)): size for size in reversed(self._item_sizes)
        }
        smallest = min(sizes)
        return sizes[smallest] if smallest < _WORTH * len(sample) else 0


def _cut(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), FRAME_BYTES):
        yield buffer[start : start + FRAME_BYTES]


class BloscFrames:
    """Compresses and decompresses single frames. Needs numcodecs (extra ``store``).

    Thread safety: all methods. The GIL is released while Blosc works, in the calling thread.
    """

    def __init__(self) -> None:
        self._blosc = require("numcodecs.blosc", "store")

    def compress(self, raw: memoryview, item_size: int) -> bytes:
        """Return a Blosc buffer of ``raw``, whose numbers have ``item_size`` bytes."""
        if len(raw) % item_size:
            item_size = 1
        items = np.frombuffer(raw, dtype=f"u{item_size}")
        shuffle = self._blosc.SHUFFLE if item_size > 1 else self._blosc.NOSHUFFLE
        # One Blosc block per frame, so Blosc has no work for threads of its own.
        packed: bytes = self._blosc.compress(items, b"zstd", 1, shuffle, FRAME_BYTES)
        return packed

    def write(self, raw: memoryview, item_size: int, out: memoryview) -> int:
        """Write the frame of ``raw`` to the front of ``out``; return its size.

        ``item_size`` 0: do not try to compress. ``out`` has room for ``raw`` and `FRAME_HEAD`.
        """
        packed = self.compress(raw, item_size) if item_size and len(raw) else None
        if packed is None or len(packed) >= len(raw):
            _LENGTH.pack_into(out, 0, _AS_IS | len(raw))
            body: bytes | memoryview = raw
        else:
            _LENGTH.pack_into(out, 0, len(packed))
            body = packed
        out[FRAME_HEAD : FRAME_HEAD + len(body)] = body
        return FRAME_HEAD + len(body)

    def read(self, encoded: memoryview, raw: memoryview) -> int:
        """Fill ``raw`` from the frame at the front of ``encoded``; return the frame's size.

        Raises:
            Damaged: there is no frame of that many raw bytes.
        """
        if len(encoded) < FRAME_HEAD:
            raise Damaged(f"the encoded bytes end after {len(encoded)} bytes of a frame")
        length: int = _LENGTH.unpack_from(encoded)[0]
        size = length & ~_AS_IS
        body = encoded[FRAME_HEAD : FRAME_HEAD + size]
        if len(body) != size:
            raise Damaged(f"a frame of {size} bytes ends after {len(body)}")
        if length & _AS_IS:
            if size != len(raw):
                raise Damaged(f"a frame of {size} bytes where {len(raw)} are expected")
            raw[:] = body
        else:
            self._decompress(body, raw)
        return FRAME_HEAD + size

    def _decompress(self, packed: memoryview, raw: memoryview) -> None:
        """Decompress ``packed``, after a check of the sizes in its header, which Blosc trusts."""
        if len(packed) < _BLOSC.size:
            raise Damaged(f"{len(packed)} bytes are too short for a Blosc buffer")
        version, _, flags, item_size, raw_size, _, size = _BLOSC.unpack_from(packed)
        if (
            (version, flags >> 5, raw_size, size)
            != (_BLOSC_VERSION, _BLOSC_ZSTD, len(raw), len(packed))
            or item_size not in (1, 2, 4)
            or flags & _BLOSC_COPIED
        ):
            raise Damaged(
                f"a Blosc buffer of version {version}, flags {flags:#x}, items of {item_size} "
                f"bytes, {size} bytes for {raw_size}; {len(packed)} for {len(raw)} are expected"
            )
        try:
            self._blosc.decompress(packed, raw)
        except RuntimeError as error:
            raise Damaged(f"Blosc cannot decompress a frame: {error}") from error
