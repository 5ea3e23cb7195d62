"""A reader of int4's format, independent of the codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from codec_blocks import numbers_of

from kvkeep.core.geometry import DTYPES

if TYPE_CHECKING:
    from kvkeep.store.codecs import BlockShape

__all__ = ["read_int4"]


def read_int4(  # noqa: PLR0912 - the format from begin to end, as the page has it
    encoded: bytes, shape: BlockShape, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and the largest error allowed of each, as docs/codecs.md says the bytes are read.

    Of a part that was kept as it is the error is 0. Loops and NumPy: nothing of the codec's own.
    """
    at = -(-len(shape.parts) // 8) * 8
    item = DTYPES[shape.dtype]
    numbers, errors = [], []
    for head, (heads, dim) in zip(encoded, shape.parts, strict=False):
        kind, bits = head >> 4, head & 15
        if kind == 0:
            count = heads * tokens * dim
            numbers.append(numbers_of(encoded[at : at + count * item], shape.dtype))
            errors.append(np.zeros(count))
            at += -(-count * item // 8) * 8
            continue
        width = dim
        if dim > 256:
            width = next((w for w in range(128, 63, -1) if dim % w == 0), dim)
        rows = heads * dim // width
        run = 128 if width <= 128 else 64
        runs = max(1, tokens // run)
        start = at
        base = float(np.frombuffer(encoded, "<f4", 1, at)[0])
        at += 4
        rotation = 0.0
        if kind == 3:
            rotation = float(np.frombuffer(encoded, "<f4", 1, at)[0])
            at += 4
        centres = np.zeros((rows, width))
        if kind == 2 and tokens >= 128:
            upper = np.frombuffer(encoded, "<u2", rows * width, at).astype("<u4") << 16
            centres = upper.view("<f4").astype(float).reshape(rows, width)
            at += 2 * rows * width
        group = 1
        if kind == 2:
            group = next((w for w in range(min(width, 64), 31, -1) if width % w == 0), width)
        along, groups = (tokens, width // group) if kind == 2 else (runs, width)
        count = rows * along * groups
        exponents = np.frombuffer(encoded, np.uint8, count, at).astype(float)
        zeros = np.frombuffer(encoded, np.int8, count, at + count).astype(float)
        at = start + -(-(at + 2 * count - start) // 8) * 8
        lengths = [run] * (runs - 1) + [tokens - run * (runs - 1)]
        codes = np.zeros((rows, tokens, width))
        whole = runs if lengths[-1] == run else runs - 1
        for first, many in ((0, whole), (whole, runs - whole)):
            if not many:
                continue
            length = lengths[first]
            unit = np.zeros((rows, many, -(-length * width // 64) * 64), dtype=int)
            shift = 0
            for w in {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 8: [8]}[bits]:
                size = unit.shape[2] * w // 8
                plane = np.frombuffer(encoded, np.uint8, rows * many * size, at)
                plane = plane.reshape(rows, many, size).astype(int)
                at += plane.size
                for place in range(8 // w):
                    share = plane >> (place * w) & ((1 << w) - 1)
                    unit[:, :, place * size : (place + 1) * size] |= share << shift
                shift += w
            unit = unit[:, :, : length * width].reshape(rows, many * length, width)
            codes[:, first * run : first * run + many * length] = unit
        scales = (base * np.exp2(-exponents / 16)).reshape(rows, along, groups)
        zeros = zeros.reshape(rows, along, groups)
        if kind != 2:
            which = np.minimum(np.arange(tokens) // run, runs - 1)
            scales, zeros = scales[:, which], zeros[:, which]
        scales, zeros = np.repeat(scales, group, axis=2), np.repeat(zeros, group, axis=2)
        meant = (codes + zeros - 2 ** (bits - 1)) * scales + centres[:, None]
        error = scales / 2 * 1.001 + np.abs(centres[:, None]) * 2.0**-22
        if kind == 3:
            half = width // 2
            angles = np.arange(tokens)[:, None] * rotation ** (-np.arange(half) / half)
            cos, sin = np.cos(angles), np.sin(angles)
            first, second = meant[..., :half].copy(), meant[..., half:].copy()
            meant = np.concatenate([first * cos - second * sin, second * cos + first * sin], 2)
            error = np.tile(error[..., :half] + error[..., half:], 2)
        if shape.layout == "NHD":
            meant, error = (one.transpose(1, 0, 2).reshape(-1) for one in (meant, error))
        else:  # a wide head is several rows, side by side
            meant, error = (
                one.reshape(heads, -1, tokens, width).transpose(0, 2, 1, 3).reshape(-1)
                for one in (meant, error)
            )
        numbers.append(meant)
        errors.append(error)
        at = -(-at // 8) * 8
    assert at == len(encoded)
    return np.concatenate(numbers), np.concatenate(errors)
