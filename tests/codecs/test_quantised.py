"""int8 and fp8: error bounds, formats, parts stored raw, and the effect on a model."""

from __future__ import annotations

import importlib
from pathlib import Path

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
    read_quantised,
    token_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs import BlockShape, Damaged, make_codec

NAMES = ("int8", "fp8")
# Half a unit in the last place, relative to a number, and the least such half.
HALF_ULP = {
    "bfloat16": (2.0**-8, 2.0**-134),
    "float16": (2.0**-11, 2.0**-25),
    "float32": (2.0**-24, 2.0**-150),
}


def worst_error(codec: str, numbers: np.ndarray, restored: np.ndarray, scales, dtype: str):
    """What docs/codecs.md promises for each number, its rounding to the type included."""
    fp8 = np.maximum(np.abs(numbers) / 16, scales / 1024)
    quantising = scales / 2 if codec == "int8" else fp8
    relative, least = HALF_ULP[dtype]
    rounding = np.abs(restored) * relative + least
    return (quantising + rounding) * (1 + 1e-4)


def check_block(codec_name: str, shape: BlockShape, raw: bytes) -> np.ndarray:
    """Assert a round trip within the bounds and as documented; return the scales."""
    codec = make_codec(codec_name, shape)
    tokens = len(raw) // token_bytes(shape)
    encoded = encode(codec, raw)
    back = decode(codec, encoded, len(raw))
    numbers, restored = numbers_of(raw, shape.dtype), numbers_of(back, shape.dtype)
    exact, scales = read_quantised(encoded, shape, tokens, codec_name)
    kept = scales == 0
    raw_items = np.frombuffer(raw, f"u{DTYPES[shape.dtype]}")
    back_items = np.frombuffer(back, f"u{DTYPES[shape.dtype]}")
    assert (raw_items[kept] == back_items[kept]).all(), "kept as it is, and changed"
    numbers, restored, scales_of = numbers[~kept], restored[~kept], scales[~kept]
    assert np.isfinite(restored).all()
    error = np.abs(numbers - restored)
    allowed = worst_error(codec_name, numbers, restored, scales_of, shape.dtype)
    assert (error <= allowed).all(), (error - allowed).max()
    # The codec decodes what the documented format says, rounded to the block's type.
    rounded = torch.from_numpy(exact.astype(np.float32)).to(getattr(torch, shape.dtype))
    assert (rounded.double().numpy()[~kept] == restored).all()
    return scales


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("kind", WIDE)
def test_within_the_bounds_and_as_written_down(kind, codec):
    shape = SHAPES[kind]
    for tokens in (1, 2, 3, 31, 32, 64, 65, 127, 128, 300):
        check_block(codec, shape, block(shape, tokens, seed=tokens))


@st.composite
def any_block(draw):
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    part = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 13, 32, 48, 64, 80, 96, 134, 320]))
    shape = BlockShape(
        dtype,
        draw(st.sampled_from(["NHD", "HND"])),
        tuple(draw(st.lists(part, min_size=1, max_size=9))),
    )
    tokens = draw(st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = token_bytes(shape) * tokens // DTYPES[dtype]
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    # Numbers of any magnitude side by side, so each tile is difficult in its own way.
    low, high = draw(st.sampled_from([(0, 0), (-3, 3), (-30, 14), (-149, 127)]))
    powers = torch.randint(low, high + 1, (count,), generator=generator)
    numbers = torch.ldexp(numbers, powers)
    zeros = torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    numbers[zeros] = 0.0
    end = torch.finfo(getattr(torch, dtype)).max
    numbers = numbers.clamp(-end, end)
    if draw(st.booleans()):
        for value in draw(
            st.lists(st.sampled_from([np.nan, np.inf, -np.inf, end, -end]), max_size=3)
        ):
            numbers[int(torch.randint(count, (1,), generator=generator))] = value
    return shape, raw_of(numbers, dtype)


@given(given_block=any_block(), codec=st.sampled_from(NAMES))
@settings(max_examples=250, deadline=None)
def test_whatever_the_numbers_are(given_block, codec):
    check_block(codec, *given_block)


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), "end"])
def test_only_the_part_that_is_not_finite_stays_raw(odd, dtype, codec):
    shape = BlockShape(dtype, "NHD", ((2, 64),) * 4)
    numbers = torch.randn(4, 64 * 128, generator=torch.Generator().manual_seed(1))
    numbers[2, 777] = torch.finfo(getattr(torch, dtype)).max if odd == "end" else odd
    scales = check_block(codec, shape, raw_of(numbers.view(-1), dtype)).reshape(4, -1)
    assert (scales[2] == 0).all()
    assert (scales[[0, 1, 3]] > 0).all()


def test_bits_of_a_nan_survive():
    shape = BlockShape("bfloat16", "NHD", ((1, 64),))
    raw = bytearray(block(shape, 64))
    raw[100:102] = b"\xd5\xff"  # a NaN with a sign and a payload
    codec = make_codec("int8", shape)
    assert decode(codec, encode(codec, bytes(raw)), len(raw)) == raw


