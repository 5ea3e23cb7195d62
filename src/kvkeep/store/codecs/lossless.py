"""Lossless: byte planes compressed by zstd.

Signs and exponents of floating point numbers repeat, mantissas are noise. Blosc groups the bytes of
many numbers by significance (all highest bytes, then all second ones, …), so zstd finds the
repeating bytes side by side and skips the others quickly.

Encoded bytes are frames (`kvkeep.store.codecs.frames`), one per mebibyte of raw bytes, the last one
shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs.base import Codec, Damaged
from kvkeep.store.codecs.frames import FRAME_BYTES, FRAME_HEAD, BloscFrames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.codecs.base import BlockShape

__all__ = ["LosslessCodec"]

_SAMPLES = 4
_SAMPLE = 1 << 16
_WORTH = 0.97  # compressed / raw size of the sample; above it, decoding costs more than it saves


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
