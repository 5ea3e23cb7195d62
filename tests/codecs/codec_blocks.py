"""Blocks of every kind, a round trip with guarded buffers, readers of the documented formats."""

from __future__ import annotations

import os

import numpy as np
import torch

from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs import BlockShape, make_codec

GUARD = 4096
EXACT = ("raw", "lossless")
KEY = bytes(range(32))
NAME = b"the header of a record"

LLAMA = BlockShape("bfloat16", "NHD", ((2, 32), (2, 32)) * 2)
SHAPES = {
    "nhd": LLAMA,
    "hnd": BlockShape("bfloat16", "HND", ((2, 32), (2, 32)) * 2),
    "float16": BlockShape("float16", "NHD", ((4, 64), (4, 64))),
    "float32": BlockShape("float32", "HND", ((3, 80), (3, 80))),
    "latent": BlockShape("bfloat16", "NHD", ((1, 576),) * 3),
    "uneven": BlockShape("float16", "HND", ((2, 192), (2, 128), (1, 13), (5, 1))),
    "fp8": BlockShape("float8_e4m3fn", "NHD", ((2, 64),) * 4),
    "int8": BlockShape("int8", "NHD", ((2, 64),) * 4),
    "opaque": BlockShape(),
}
WIDE = [name for name, shape in SHAPES.items() if shape.dtype and DTYPES[shape.dtype] > 1]


def token_bytes(shape: BlockShape) -> int:
    if not shape.dtype:
        return 997
    return sum(heads * dim for heads, dim in shape.parts) * DTYPES[shape.dtype]


def block(shape: BlockShape, tokens: int, seed: int = 0, spread: float = 1.0) -> bytes:
    """Random-normal raw bytes; of a shape without numbers, bytes that repeat."""
    generator = torch.Generator().manual_seed(seed)
    if not shape.dtype or shape.dtype == "int8":
        numbers = torch.randn(token_bytes(shape) * tokens, generator=generator)
        return bytes((numbers * 20 * spread).to(torch.int8).numpy().tobytes())
    numbers = torch.randn(
        token_bytes(shape) * tokens // DTYPES[shape.dtype], generator=generator
    ).mul_(spread)
    return raw_of(numbers, shape.dtype)


def raw_of(numbers: torch.Tensor, dtype: str) -> bytes:
    return bytes(numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes())


def numbers_of(raw: bytes | memoryview, dtype: str) -> np.ndarray:
    tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    return tensor.double().numpy()


def every_codec(shape: BlockShape, key: bytes | None = None):
    narrow = not shape.dtype or DTYPES[shape.dtype] == 1
    names = EXACT if narrow else (*EXACT, "int8", "fp8", "int4")
    return [make_codec(name, shape, key) for name in names]


class Guarded:
    """A writable buffer between two guards that must not change."""

    def __init__(self, size: int) -> None:
        self.all = np.full(size + 2 * GUARD, 0xA5, dtype=np.uint8)
        self.view = memoryview(self.all)[GUARD : GUARD + size]

    def check(self) -> None:
        assert (self.all[:GUARD] == 0xA5).all(), "written before the buffer"
        assert (self.all[len(self.all) - GUARD :] == 0xA5).all(), "written behind the buffer"


def encode(codec, raw: bytes, name: bytes = NAME) -> bytes:
    given = memoryview(bytearray(raw))
    out = Guarded(codec.bound(len(raw)))
    size = codec.encode(given, out.view, name)
    out.check()
    assert given == raw, "encoding changed what it was given"
    assert 0 <= size <= len(out.view)
    return bytes(out.view[:size])


def decode(codec, encoded: bytes, raw_size: int, name: bytes = NAME) -> bytes:
    out = Guarded(raw_size)
    try:
        codec.decode(memoryview(bytearray(encoded)), out.view, name)
    finally:
        out.check()
    return bytes(out.view)


def spoiled(encoded: bytes, seed: int) -> bytes:
    """``encoded`` with damaged bits, bytes, length, or all of them."""
    random = np.random.default_rng(seed)
    bad = bytearray(encoded)
    kind = seed % 6
    if kind == 0:
        for at in random.integers(0, len(bad), random.integers(1, 6)):
            bad[at] ^= 1 << random.integers(8)
    elif kind == 1:  # headers are at the front
        for at in random.integers(0, min(64, len(bad)), 2):
            bad[at] = random.integers(256)
    elif kind == 2:
        del bad[random.integers(len(bad)) :]
    elif kind == 3:
        bad += os.urandom(int(random.integers(1, 100)))
    elif kind == 4:
        bad = bytearray(random.bytes(len(bad)))
    else:
        start, end = sorted(random.integers(0, len(bad) + 1, 2))
        bad[start:end] = random.bytes(end - start)
    return bytes(bad)


def read_quantised(encoded: bytes, shape: BlockShape, tokens: int, codec: str):
    """Numbers and the scale of each, as docs/codecs.md says the bytes are to be read.

    Of a part that was kept as it is the scale is 0. Loops and NumPy: nothing of the codec's own.
    """
    at = -(-len(shape.parts) // 8) * 8
    item = DTYPES[shape.dtype]
    numbers, scales = [], []
    for kind, (heads, dim) in zip(encoded, shape.parts, strict=False):
        rows, channels = (heads, dim) if shape.layout == "HND" else (1, heads * dim)
        count = rows * tokens * channels
        if kind == 0:
            numbers.append(numbers_of(encoded[at : at + count * item], shape.dtype))
            scales.append(np.zeros(count))
            at += -(-count * item // 8) * 8
            continue
        if kind == 1:
            run, width = 64, 1
        else:
            fitting = [w for w in range(32, min(dim, 64) + 1) if dim % w == 0]
            width = max(fitting) if dim > 32 and fitting else dim
            run = -(-64 // width)
        runs = max(1, tokens // run)
        shares = rows * runs * (channels // width)
        upper = np.frombuffer(encoded, "<u2", shares, at).astype("<u4") << 16
        share = upper.view("<f4").astype(float).reshape(rows, runs, channels // width)
        codes = np.frombuffer(encoded, np.uint8, count, at + 2 * shares)
        which = np.minimum(np.arange(tokens) // run, runs - 1)
        full = np.repeat(share[:, which], width, axis=2).reshape(-1)
        meant = codes.view(np.int8).astype(float) if codec == "int8" else _e4m3()[codes]
        numbers.append(meant * full)
        scales.append(full)
        at += -(-(2 * shares + count) // 8) * 8
    assert at == len(encoded)
    return np.concatenate(numbers), np.concatenate(scales)


def _e4m3() -> np.ndarray:
    """The 256 numbers of E4M3: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    return np.where(codes & 128, -size, size)
