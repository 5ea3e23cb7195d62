"""Faults that other stores have or had: one test each, which fails where the fault is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from store_kv import (
    GQA,
    MODEL,
    counter,
    disk,
    get,
    given,
    numbers,
    open_store,
    plain,
    put,
    quiet,
    records,
)

from faults import FaultyBackend
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import KVStore
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.codecs import generate_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKENS = range(64)  # 16 blocks
RECORD = 128 + 4 * GQA.bytes_per_token


@pytest.fixture
def url(tmp_path: Path) -> str:
    return disk(tmp_path / "d")


@pytest.fixture
def filled(url: str, tmp_path: Path) -> list[Path]:
    """A directory in which a store that is closed left 16 blocks; its files."""
    with open_store("memory://1MiB", url) as store:
        assert put(store, TOKENS).tokens == 64
    files = records(tmp_path / "d")
    assert len(files) == 16
    return files


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyBackend]:
    backend = FaultyBackend(DiskBackend(tmp_path / "d", capacity=1 << 20, sync="never"))
    yield backend
    backend.heal()


def over(backend: FaultyBackend, memory: str = "memory://1MiB", **more: Any) -> KVStore:
    return KVStore(GQA, model=MODEL, tiers=[memory, backend], block_tokens=4, **more)


# --- a store on disk -------------------------------------------------------------------------


def test_restart(filled: list[Path], url: str) -> None:
    """After a restart nothing was found, the files were orphans, and the limit held no longer."""
    with open_store("memory://1MiB", url) as store:
        assert store.lookup(TOKENS).tokens == 64
        assert get(store, TOKENS) == 64
        tier = store.stats().tiers[1]
        assert tier.blocks == 16
        assert tier.used_bytes is not None
        assert tier.used_bytes >= 16 * RECORD
    small = url.replace("size=64MiB", "size=32KiB")
    with open_store("memory://1MiB", small) as store:  # a limit below what lies there
        put(store, range(100, 164), wait=True)
        assert counter(store, "evictions") > 0
        assert sum(-(-file.stat().st_size // 4096) * 4096 for file in _all(filled)) <= 32 << 10


def _all(files: list[Path]) -> list[Path]:
    return records(files[0].parent.parent)


@pytest.mark.parametrize("where", [0, 20, 90, 127, 128, 400, -1])
def test_bitflip(where: int, filled: list[Path], url: str) -> None:
    """One flipped bit on disk was returned as KV, and said to be right."""
    for file in filled:
        raw = bytearray(file.read_bytes())
        raw[where] ^= 0x10
        file.write_bytes(raw)
    with open_store("memory://1MiB", url) as store:
        assert get(store, TOKENS) == 0
        assert counter(store, "damaged") >= 1
        assert store.lookup(TOKENS).tokens == 0
        assert put(store, TOKENS, wait=True).tokens >= 4
    with open_store("memory://1MiB", url) as store:
        assert get(store, range(4)) == 4


@pytest.mark.parametrize("keep", [0, 1, 100, 128, 300, RECORD - 1])
def test_truncate(keep: int, filled: list[Path], url: str) -> None:
    """Of files cut in half, the other half was another request's KV, left in a buffer."""
    for file in filled:
        os.truncate(file, keep)
    with open_store("memory://1MiB", url) as store:
        put(store, TOKENS, tenant="another")  # memory is full of somebody's KV
        store.clear(tenant="another")
        assert get(store, TOKENS) == 0
        assert store.lookup(TOKENS).tokens == 0
        for _ in range(16):  # what was not read yet counts as stored
            put(store, TOKENS)
            if get(store, TOKENS) == 64:
                break
        assert store.lookup(TOKENS).tokens == 64
        assert get(store, TOKENS) == 64


def test_a_damaged_block_in_the_middle_ends_what_is_found(filled: list[Path], url: str) -> None:
    """A hole in a prompt must not be filled with whatever is there."""
    with open_store("memory://1MiB", url) as store:
        sixth = store._names.of(None).full(np.arange(64, dtype="<i4"))[5]
    file = next(file for file in filled if file.name == sixth[16:].hex())
    raw = file.read_bytes()
    file.write_bytes(raw[:-4] + b"\0\0\0\0")
    with open_store("memory://1MiB", url) as store:
        assert get(store, TOKENS) == 20
        assert get(store, TOKENS, 24) == 40
        assert counter(store, "damaged") == 1
        assert put(store, TOKENS).tokens == 4
        assert get(store, TOKENS) == 64


def test_missing_single(filled: list[Path], url: str) -> None:
    """A file that somebody deleted made the call raise KeyError."""
    with open_store("memory://1MiB", url) as store:
        for file in filled:
            file.unlink()
        assert get(store, TOKENS) == 0
        assert counter(store, "misses") >= 1
        assert put(store, TOKENS).tokens >= 4
        store.flush()
        store.check()


