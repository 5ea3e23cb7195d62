"""A codec for each tier: exact stays exact, lossy stays near, and what is sealed stays shut."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from store_kv import (
    GEOMETRIES,
    GQA,
    MODEL,
    counter,
    disk,
    geometry,
    get,
    numbers,
    open_store,
    plain,
    put,
    quiet,
    records,
)

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES, KVGeometry
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.codecs import generate_key

if TYPE_CHECKING:
    from pathlib import Path

WIDE = KVGeometry(2, 2, 64, "bfloat16")
TOKENS = range(150)
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def normal(shape: KVGeometry, tokens: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    """KV as models have it: some channels of keys are large for every token."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.layers, 2, tokens, shape.kv_heads, shape.head_dim)
    kv = torch.randn(size, generator=generator) * spread
    kv[:, 0, :, :, ::16] *= 20
    return kv.to(getattr(torch, shape.dtype))


def wide(*tiers: str, dtype: str = "bfloat16", layout: str = "NHD") -> KVStore:
    shape = KVGeometry(2, 2, 64, dtype)
    return open_store(*tiers, shape=shape, layout=layout, block_tokens=64)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", ["gqa", "mla", "uneven"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_is_exact_for_any_bits(dtype: str, name: str, layout: str, tmp_path: Path) -> None:
    url = disk(tmp_path / "d", codec="lossless")
    options: dict[str, Any] = {"shape": geometry(name, dtype), "layout": layout}
    with open_store("memory://1MiB", url, **options) as store:
        put(store, range(21), tail=True)
    with open_store("memory://1MiB", url, **options) as store:
        assert get(store, range(21)) == 21
        assert counter(store, "hits") == 6


def test_lossless_is_smaller_where_there_is_something_to_gain(tmp_path: Path) -> None:
    sizes = {}
    for codec in ("raw", "lossless"):
        with wide("memory://4MiB", disk(tmp_path / codec, codec=codec)) as store:
            store.put(range(128), normal(WIDE, 128), wait=True)
        sizes[codec] = sum(file.stat().st_size for file in records(tmp_path / codec))
    assert sizes["lossless"] < 0.85 * sizes["raw"]


def bound(codec: str, kv: torch.Tensor, back: torch.Tensor, dtype: str) -> torch.Tensor:
    """What docs/codecs.md promises at least: a scale is at most 1.01 × the part's greatest."""
    numbers, greatest = kv.double(), kv.double().abs().amax(dim=(2, 3, 4), keepdim=True)
    scale = 1.01 * greatest / (127 if codec == "int8" else 448)
    step = scale / 2 if codec == "int8" else torch.maximum(numbers.abs() / 16, scale / 1024)
    return (step + back.double().abs() * HALF_ULP[dtype] + 1e-7) * 1.0001


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_quantised_tiers_are_within_the_bound_and_memory_is_exact(
    codec: str, dtype: str, tmp_path: Path
) -> None:
    url = disk(tmp_path / "d", codec=codec)
    kv = normal(KVGeometry(2, 2, 64, dtype), 150)
    with wide("memory://8MiB", url, dtype=dtype) as store:
        store.put(TOKENS, kv, tail=True, wait=True)
        got, count = store.get(TOKENS)
        assert count == 150
        assert torch.equal(got, kv), "memory has the very bits while it has them"
    with wide("memory://8MiB", url, dtype=dtype) as store:
        first, count = store.get(TOKENS)
        assert count == 150
        error = (first.double() - kv.double()).abs()
        assert (error <= bound(codec, kv, first, dtype)).all()
        assert error.max() > 0, "nothing was quantised"
        again, _ = store.get(TOKENS)
        assert torch.equal(again, first)
    raw = kv.numel() * kv.element_size()
    assert sum(file.stat().st_size for file in records(tmp_path / "d")) < raw / 1.8


def test_a_lossy_record_does_not_become_worse_on_its_way_through_tiers(tmp_path: Path) -> None:
    """From one quantised tier up and down into another: what was read is what is kept."""
    urls = [disk(tmp_path / name, codec="int8") for name in "ab"]
    kv = normal(WIDE, 64)
    with wide("memory://8MiB", urls[0]) as store:
        store.put(range(64), kv)
    with wide("memory://8MiB", urls[0]) as store:
        first, _ = store.get(range(64))
        with wide("memory://8MiB", urls[1]) as other:
            other.put(range(64), first)
    with wide("memory://8MiB", urls[1]) as other:
        second, _ = other.get(range(64))
    assert (second.double() - kv.double()).abs().max() <= 2 * bound(
        "int8", kv, kv, "bfloat16"
    ).max()


def test_an_exact_tier_takes_no_lossy_record(tmp_path: Path) -> None:
    """The same directory, opened without the codec: it promised exact KV. A miss, counted."""
    with wide("memory://8MiB", disk(tmp_path / "d", codec="int8")) as store:
        store.put(range(64), normal(WIDE, 64))
    with wide("memory://8MiB", disk(tmp_path / "d")) as store:
        assert store.get(range(64)) == (None, 0)
        assert counter(store, "refused") == 1
        assert counter(store, "damaged") == 0
    assert len(records(tmp_path / "d")) == 1, "it is somebody's, and right"


