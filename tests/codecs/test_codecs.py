"""Properties of every codec, with and without encryption."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from codec_blocks import KEY, NAME, SHAPES, block, decode, encode, every_codec, spoiled
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.store.codecs import BlockShape, Damaged, OtherKey

TOKENS = (1, 2, 31, 32, 63, 64, 65, 100, 128, 200)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_block_comes_back(kind, key):
    shape = SHAPES[kind]
    for codec in every_codec(shape, key):
        for tokens in TOKENS:
            raw = block(shape, tokens, seed=tokens)
            back = decode(codec, encode(codec, raw), len(raw))
            assert (back == raw) or not codec.exact
            assert len(back) == len(raw)


@given(raw=st.binary(max_size=3000), tile=st.integers(1, 400), key=st.sampled_from([None, KEY]))
@settings(max_examples=150, deadline=None)
def test_exact_codecs_restore_any_bytes(raw, tile, key):
    raw = raw * tile
    for codec in every_codec(BlockShape(), key):
        assert codec.exact
        assert decode(codec, encode(codec, raw), len(raw)) == raw


@pytest.mark.parametrize("kind", ["nhd", "opaque"])
def test_read_only_buffers_are_encoded_and_decoded(kind):
    shape = SHAPES[kind]
    raw = block(shape, 64)
    for codec in every_codec(shape) + every_codec(shape, KEY):
        out = memoryview(bytearray(codec.bound(len(raw))))
        size = codec.encode(memoryview(raw), out, NAME)
        back = memoryview(bytearray(len(raw)))
        codec.decode(memoryview(bytes(out[:size])), back, NAME)
        assert back == decode(codec, bytes(out[:size]), len(raw))


@pytest.mark.parametrize("kind", ["nhd", "hnd", "uneven", "fp8", "opaque"])
def test_damage_is_detected_or_stays_within_the_buffer(kind):
    """Without a key only lengths are checked; the record's checksum finds flipped bits."""
    shape = SHAPES[kind]
    raw = block(shape, 150)
    for codec in every_codec(shape):
        encoded = encode(codec, raw)
        found = 0
        for seed in range(150):
            try:
                decode(codec, spoiled(encoded, seed), len(raw))  # checks the guards
            except Damaged:
                found += 1
        assert found >= 45, f"{codec.name} took nearly all for its own"  # 50 have a wrong length


@pytest.mark.parametrize("kind", ["nhd", "opaque"])
def test_encryption_detects_all_damage(kind):
    shape = SHAPES[kind]
    raw = block(shape, 40)
    for codec in every_codec(shape, KEY):
        encoded = encode(codec, raw)
        for seed in range(200):
            bad = spoiled(encoded, seed)
            if bad != encoded:
                # Damage to the key id looks like another key; the record's checksum finds it.
                with pytest.raises((Damaged, OtherKey)):
                    decode(codec, bad, len(raw))


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["nhd", "opaque"])
def test_wrong_lengths_are_damage(kind, key):
    shape = SHAPES[kind]
    raw = block(shape, 70)
    for codec in every_codec(shape, key):
        encoded = encode(codec, raw)
        for size in (len(raw) - 1, len(raw) + 1, len(raw) * 2, len(raw) // 2, 0):
            with pytest.raises(Damaged):
                decode(codec, encoded, size)
        for cut in (0, 1, 3, 20, len(encoded) - 1):
            with pytest.raises(Damaged):
                decode(codec, encoded[:cut], len(raw))
        with pytest.raises(Damaged):
            decode(codec, encoded + b"\0", len(raw))


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_many_threads_use_one_codec(key):
    shape = SHAPES["nhd"]
    raws = [block(shape, 140 + seed, seed) for seed in range(16)]
    for codec in every_codec(shape, key):
        alone = [decode(codec, encode(codec, raw), len(raw)) for raw in raws]

        def there_and_back(raw, codec=codec):
            return decode(codec, encode(codec, raw), len(raw))

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(there_and_back, raws)) == alone