def test_a_missing_file_of_one_block(url: str, tmp_path: Path) -> None:
    """The same for a prompt of a single block, where nothing else was found."""
    with open_store("memory://1MiB", url) as store:
        put(store, range(4))
    with open_store("memory://1MiB", url) as store:
        records(tmp_path / "d")[0].unlink()
        assert store.get(range(4)) == (None, 0)


def test_force_remove_capacity(url: str, tmp_path: Path) -> None:
    """What was removed went on counting: each round left less room, for good."""
    small = url.replace("size=64MiB", "size=160KiB")
    with open_store("memory://1MiB", small) as store:
        for _ in range(20):
            put(store, TOKENS, wait=True)
            assert len(records(tmp_path / "d")) == 16
            assert store.clear().bytes > 0
            assert store.stats().tiers[1].used_bytes == 0
            assert store.stats().tiers[0].used_bytes == 0
        assert counter(store, "evictions") == 0
        store.check()


def test_clear_all_disk(filled: list[Path], url: str) -> None:
    """Clearing said 0 and left all files, and what was cleared was found again."""
    with open_store("memory://1MiB", url) as store:
        assert store.clear().bytes >= 16 * RECORD
        assert not any(file.exists() for file in filled)
        assert store.lookup(TOKENS).tokens == 0
        assert get(store, TOKENS) == 0
        assert store.clear().bytes == 0


def test_write_failure(faulty: FaultyBackend) -> None:
    """After a failed write its buffers were lost, and its keys could never be stored again."""
    with over(faulty, "memory://64KiB") as store:
        for _ in range(30):  # more than memory holds, had one of them stayed
            faulty.fail("put", times=2)
            put(store, TOKENS[:8], wait=True)
            assert faulty.inner.sizes(store._names.of(None).full(_row(8))) == [None, None]
            assert put(store, TOKENS[:8], wait=True).skipped == 8
            assert None not in faulty.inner.sizes(store._names.of(None).full(_row(8)))
            assert store.stats().tiers[1].queued_bytes == 0
            store.clear()
            assert store.stats().tiers[0].used_bytes == 0
            store.check()
        assert counter(store, "errors") == 60
        assert counter(store, "drops") == 60


def _row(count: int) -> Any:
    return np.arange(count, dtype="<i4")


def test_lock_leak(url: str) -> None:
    """When memory was full while a block came from disk, the disk tier was locked for ever."""
    with open_store("memory://1MiB", url) as store:
        put(store, TOKENS)
    with open_store("memory://48KiB", url) as store:
        put(store, range(500, 524), tenant="pins")
        assert store.pin(range(500, 524), 100, tenant="pins") == 24
        for _ in range(3):
            assert get(store, TOKENS) == 64
            assert put(store, range(600, 608), wait=True).dropped == 0
            assert get(store, range(600, 608)) == 8
        store.check()


def test_retrieve_bigger_than_pool(url: str) -> None:
    """A prompt larger than memory hung the call for ever, from memory alone and from disk."""
    tokens = range(400)  # 100 blocks
    for tiers in (("memory://48KiB",), ("memory://48KiB", url)):
        with open_store(*tiers) as store:
            done = put(store, tokens, wait=True)
            assert done.tokens + done.dropped == 400
            found = store.lookup(tokens).tokens
            assert get(store, tokens) == found
            assert store.prefetch(tokens).wait(10) <= 400
            store.check()
    with open_store("memory://48KiB", url) as store:
        assert get(store, tokens) == 400
    with open_store("memory://8KiB", url) as store:
        assert get(store, tokens) == 400  # two blocks of memory


def test_retrieve_miss(url: str) -> None:
    """A plain miss raised UnboundLocalError."""
    with open_store("memory://1MiB", url) as store:
        for _ in range(3):
            assert store.get(TOKENS) == (None, 0)
            assert store.get(TOKENS, 5, form="tuples") == (None, 0)
            assert store.lookup(TOKENS).tokens == 0
            assert store.prefetch(TOKENS).wait(10) == 0
        assert store.stats().hit_tokens == 0


def test_exhaust() -> None:
    """An index whose places were never used again refused all that came after the 16th."""
    with open_store("memory://64KiB") as store:
        for first in range(0, 20_000, 40):
            assert put(store, range(first, first + 4)).tokens == 4
            assert get(store, range(first, first + 4)) == 4
        store.check()


def test_isolated_quotas() -> None:
    """With quotas by tenant, eviction of memory died: nothing ever left, nothing new came in."""
    with open_store("memory://64KiB", quotas={"a": 4 * RECORD, "b": "1MiB"}) as store:
        for first in range(0, 400, 8):
            for tenant in ("a", "b", "without"):
                assert put(store, range(first, first + 8), tenant=tenant).dropped == 0
                assert get(store, range(first, first + 8), tenant=tenant) == 8
        assert counter(store, "evictions", 0) > 100
        store.check()


