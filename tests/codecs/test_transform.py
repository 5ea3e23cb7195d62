"""transform: bounds, format, exact tokens, positions, other bases, damage, memory."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from codec_blocks import (
    KEY,
    SHAPES,
    WIDE,
    block,
    decode,
    encode,
    numbers_of,
    raw_of,
    spoiled,
    token_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transform_bases import TURNED, basis_of, codec_for, raw_kv, turned_basis
from transform_reader import read_basis, read_record

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs import BlockShape, Damaged, OtherKey, codec_of, make_codec
from kvkeep.store.codecs.transform import TransformCodec

if TYPE_CHECKING:
    from kvkeep.store.codecs.basis import Basis

HALF_ULP = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25),
            "float32": (2.0**-24, 2.0**-150)}  # fmt: skip


def side_by_side(raw: bytes, shape: BlockShape, kind: str) -> np.ndarray:
    """[tokens, channels] of all parts, in NHD order; ``kind`` is "bits" or "numbers"."""
    tokens = len(raw) // token_bytes(shape)
    bits = np.frombuffer(raw, f"u{DTYPES[shape.dtype]}")
    flat = bits if kind == "bits" else numbers_of(raw, shape.dtype)
    found, at = [], 0
    for heads, dim in shape.parts:
        part = flat[at : at + tokens * heads * dim]
        at += len(part)
        if shape.layout == "HND":
            part = part.reshape(heads, tokens, dim).transpose(1, 0, 2)
        found.append(part.reshape(tokens, heads * dim))
    return np.concatenate(found, 1)


def check_block(shape: BlockShape, basis: Basis, raw: bytes, folder) -> tuple[bytes, np.ndarray]:
    """Assert a round trip within the bounds and as documented; return the record and exactness."""
    codec = TransformCodec(shape, [basis])
    tokens = len(raw) // token_bytes(shape)
    encoded = encode(codec, raw)
    back = decode(codec, encoded, len(raw))
    basis.save(folder / "basis")
    read = read_basis(folder / "basis")
    meant, bits, exact, tolerance = read_record(encoded, read, tokens, DTYPES[shape.dtype])
    given_bits, back_bits = (side_by_side(one, shape, "bits") for one in (raw, back))
    assert (given_bits[exact] == back_bits[exact]).all(), "exact, and changed"
    assert (bits[exact] == given_bits[exact]).all()
    with np.errstate(invalid="ignore"):
        given_numbers, restored = (side_by_side(one, shape, "numbers") for one in (raw, back))
        relative, least = HALF_ULP[shape.dtype]
        rounding = np.abs(restored) * relative + least
        float32 = np.abs(restored) * 2.0**-20 + tolerance * 2.0**-10
        error = np.abs(given_numbers - restored)
        assert (error <= tolerance + rounding + float32)[~exact].all()
        # What the codec decodes is what the documented format says, rounded to the block's type.
        assert (np.abs(meant - restored) <= rounding + float32)[~exact].all()
    return encoded, exact


@pytest.mark.parametrize("kind", WIDE)
def test_within_the_bounds_and_as_written_down(kind, tmp_path):
    shape = SHAPES[kind]
    for tokens in (1, 2, 65, 300):
        check_block(shape, basis_of(shape), block(shape, tokens, seed=tokens), tmp_path)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_turned_keys_come_back_and_their_position_is_found(dtype, layout, tmp_path):
    shape = BlockShape(dtype, layout, TURNED.parts)
    for tokens, start in ((256, 0), (256, 1024), (100, 37), (64, 4000), (1500, 300)):
        raw = raw_kv(tokens, start, tokens, dtype, layout)
        encoded, exact = check_block(shape, turned_basis(), raw, tmp_path)
        assert struct.unpack_from("<I", encoded, 16) == (start,)
        assert exact.mean() < 0.02
        assert len(raw) / len(encoded) > 4 * DTYPES[dtype] / 2


def test_codes_become_fewer_where_channels_are_correlated():
    shape = TURNED
    raw = raw_kv(256, 512, 5)
    turned = len(encode(TransformCodec(shape, [turned_basis()]), raw))
    single = len(encode(TransformCodec(shape, [turned_basis(width=32)]), raw))
    assert turned < 0.8 * single


@st.composite
def any_block(draw):
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    shape = BlockShape(dtype, draw(st.sampled_from(["NHD", "HND"])), SHAPES["uneven"].parts)
    tokens = draw(st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = token_bytes(shape) * tokens // DTYPES[dtype]
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    low, high = draw(st.sampled_from([(0, 0), (0, 0), (-3, 3), (-149, 127)]))
    some = torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 1e-4, 0.01, 1.0]))
    powers = torch.randint(low, high + 1, (count,), generator=generator) * some
    numbers = torch.ldexp(numbers, powers)
    end = torch.finfo(getattr(torch, dtype)).max
    numbers = numbers.clamp(-end, end)
    for value in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, end]), max_size=3)):
        numbers[int(torch.randint(count, (1,), generator=generator))] = value
    return shape, raw_of(numbers, dtype)


@given(given_block=any_block(), noise=st.sampled_from([1e-4, 1e-2, 1.0, 100.0]))
@settings(max_examples=60, deadline=None)
def test_whatever_the_numbers_are(given_block, noise, tmp_path_factory):
    shape, raw = given_block
    folder = tmp_path_factory.getbasetemp()
    check_block(shape, basis_of(SHAPES["uneven"], noise), raw, folder)


def test_tokens_that_the_basis_does_not_fit_are_exact(tmp_path):
    shape = SHAPES["nhd"]
    numbers = torch.randn(4, 256, 64, generator=torch.Generator().manual_seed(1))
    numbers[:, 7] *= 1000  # as a sink's
    numbers[1, 9, 3] = float("nan")
    numbers[2, 11, 5] = float("inf")
    raw = raw_of(numbers.reshape(-1), shape.dtype)
    encoded, exact = check_block(shape, basis_of(shape), raw, tmp_path)
    assert exact[7].all()
    assert exact[9].any()
    assert not exact[9].all()
    assert exact[[9, 11]].any(1).all()
    others = np.delete(exact, [7, 9, 11], 0)
    assert others.mean() < 0.01
    assert len(encoded) < len(raw) / 2


def test_kv_of_another_model_stays_within_the_bounds_and_is_no_larger_than_raw(tmp_path):
    shape = SHAPES["nhd"]
    raw = block(shape, 300, spread=500.0)
    encoded, exact = check_block(shape, basis_of(shape), raw, tmp_path)
    assert exact.all()
    codec = codec_for(shape)
    assert len(raw) < len(encoded) <= codec.bound(len(raw)) <= len(raw) + 24 + 8


def test_bits_of_a_nan_survive():
    shape = SHAPES["nhd"]
    raw = bytearray(block(shape, 64))
    raw[100:102] = b"\xd5\xff"  # a NaN with a sign and a payload
    codec = codec_for(shape)
    assert decode(codec, encode(codec, bytes(raw)), len(raw))[100:102] == b"\xd5\xff"


def test_a_record_of_another_basis_is_no_damage():
    raw = raw_kv(256, 0, 1)
    old, new = turned_basis(), turned_basis(seed=3)
    assert old.digest != new.digest
    encoded = encode(TransformCodec(TURNED, [old]), raw)
    with pytest.raises(OtherKey, match=old.digest.hex()):
        decode(TransformCodec(TURNED, [new]), encoded, len(raw))
    both = TransformCodec(TURNED, [new, old])
    assert decode(both, encoded, len(raw)) == decode(
        TransformCodec(TURNED, [old]), encoded, len(raw)
    )
    assert encode(both, raw)[:16] == new.digest


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_by_its_name_and_its_files(key, tmp_path):
    turned_basis().save(tmp_path / "new")
    turned_basis(seed=3).save(tmp_path / "old")
    name = f"transform:basis={tmp_path / 'new'},{tmp_path / 'old'}"
    codec = make_codec(name, TURNED, key)
    raw = raw_kv(300, 256, 2)
    alone = make_codec(f"transform:basis={tmp_path / 'old'}", TURNED, key)
    back = decode(codec, encode(alone, raw), len(raw))
    assert back == decode(alone, encode(alone, raw), len(raw))
    with pytest.raises(OtherKey):
        decode(alone, encode(codec, raw), len(raw))
    assert codec_of(codec.number, TURNED, key) is None, "a number names no basis"


def test_states_stay_exact_beside_kv(tmp_path):
    turned_basis().save(tmp_path / "basis")
    window = BlockShape("bfloat16", "NHD", ((1, 64),) * 2)
    codec = make_codec(
        f"transform:basis={tmp_path / 'basis'}", BlockShape(kinds=(TURNED, window, BlockShape()))
    )
    assert (codec.name, codec.exact) == ("transform", False)
    kv = raw_kv(256, 0, 1)
    assert len(kv) / len(encode(codec, kv + b"\0")) > 4
    for rest in (block(window, 64) + b"\1", bytes(range(256)) + b"\2"):
        assert decode(codec, encode(codec, rest), len(rest)) == rest


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (BlockShape(), "opaque"),
        (SHAPES["fp8"], "raw or lossless"),
        (BlockShape("bfloat16", "DHN", TURNED.parts), "'NHD' or 'HND'"),
        (SHAPES["latent"], "4 parts .* has 3 parts"),
        (BlockShape("bfloat16", "NHD", ((2, 64),) * 4), "4 parts .2 heads of 32"),
    ],
)
def test_other_geometries_are_refused(shape, said):
    with pytest.raises(InvalidValue, match=said):
        TransformCodec(shape, [turned_basis()])


@pytest.mark.parametrize("setting", ["", ":", ":basis=", ":basis=a,,b", ":bass=a", ":nats=1"])
def test_a_basis_is_needed(setting):
    with pytest.raises(InvalidValue, match="transform:basis=FILE"):
        make_codec(f"transform{setting}", TURNED)


def test_damage_is_detected_or_stays_within_the_buffer():
    raw = raw_kv(300, 64, 1)
    codec = TransformCodec(TURNED, [turned_basis()])
    encoded = encode(codec, raw)
    found = 0
    for seed in range(600):
        try:
            decode(codec, spoiled(encoded, seed), len(raw))  # checks the guards
        except (Damaged, OtherKey):
            found += 1
    assert found >= 180


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (16, 1 << 31),  # a position beyond all
        (20, 1),  # not zero
        (24, 300 * 2 + 1),  # more exact tokens than tokens
        (24, 1 << 31 | 1),
        (28, 1 << 30),  # more exceptions than codes
        (24, 500),  # so many that the record would end
    ],
)
def test_counts_are_checked_before_memory_is_taken(at, value):
    raw = raw_kv(300, 64, 1)
    codec = TransformCodec(TURNED, [turned_basis()])
    bad = bytearray(encode(codec, raw))
    struct.pack_into("<I", bad, at, value)
    with pytest.raises(Damaged):
        decode(codec, bytes(bad), len(raw))


def test_torch_uses_the_calling_thread_alone():
    """The pool is the model's; and a caller's own setting is as before."""
    before = torch.get_num_threads()
    codec = TransformCodec(TURNED, [turned_basis()])
    raws = [raw_kv(256, 256 * seed, seed) for seed in range(8)]
    alone = [decode(codec, encode(codec, raw), len(raw)) for raw in raws]
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda raw: decode(codec, encode(codec, raw), len(raw)), raws)) == alone
        )
    assert torch.get_num_threads() == before