@pytest.mark.parametrize("codec", NAMES)
def test_zeros_and_tiny_numbers(codec):
    for dtype in HALF_ULP:
        shape = BlockShape(dtype, "HND", ((2, 64),))
        zeros = bytes(token_bytes(shape) * 70)
        coded = make_codec(codec, shape)
        assert decode(coded, encode(coded, zeros), len(zeros)) == zeros
        least = torch.full((70 * 128,), float(torch.finfo(getattr(torch, dtype)).tiny))
        least[::3] /= 4  # below the normal ones
        check_block(codec, shape, raw_of(least, dtype))


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("shape", [SHAPES["nhd"], SHAPES["hnd"], SHAPES["latent"]])
def test_half_the_bytes(shape, codec):
    raw = block(shape, 256)
    assert len(raw) / len(encode(make_codec(codec, shape), raw)) >= 1.93


def test_large_channels_get_scales_of_their_own_and_large_tokens_too():
    """As in keys, and possibly in values: the other tile would lose the small numbers."""
    shape = BlockShape("bfloat16", "NHD", ((2, 64), (2, 64)))
    keys = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    values = keys.clone()
    keys[:, 5] *= 100
    values[7] *= 100
    raw = raw_of(torch.cat([keys.view(-1), values.view(-1)]), "bfloat16")
    codec = make_codec("int8", shape)
    encoded = encode(codec, raw)
    assert encoded[:2] == bytes([1, 2])
    back = numbers_of(decode(codec, encoded, len(raw)), "bfloat16").reshape(2, 256, 128)
    error = np.abs(back - numbers_of(raw, "bfloat16").reshape(2, 256, 128))
    assert error[0][:, np.arange(128) != 5].max() < 0.04
    assert error[1][np.arange(256) != 7].max() < 0.04


def test_both_layouts_restore_the_same_numbers_where_tiles_are_the_same():
    tokens, heads, dim = 128, 2, 64
    numbers = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(3))
    numbers[:, :, 3] *= 50  # so that both are encoded per channel
    restored = {}
    for layout in ("NHD", "HND"):
        shape = BlockShape("float32", layout, ((heads, dim),))
        turned = numbers if layout == "NHD" else numbers.transpose(0, 1)
        raw = raw_of(turned.reshape(-1), "float32")
        codec = make_codec("int8", shape)
        back = torch.from_numpy(numbers_of(decode(codec, encode(codec, raw), len(raw)), "float32"))
        restored[layout] = (
            back.view(tokens, heads, dim)
            if layout == "NHD"
            else back.view(heads, tokens, dim).transpose(0, 1)
        )
    assert torch.equal(restored["NHD"], restored["HND"])


def test_encoding_again_changes_nothing():
    """A block that moves between tiers loses no more accuracy: its numbers are on the grid."""
    shape = BlockShape("float32", "NHD", ((2, 64),) * 2)
    raw = block(shape, 128)
    codec = make_codec("int8", shape)
    once = decode(codec, encode(codec, raw), len(raw))
    again = decode(codec, encode(codec, once), len(raw))
    error = np.abs(numbers_of(again, "float32") - numbers_of(once, "float32"))
    _, scales = read_quantised(encode(codec, raw), shape, 128, "int8")
    assert (error <= scales * 0.51).all()


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (BlockShape(), "opaque"),
        (BlockShape("bfloat16"), "opaque"),
        (SHAPES["fp8"], "raw or lossless"),
        (SHAPES["int8"], "raw or lossless"),
        (BlockShape("bfloat16", "DHN", ((1, 2),)), "'NHD' or 'HND'"),
    ],
)
def test_opaque_and_one_byte_types_are_refused(shape, said, codec):
    with pytest.raises(InvalidValue, match=said):
        make_codec(codec, shape)


@pytest.mark.parametrize("codec", NAMES)
def test_invalid_scales_are_damage(codec):
    shape = BlockShape("bfloat16", "NHD", ((2, 64),) * 2)
    raw = block(shape, 128)
    coded = make_codec(codec, shape)
    encoded = bytearray(encode(coded, raw))
    assert encoded[0] in (1, 2)
    for bits in (b"\x00\x00", b"\x80\x7f", b"\xc0\x7f", b"\x80\xbf", b"\x7f\x00"):
        bad = bytearray(encoded)
        bad[8:10] = bits
        with pytest.raises(Damaged, match="scale"):
            decode(coded, bytes(bad), len(raw))
    encoded[1] = 3
    with pytest.raises(Damaged, match="kinds"):
        decode(coded, bytes(encoded), len(raw))


@pytest.fixture(scope="module")
def model():
    """The shipped model behind a prompt, loaded as the benchmark does."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("codecs_model").bundled_probe(tokens=1024)


@pytest.mark.model
@pytest.mark.parametrize(
    ("codec", "largest"),
    [("lossless", 1e-12), ("int8", 1e-3), ("fp8", 3e-2), ("int4", 1e-2)],
)
def test_a_model_predicts_nearly_the_same(model, codec, largest):
    """KL divergence in nats per token: predictions with exact KV and with KV from a codec."""
    nats = model.nats(codec)
    assert abs(nats) < largest
    assert (nats > 1e-6) == (codec != "lossless")


@pytest.mark.model
@pytest.mark.parametrize(
    ("codec", "least"),
    [("lossless", 1.3), ("int8", 1.9), ("fp8", 1.9), ("int4", 3.7)],
)
def test_the_kv_of_a_model_shrinks(model, codec, least):
    coder = make_codec(codec, model.shape)
    for raw in model.blocks():
        assert len(raw) / len(encode(coder, raw)) >= least
