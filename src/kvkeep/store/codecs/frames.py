"""Frames: bytes compressed by zstd in Blosc buffers, each behind its length.

Encoded bytes of a frame:

    uint32, little-endian    bit 31: not compressed; bits 0 … 30: length of the frame's data
    data                     raw bytes, or a Blosc 1 buffer (zstd) of one Blosc block
"""

from __future__ import annotations

import struct

import numpy as np

from kvkeep.core.errors import require
from kvkeep.store.codecs.base import Damaged

__all__ = ["FRAME_BYTES", "FRAME_HEAD", "BloscFrames"]

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