def test_a_tenant_without_quota_is_not_wiped(url: str) -> None:
    """Who was not registered counted as one with a quota of nothing."""
    with open_store("memory://1MiB", url, quotas={"a": RECORD}) as store:
        put(store, TOKENS, tenant="unknown", wait=True)
        for first in range(0, 80, 4):
            put(store, range(first, first + 4), tenant="a", wait=True)
        assert get(store, TOKENS, tenant="unknown") == 64


def test_aesgcm_swap(tmp_path: Path) -> None:
    """The ciphertext of one key was decrypted under another key of the same tenant."""
    generate_key(tmp_path / "key")
    url = disk(tmp_path / "d", encrypt=str(tmp_path / "key"))
    with open_store("memory://1MiB", url) as store:
        put(store, range(4))
        put(store, range(10, 14))
    one, two = records(tmp_path / "d")
    first, second = one.read_bytes(), two.read_bytes()
    for mine, theirs in ((one, second), (two, first)):
        mine.write_bytes(theirs)
    with open_store("memory://1MiB", url) as store:
        assert get(store, range(4)) == get(store, range(10, 14)) == 0
        assert counter(store, "damaged") == 2


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_fp8_saturation(codec: str, tmp_path: Path) -> None:
    """500, 1000 and -70144 came back as 448, 448 and -448."""
    shape = KVGeometry(1, 1, 4, "float32")
    url = disk(tmp_path / "d", codec=codec)
    kv = torch.tensor([500.0, 1000.0, -70144.0, 3e38]).repeat(64, 1).view(1, 1, 64, 1, 4)
    kv = kv.expand(1, 2, 64, 1, 4).contiguous()
    with open_store("memory://1MiB", url, shape=shape, block_tokens=64) as store:
        store.put(range(64), kv)
    with open_store("memory://1MiB", url, shape=shape, block_tokens=64) as store:
        back, count = store.get(range(64))
        assert count == 64
        assert torch.isfinite(back).all()
        assert ((back - kv).abs() <= kv.abs() * 0.0725).all()


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_infinities_and_no_numbers_survive_quantising(codec: str, tmp_path: Path) -> None:
    """What no scale can hold is kept as it is."""
    shape = KVGeometry(1, 1, 4, "bfloat16")
    url = disk(tmp_path / "d", codec=codec)
    kv = torch.ones(1, 2, 64, 1, 4, dtype=torch.bfloat16)
    kv[0, 0, 3, 0, 1], kv[0, 1, 5, 0, 2] = float("inf"), float("nan")
    with open_store("memory://1MiB", url, shape=shape, block_tokens=64) as store:
        store.put(range(64), kv)
    with open_store("memory://1MiB", url, shape=shape, block_tokens=64) as store:
        back, _ = store.get(range(64))
        assert torch.equal(back.view(torch.int16), kv.view(torch.int16))


# --- what its users ask for ------------------------------------------------------------------


