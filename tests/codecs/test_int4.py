"""int4: error bounds, the format, rotations found in keys, damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_blocks import (
    SHAPES,
    WIDE,
    block,
    decode,
    encode,
    numbers_of,
    raw_of,
    token_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_reader import read_int4
from test_quantised import HALF_ULP, any_block

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs import BlockShape, Damaged, make_codec
from kvkeep.store.codecs.int4 import find_base, turn, turns

SETTINGS = ("int4",)


def check_block(name: str, shape: BlockShape, raw: bytes, codec=None) -> bytes:
    """Assert a round trip within the bounds and as documented; return the encoded bytes."""
    codec = codec or make_codec(name, shape)
    tokens = len(raw) // token_bytes(shape)
    encoded = encode(codec, raw)
    back = decode(codec, encoded, len(raw))
    exact, errors = read_int4(encoded, shape, tokens)
    kept = errors == 0
    item = f"u{DTYPES[shape.dtype]}"
    assert (np.frombuffer(raw, item)[kept] == np.frombuffer(back, item)[kept]).all()
    numbers, restored = numbers_of(raw, shape.dtype)[~kept], numbers_of(back, shape.dtype)[~kept]
    assert np.isfinite(restored).all()
    relative, least = HALF_ULP[shape.dtype]
    allowed = errors[~kept] + (np.abs(restored) * relative + least) * (1 + 1e-4)
    error = np.abs(numbers - restored)
    assert (error <= allowed).all(), (error - allowed).max()
    # The codec decodes what the documented format says, rounded to the block's type.
    far = np.abs(exact[~kept] - restored)
    assert (far <= errors[~kept] * 2e-3 + np.abs(restored) * relative * 1.01 + least).all()
    return encoded


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", WIDE)
def test_within_the_bounds_and_as_written_down(kind, name):
    shape = SHAPES[kind]
    for tokens in (1, 2, 16, 63, 64, 127, 128, 129, 255, 256, 300):
        check_block(name, shape, block(shape, tokens, seed=tokens))


@given(given_block=any_block(), name=st.sampled_from(SETTINGS))
@settings(max_examples=150, deadline=None)
def test_whatever_the_numbers_are(given_block, name):
    check_block(name, *given_block)


def keys(tokens: int, heads: int, dim: int, base: float, seed: int = 0) -> torch.Tensor:
    """Keys [heads, tokens, dim] with means larger than their spread, rotated by their position."""
    generator = torch.Generator().manual_seed(seed)
    means = 4 * torch.randn(heads, 1, dim, generator=generator)
    numbers = means + torch.randn(heads, tokens, dim, generator=generator)
    return turn(numbers, *turns(base, tokens, dim))


@pytest.mark.parametrize("base", [1e4, 32e3, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_base_of_a_rotation_is_found(base, dim):
    found = find_base(keys(256, 2, dim, base))
    assert abs(np.log(found / base)) < 0.04
    unrotated = torch.randn(2, 256, dim, generator=torch.Generator().manual_seed(1))
    assert find_base(unrotated) == find_base(unrotated + 5) == find_base(unrotated * 0) == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_that_rotate_are_turned_back(layout):
    shape = BlockShape("bfloat16", layout, ((2, 64), (2, 64)))
    parts = torch.stack([keys(300, 2, 64, 1e4), torch.randn(2, 300, 64)])
    raw = raw_of((parts.transpose(1, 2) if layout == "NHD" else parts).reshape(-1), "bfloat16")
    encoded = check_block("int4", shape, raw)
    assert [one >> 4 for one in encoded[:2]] != [3, 3]
    assert encoded[0] >> 4 == 3
    back = numbers_of(decode(make_codec("int4", shape), encoded, len(raw)), "bfloat16")
    error = np.square(back - numbers_of(raw, "bfloat16"))[: len(back) // 2].mean()
    # Without turning back, a channel's 16 codes would span what it swings over.
    runs = [part.amax(1) - part.amin(1) for part in parts[0].split([128, 172], 1)]
    plain = float(torch.stack(runs).div(15).square().mean()) / 12
    assert error < 0.5 * plain


def test_a_shorter_block_uses_the_rotation_that_longer_ones_showed():
    shape = BlockShape("bfloat16", "HND", ((2, 64),))
    codec = make_codec("int4", shape)
    numbers = keys(256, 2, 64, 1e4)
    check_block("int4", shape, raw_of(numbers.reshape(-1), "bfloat16"), codec)
    for tokens in (1, 5, 40, 100):
        raw = raw_of(numbers[:, :tokens].reshape(-1), "bfloat16")
        check_block("int4", shape, raw, codec)


@pytest.mark.parametrize(
    "shape", [BlockShape(), BlockShape("bfloat16"), SHAPES["fp8"], SHAPES["int8"]]
)
def test_opaque_and_one_byte_types_are_refused(shape):
    with pytest.raises(InvalidValue, match="lossless"):
        make_codec("int4", shape)


def test_four_bits_make_bfloat16_more_than_three_and_a_half_times_smaller():
    for dim, least in ((64, 3.7), (128, 3.7), (32, 3.5)):
        for layout in ("NHD", "HND"):
            shape = BlockShape("bfloat16", layout, ((4, dim),) * 4)
            raw = block(shape, 256)
            assert len(raw) / len(encode(make_codec("int4", shape), raw)) >= least
    for tokens in (16, 64):
        shape = BlockShape("bfloat16", "NHD", ((4, 128),) * 4)
        raw = block(shape, tokens)
        assert len(raw) / len(encode(make_codec("int4", shape), raw)) >= 3.5


def test_invalid_heads_scales_and_rotations_are_damage():
    shape = BlockShape("bfloat16", "HND", ((2, 64),))
    codec = make_codec("int4", shape)
    raw = raw_of(keys(256, 2, 64, 1e4).reshape(-1), "bfloat16")
    encoded = encode(codec, raw)
    assert encoded[0] == 3 << 4 | 4
    for head in (0x04, 0x17, 0x11, 0x44, 0xF4, 0x10, 0x30, 0x39):
        with pytest.raises(Damaged):
            decode(codec, bytes([head]) + encoded[1:], len(raw))
    for at in (8, 12):
        for bits in (b"\0\0\0\0", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xbf", b"\1\0\0\0"):
            with pytest.raises(Damaged, match="base"):
                decode(codec, encoded[:at] + bits + encoded[at + 4 :], len(raw))


def test_zeros_stay_zeros():
    for dtype in HALF_ULP:
        shape = BlockShape(dtype, "HND", ((2, 64),))
        zeros = bytes(token_bytes(shape) * 70)
        codec = make_codec("int4", shape)
        assert decode(codec, encode(codec, zeros), len(zeros)) == zeros
