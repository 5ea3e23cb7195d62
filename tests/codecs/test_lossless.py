"""Lossless: gain, incompressible data, lying headers."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from codec_blocks import LLAMA, block, decode, encode, token_bytes

from kvkeep.store.codecs import BlockShape, Damaged, make_codec

MIB = 1 << 20
AS_IS = 1 << 31


def lengths(encoded: bytes) -> list[int]:
    """The length words of the frames."""
    found, at = [], 0
    while at < len(encoded):
        (word,) = struct.unpack_from("<I", encoded, at)
        found.append(word)
        at += 4 + (word & ~AS_IS)
    assert at == len(encoded)
    return found


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 63, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7], ids=str
)
def test_frames_of_every_length(size):
    raw = (block(LLAMA, -(-size // token_bytes(LLAMA))))[:size]
    for shape in (BlockShape(), LLAMA):
        codec = make_codec("lossless", shape)
        encoded = encode(codec, raw)
        assert len(lengths(encoded)) == -(-size // MIB)
        assert decode(codec, encoded, size) == raw


def test_empty_input_stays_empty():
    codec = make_codec("lossless", BlockShape())
    assert encode(codec, b"") == b""
    assert decode(codec, b"", 0) == b""


@pytest.mark.parametrize(
    ("dtype", "gain"),
    [("bfloat16", 1.4), ("float16", 1.1), ("float32", 1.15), ("float8_e4m3fn", 1.15)],
)
def test_numbers_become_smaller(dtype, gain):
    shape = BlockShape(dtype, "NHD", ((8, 128),) * 4)
    raw = block(shape, 256)
    assert len(raw) / len(encode(make_codec("lossless", shape), raw)) > gain


def test_the_item_size_of_opaque_bytes_is_found():
    """Opaque pages of bfloat16 compress as well as typed ones."""
    shape = BlockShape("bfloat16", "NHD", ((8, 128),) * 4)
    raw = block(shape, 256)
    known = len(encode(make_codec("lossless", shape), raw))
    assert len(encode(make_codec("lossless", BlockShape()), raw)) == known


@pytest.mark.parametrize("size", [1000, 100_000, 3 * MIB + 5])
@pytest.mark.parametrize("shape", [BlockShape(), LLAMA], ids=["opaque", "bfloat16"])
def test_noise_is_stored_raw(size, shape):
    raw = os.urandom(size)
    encoded = encode(make_codec("lossless", shape), raw)
    assert all(word & AS_IS for word in lengths(encoded))
    assert len(encoded) == size + 4 * -(-size // MIB)


def test_noise_among_numbers_costs_only_its_own_frame():
    shape = BlockShape("bfloat16", "NHD", ((8, 128),) * 2)
    numbers = block(shape, 256)
    assert len(numbers) == MIB
    raw = numbers + os.urandom(MIB) + numbers
    codec = make_codec("lossless", shape)
    encoded = encode(codec, raw)
    assert [bool(word & AS_IS) for word in lengths(encoded)] == [False, True, False]
    assert decode(codec, encoded, len(raw)) == raw


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"\x03", "version 3"),  # of the Blosc format
        (2, b"\x11", "flags 0x11"),  # another compressor's bits
        (2, b"\x93", "flags 0x93"),  # "copied": its raw bytes would be read from behind the header
        (3, b"\x08", "items of 8"),
        (4, struct.pack("<I", 0xFFFFFFFF), "for 4294967295"),  # raw bytes: would write beyond out
        (4, struct.pack("<I", 2 * MIB), "for 2097152"),
        (12, struct.pack("<I", 0xFFFFFFF0), "4294967280 bytes"),  # its own size: would read beyond
        (12, struct.pack("<I", 0), "0 bytes"),
    ],
)
def test_lying_headers_are_damage(at, value, said):
    shape = BlockShape("bfloat16", "NHD", ((8, 128),) * 2)
    raw = block(shape, 256)
    codec = make_codec("lossless", shape)
    encoded = bytearray(encode(codec, raw))
    encoded[4 + at : 4 + at + len(value)] = value
    with pytest.raises(Damaged, match=said):
        decode(codec, bytes(encoded), len(raw))


def test_a_length_beyond_the_end_is_damage():
    codec = make_codec("lossless", LLAMA)
    raw = block(LLAMA, 64)
    encoded = bytearray(encode(codec, raw))
    for length in (len(encoded), MIB, AS_IS - 1, AS_IS | len(raw), AS_IS | (AS_IS - 1), 0, 15):
        encoded[:4] = struct.pack("<I", length)
        with pytest.raises(Damaged):
            decode(codec, bytes(encoded), len(raw))


@pytest.mark.parametrize("item", [1, 2, 4])
def test_blosc_survives_hostile_data_behind_a_valid_header(item):
    """With valid lengths and header, hostile data must not make the C code leave its buffers."""
    dtype = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}[item]
    shape = BlockShape(dtype, "NHD", ((2, 64),) * 4)
    raw = block(shape, 128)
    codec = make_codec("lossless", shape)
    encoded = encode(codec, raw)
    assert len(encoded) < len(raw)
    random = np.random.default_rng(item)
    found = 0
    for turn in range(1500):
        bad = bytearray(encoded)
        first = 4 + 16
        if turn % 3 == 0:
            bad[first:] = random.bytes(len(bad) - first)
        elif turn % 3 == 1:  # the table of block starts, zstd's own headers, Blosc's block size
            for at in random.integers(first, first + 40, 2):
                bad[at] = random.integers(256)
            bad[4 + 8 : 4 + 12] = random.bytes(4)
        else:
            for at in random.integers(first, len(bad), 4):
                bad[at] ^= 1 << random.integers(8)
        try:
            decode(codec, bytes(bad), len(raw))  # checks the guards
        except Damaged:
            found += 1
    assert found > 500


def test_the_library_s_settings_are_left_alone():
    """numcodecs has global settings, which other code in the process may rely on."""
    blosc = pytest.importorskip("numcodecs.blosc")
    before = blosc.use_threads, blosc.get_nthreads()
    codec = make_codec("lossless", LLAMA)
    raw = block(LLAMA, 300)
    assert decode(codec, encode(codec, raw), len(raw)) == raw
    assert (blosc.use_threads, blosc.get_nthreads()) == before