def test_other_processes_find_it_whatever_their_hash_seed(filled: list[Path], url: str) -> None:
    """Keys were hashes of Python, which differ in every process: no hit across two of them."""
    del filled
    code = (
        "from kvkeep.core.geometry import KVGeometry; from kvkeep.store import KVStore\n"
        f"store = KVStore(KVGeometry(2, 2, 8), model={MODEL!r}, block_tokens=4,\n"
        f"                tiers=['memory://1MiB', {url!r}])\n"
        "print(store.lookup(range(64)).tokens, store.get(range(64))[1])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["64", "64"], ran.stderr


def test_a_lora_has_keys_of_its_own(url: str) -> None:
    """The adapter was no part of the key: its KV was served to the plain model."""
    with open_store(url) as plain_model, open_store(url, lora="sql@3") as adapted:
        put(adapted, TOKENS, wait=True)
        assert get(plain_model, TOKENS) == 0
        assert get(adapted, TOKENS) == 64


def test_a_broken_tier_does_not_switch_off_those_that_work(faulty: FaultyBackend) -> None:
    """One remote that failed disabled the healthy local tiers as well."""
    with over(faulty) as store:
        put(store, TOKENS, wait=True)
        faulty.fail()
        assert get(store, TOKENS) == 64
        assert put(store, range(100, 164), wait=True).tokens == 64
        assert get(store, range(100, 164)) == 64
        assert store.lookup(range(300, 308)).tokens == 0
        faulty.heal()


def test_a_tier_that_hangs_does_not_keep_anybody(faulty: FaultyBackend) -> None:
    """Asking a remote whether it has a block had no timeout."""
    faulty.timeout = 0.2
    with over(faulty) as store:
        put(store, TOKENS, wait=True)
        faulty.hang("sizes", "get")
        assert store.lookup(range(300, 308)).tokens == 0
        assert get(store, range(300, 308)) == 0
        assert get(store, TOKENS) == 64
        faulty.heal()
        quiet(store)


def test_memory_and_pins_come_back(url: str) -> None:
    """Over hours, pins and buffers of requests that had gone were never given back."""
    with open_store("memory://256KiB", url) as store:
        for first in range(0, 4000, 40):
            tokens = range(first, first + 20)
            put(store, tokens, wait=True)
            store.pin(tokens, 1000)
            get(store, tokens)
            get(store, tokens, deadline=0.0)
            store.prefetch(tokens).cancel()
            store.unpin(tokens)
        quiet(store)
        store._tiered._reader.prefetching.wait(10)
        assert store.stats().tiers[0].pinned_bytes == 0
        assert store._tiered.memory.backend.leased == 0
        assert not store._tiered._reader._reads
        store.clear()
        assert store.stats().tiers[0].used_bytes == 0
        store.check()


# --- a chunk store engine --------------------------------------------------------------------


def test_callers_mistakes_are_no_assertions() -> None:
    """They were ``assert``: gone under ``python -O``, and AssertionError without it."""
    with open_store() as store:
        calls: list[Callable[[], object]] = [
            lambda: store.put(TOKENS, torch.zeros(1)),
            lambda: store.put(TOKENS, given(GQA, numbers(GQA, TOKENS)), 65),
            lambda: store.get(TOKENS, -1),
        ]
        for call in calls:
            with pytest.raises(InvalidValue):
                call()


def test_another_revision_dtype_geometry_or_tenant_is_another_key(url: str) -> None:
    """The key had format, model, world size and worker, and nothing else."""
    with open_store(url) as store:
        put(store, TOKENS, wait=True)
    others: list[dict[str, Any]] = [
        {"model": "tiny@2"},
        {"shape": KVGeometry(2, 2, 8, "float16")},
        {"shape": KVGeometry(4, 1, 8)},
        {"tenant": "a"},
    ]
    for other in others:
        with open_store(url, **other) as store:
            assert store.lookup(TOKENS).tokens == 0


def test_misses_are_counted_when_something_was_found() -> None:
    """Tokens that were not there counted only if none was there."""
    with open_store() as store:
        put(store, TOKENS[:16])
        get(store, TOKENS)
        stats = store.stats()
        assert (stats.asked_tokens, stats.hit_tokens) == (64, 16)


def test_the_key_of_a_tail_does_not_hide_it_from_longer_prompts() -> None:
    """A tail's key depended on its length: a prompt that went on did not find it."""
    with open_store(block_tokens=16) as store:
        put(store, range(21), tail=True)
        assert [get(store, range(n)) for n in (20, 21, 22, 31, 32, 40)] == [16, 21, 21, 21, 21, 21]


def test_blocks_are_fetched_at_once(faulty: FaultyBackend, url: str) -> None:
    """They were fetched one after another, so that each one's delay added up."""
    with open_store(url) as store:
        put(store, TOKENS)
    with over(faulty) as store:
        faulty.hang("get")
        found: list[int] = []
        reader = threading.Thread(target=lambda: found.append(get(store, TOKENS)))
        reader.start()
        faulty.wait_inside("get", 4)
        faulty.heal()
        reader.join(20)
        assert found == [64]


def test_what_is_read_is_verified(faulty: FaultyBackend) -> None:
    """Nothing was verified on read: what the place returned was KV."""
    with over(faulty) as store:
        block = store._names.of(None).full(_row(4))
        put(store, range(4), wait=True)
        for done in range(40):
            store._tiered.memory.remove(block)
            faulty.flip()
            assert get(store, range(4)) == 0
            assert counter(store, "damaged") == done + 1
            faulty.heal()
            put(store, range(4), wait=True)
        store._tiered.memory.remove(block)
        assert get(store, range(4)) == 4


def test_returned_kv_is_of_these_tokens_and_no_others(url: str) -> None:
    """Prompts that differ in one token, and those with the same blocks in another order."""
    with open_store("memory://1MiB", url) as store:
        put(store, TOKENS)
        for at in (0, 3, 4, 31, 60, 63):
            other = list(TOKENS)
            other[at] = 999
            assert get(store, other) == at - at % 4
        swapped = [*range(4, 8), *range(4), *range(8, 64)]
        assert get(store, swapped) == 0
        put(store, swapped)
        assert get(store, swapped) == get(store, TOKENS) == 64
        assert np.array_equal(plain(GQA, store.get(swapped)[0]), numbers(GQA, swapped))