@pytest.mark.parametrize("first", ["raw", "lossless"])
@pytest.mark.parametrize("second", ["raw", "lossless", "int8"])
def test_exact_records_are_read_whatever_the_tier_writes_now(
    first: str, second: str, tmp_path: Path
) -> None:
    kv = normal(WIDE, 64)
    with wide("memory://8MiB", disk(tmp_path / "d", codec=first)) as store:
        store.put(range(64), kv)
    with wide("memory://8MiB", disk(tmp_path / "d", codec=second)) as store:
        got, count = store.get(range(64))
        assert count == 64
        assert torch.equal(got, kv)


def test_a_lossless_record_that_became_larger_is_read_by_a_raw_tier(tmp_path: Path) -> None:
    with open_store("memory://1MiB", disk(tmp_path / "d", codec="lossless")) as store:
        put(store, range(8))  # noise: nothing to gain
    with open_store("memory://1MiB", disk(tmp_path / "d")) as store:
        assert get(store, range(8)) == 8


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_quantising_one_byte_numbers_is_refused(codec: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=codec):
        open_store(
            "memory://1MiB", disk(tmp_path / "d", codec=codec), shape=geometry("gqa", "int8")
        )


def test_memory_of_its_own_codec_lies_behind_a_buffer(tmp_path: Path) -> None:
    with wide("memory://8MiB?codec=int8", disk(tmp_path / "d")) as store:
        kv = normal(WIDE, 64)
        store.put(range(64), kv, wait=True)
        assert [tier.name for tier in store.stats().tiers] == ["buffer", "memory", "file"]
        assert [tier.codec for tier in store.stats().tiers] == ["raw", "int8", "raw"]
        assert torch.equal(store.get(range(64))[0], kv)


# --- encryption ------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_encrypted_records_come_back_and_show_nothing(
    codec: str, key: Path, tmp_path: Path
) -> None:
    url = disk(tmp_path / "d", codec=codec, encrypt=str(key))
    kv = torch.full((2, 2, 64, 2, 64), 1.5, dtype=torch.bfloat16)
    with wide("memory://8MiB", url) as store:
        store.put(range(64), kv)
    with wide("memory://8MiB", url) as store:
        got, count = store.get(range(64))
        assert count == 64
        assert (got - kv).abs().max() <= (0.02 if codec == "int8" else 0)
    needle = kv.flatten()[:8].view(torch.uint8).numpy().tobytes()
    for file in records(tmp_path / "d"):
        assert needle not in file.read_bytes()


def test_the_wrong_key_is_a_miss_and_counted(key: Path, tmp_path: Path) -> None:
    with open_store("memory://1MiB", disk(tmp_path / "d", encrypt=str(key))) as store:
        put(store, range(8))
    generate_key(tmp_path / "other")
    with open_store(
        "memory://1MiB", disk(tmp_path / "d", encrypt=str(tmp_path / "other"))
    ) as store:
        assert store.lookup(range(8)).tokens == 8
        assert get(store, range(8)) == 0
        assert counter(store, "damaged") == 0
        assert counter(store, "refused") >= 1
    rotated = disk(tmp_path / "d", encrypt=str(tmp_path / "other"), decrypt=str(key))
    with open_store("memory://1MiB", rotated) as store:
        assert get(store, range(8)) == 8, "nothing was taken away"
        assert put(store, range(20, 28)).tokens == 8
    with open_store(
        "memory://1MiB", disk(tmp_path / "d", encrypt=str(tmp_path / "other"))
    ) as store:
        assert get(store, range(20, 28)) == 8, "the new key is the one to write with"
        assert get(store, range(8)) == 0
        assert put(store, range(8)).tokens >= 4  # and may be written anew


def test_without_a_key_it_is_a_miss_and_nothing_is_taken_away(key: Path, tmp_path: Path) -> None:
    url = disk(tmp_path / "d", encrypt=str(key))
    with open_store("memory://1MiB", url) as store:
        put(store, range(8))
    with open_store("memory://1MiB", disk(tmp_path / "d")) as store:
        assert get(store, range(8)) == 0
        assert counter(store, "refused") >= 1
    with open_store("memory://1MiB", url) as store:
        assert get(store, range(8)) == 8


def test_records_cannot_be_swapped(key: Path, tmp_path: Path) -> None:
    """Two files change places, and a tenant's file is put where another's would be."""
    url = disk(tmp_path / "d", encrypt=str(key))
    with open_store("memory://1MiB", url) as store:
        put(store, range(4))
        put(store, range(50, 54))
        put(store, range(4), tenant="other")
    own = [f for f in records(tmp_path / "d") if len(list(f.parent.iterdir())) == 2]
    other = next(f for f in records(tmp_path / "d") if f not in own)
    one, two = (file.read_bytes() for file in own)
    own[0].write_bytes(two)
    own[1].write_bytes(one)
    shutil.copy(own[0], other)
    with open_store("memory://1MiB", url) as store:
        for tokens, tenant in ((range(4), ""), (range(50, 54), ""), (range(4), "other")):
            assert get(store, tokens, tenant=tenant) == 0
        assert counter(store, "damaged") == 3


def test_a_swapped_record_with_a_forged_header_is_a_miss(key: Path, tmp_path: Path) -> None:
    """Who can write to the directory can write any header: the key authenticates the name."""
    import struct

    import xxhash

    url = disk(tmp_path / "d", encrypt=str(key))
    with open_store("memory://1MiB", url) as store:
        put(store, range(4))
        put(store, range(50, 54))
    one, two = records(tmp_path / "d")
    mine, theirs = one.read_bytes(), two.read_bytes()
    head = mine[:72] + struct.pack("<Q16s24x", len(theirs) - 128, theirs[80:96])
    one.write_bytes(head + xxhash.xxh3_64_digest(head) + theirs[128:])
    with open_store("memory://1MiB", url) as store:
        found = [get(store, tokens) for tokens in (range(4), range(50, 54))]
        assert sorted(found) == [0, 4]
        assert counter(store, "damaged") == 1


def test_a_plain_record_in_an_encrypted_tier_is_a_miss(key: Path, tmp_path: Path) -> None:
    """Else whoever can write there would get round the key."""
    for codec in ("raw", "lossless"):
        with open_store("memory://1MiB", disk(tmp_path / codec, codec=codec)) as store:
            put(store, range(8))
        url = disk(tmp_path / codec, codec=codec, encrypt=str(key))
        with open_store("memory://1MiB", url) as store:
            assert store.lookup(range(8)).tokens == 8
            assert get(store, range(8)) == 0
            assert counter(store, "refused") >= 1


def test_a_key_that_others_can_read_is_refused(key: Path, tmp_path: Path) -> None:
    key.chmod(0o644)
    with pytest.raises(InvalidValue, match="chmod 600"):
        open_store("memory://1MiB", disk(tmp_path / "d", encrypt=str(key)))


def test_tiers_of_different_codecs_serve_one_prompt(key: Path, tmp_path: Path) -> None:
    """A part of it in each: the raw one lost some, the encrypted lossless one has them."""
    raw, sealed = tmp_path / "raw", tmp_path / "sealed"
    urls = ("memory://1MiB", disk(raw), disk(sealed, codec="lossless", encrypt=str(key)))
    with open_store(*urls) as store:
        put(store, range(40))
    for file in records(raw)[::2]:
        file.unlink()
    with open_store(*urls) as store:
        assert get(store, range(40)) == 40
        assert counter(store, "hits", 1) == 5
        assert counter(store, "hits", 2) == 5
        quiet(store)
        store.check()


# --- a backend instead of a URL --------------------------------------------------------------


def test_a_backend_of_the_callers_own_is_a_tier(tmp_path: Path) -> None:
    for _ in range(2):
        backend = DiskBackend(tmp_path / "d", capacity=1 << 20)
        with KVStore(GQA, model=MODEL, tiers=["memory://1MiB", backend], block_tokens=4) as store:
            put(store, range(8))
            assert get(store, range(8)) == 8
    assert counter(store, "writes") == 0, "the first one wrote it"


def test_opaque_bytes_are_compressed_and_sealed_but_not_quantised(
    key: Path, tmp_path: Path
) -> None:
    url = disk(tmp_path / "d", codec="lossless", encrypt=str(key))
    blocks = {bytes([n]) * 32: numbers(GQA, range(n + 1)).tobytes() for n in range(4)}
    with BlockStore("a", tiers=["memory://1MiB", url]) as store:
        assert store.put(list(blocks), list(blocks.values())) == 4
    with BlockStore("a", tiers=["memory://1MiB", url]) as store:
        room = [bytearray(len(block)) for block in blocks.values()]
        assert store.get(list(blocks), [memoryview(buffer) for buffer in room]) == 4
        assert [bytes(buffer) for buffer in room] == list(blocks.values())
    with pytest.raises(InvalidValue, match="int8"):
        BlockStore("a", tiers=["memory://1MiB", disk(tmp_path / "d", codec="int8")])


def test_kv_of_latent_attention_is_quantised_too(tmp_path: Path) -> None:
    shape = GEOMETRIES["mla"]
    url = disk(tmp_path / "d", codec="int8")
    kv = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with open_store("memory://1MiB", url, shape=shape, block_tokens=64) as store:
        store.put(range(64), kv)
    with open_store("memory://1MiB", url, shape=shape, block_tokens=64) as store:
        got, count = store.get(range(64))
        assert count == 64
        assert (got.double() - kv.double()).abs().max() < 0.04
        assert not np.array_equal(plain(shape, got), plain(shape, kv))
