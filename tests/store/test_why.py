"""`KVStore.why`: what became of tokens that are missing, and where those came from that are not."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_kv import disk, get, open_store, put, quiet, records

from faults import CountingBackend, FaultyBackend
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import generate_key
from kvkeep.store.tiers import Inclusive

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.store import KVStore

BLOCK = 4
PAGE_A_BLOCK = KVGeometry(31, 1, 8, "bfloat16")
"""With its header, a block of it takes a page of memory and no byte less."""


def prompt(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count, np.int32)


def told(store: KVStore, tokens: Any, start: int = 0, **more: Any) -> list[tuple[Any, ...]]:
    """LossLog without their times, which are of the test's own, and in order without gaps."""
    fates = store.why(tokens, start, **more)
    for one, next_one in pairwise(fates):
        assert one.stop == next_one.start
    if fates:
        assert start <= fates[0].start
        assert fates[-1].stop == len(tokens)
    assert all(one.at is None or time.time() - 60 < one.at <= time.time() for one in fates)
    assert all((one.at is None) == (one.what == "never") for one in fates)
    return [(one.start, one.stop, one.tier, one.what, one.detail) for one in fates]


def small(blocks: int, *below: Any, **more: Any) -> KVStore:
    """A store with memory for so many blocks."""
    return open_store(f"memory://{blocks * 4096}", *below, shape=PAGE_A_BLOCK, **more)


def test_never() -> None:
    with open_store() as store:
        assert told(store, prompt(10)) == [(0, 10, "", "never", "")]
        assert told(store, prompt(10), 7) == [(7, 10, "", "never", "")]
        assert told(store, prompt(0)) == []


def misses(store: KVStore, tokens: Any, **more: Any) -> tuple[Any, ...]:
    """What `lookup` and `get` say of the first block that misses: the same."""
    said = []
    for miss in (store.lookup(tokens).miss, store.get(tokens, **more).miss):
        assert miss is not None
        assert (miss.at is None) == (miss.what == "never")
        said.append((miss.start, miss.stop, miss.tier, miss.what, miss.detail))
    assert said[0] == said[1]
    return said[0]


def test_a_miss_says_why() -> None:
    with small(3) as store:
        assert misses(store, prompt(10)) == (0, 4, "", "never", "")
        assert misses(store, prompt(10), pays=True) == (0, 4, "", "never", "")
        put(store, prompt(12))
        assert store.lookup(prompt(12)).miss is store.get(prompt(12)).miss is None
        assert misses(store, prompt(14)) == (12, 14, "", "never", "")
        assert store.get(prompt(14), 13).miss.start == 13
        put(store, prompt(4, 1))
        assert misses(store, prompt(12)) == (8, 12, "memory", "evicted", "lru")
        store.remove(prompt(12))
        assert misses(store, prompt(12)) == (0, 4, "memory", "removed", "removed")
        assert store.get(prompt(4, 1), sink=lambda *_: False).miss is None


def test_a_miss_of_what_was_never_written(tmp_path: Path) -> None:
    """For lack of touches, of a quota's room, or of a write budget's rest."""
    with small(4, disk(tmp_path / "admission"), policy=Inclusive(2)) as store:
        put(store, prompt(4))
        put(store, prompt(16, 1))
        assert misses(store, prompt(4)) == (0, 4, "file", "refused", "admission")
    with small(8, quotas={"": 2 * 4096}) as store:
        assert put(store, prompt(12)).dropped == 4
        assert misses(store, prompt(12)) == (8, 12, "memory", "dropped", "quota")
    with small(8, disk(tmp_path / "quota"), quotas={"": 2 * 4096}) as store:
        (tier,) = store._tiered.tiers
        tier.catalogue.set_quota(store._names.of(None).space, 4095)
        put(store, prompt(8), wait=True)
        store._tiered.memory.remove(store._names.of(None).full(prompt(8)))
        assert misses(store, prompt(8)) == (0, 4, "file", "dropped", "quota")
    with small(4, disk(tmp_path / "budget", writes="24KiB/day")) as store:  # a twelfth at once
        put(store, prompt(8), wait=True)
        put(store, prompt(16, 1), wait=True)
        assert misses(store, prompt(8)) == (0, 4, "file", "dropped", "write budget")


def test_a_miss_of_a_record_that_is_not_read(tmp_path: Path) -> None:
    """It is damaged, or encrypted with another key."""
    for name in ("ours", "theirs"):
        generate_key(tmp_path / name)
    url = disk(tmp_path / "d", encrypt=str(tmp_path / "ours"))
    with open_store("memory://4MiB", url) as store:
        put(store, prompt(8), wait=True)
    with open_store("memory://4MiB", url.replace("ours", "theirs")) as store:
        assert get(store, prompt(8)) == 0
        start, stop, tier, what, detail = misses(store, prompt(8))
        assert (start, stop, tier, what) == (0, 4, "file", "refused")
        assert detail.startswith("the record is encrypted with the key ")
    for file in records(tmp_path / "d"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with open_store("memory://4MiB", url) as store:
        assert get(store, prompt(8)) == 0
        quiet(store)
        assert misses(store, prompt(8))[:4] == (0, 4, "file", "damaged")


@pytest.mark.parametrize("how", ["failed", "breaker", "late"])
def test_a_miss_of_a_tier_that_does_not_answer(how: str) -> None:
    place = FaultyBackend(MemoryBackend(1 << 20))
    with open_store("memory://4MiB", place) as store:
        put(store, prompt(8), wait=True)
        store._tiered.memory.remove(store._names.of(None).full(prompt(8)))
        if how == "failed":
            place.fail("get", times=2)
        elif how == "late":
            place.hang("get")
        else:
            for _ in range(3):
                store._tiered.tiers[0].calls.failed("read", "", "a test")
        found = store.get(prompt(8), deadline=0.1 if how == "late" else None)
        place.heal()
        miss = found.miss
        assert found.tokens == 0
        assert miss is not None
        assert (miss.start, miss.stop, miss.tier) == (0, 4, "faulty")
        assert miss.what == ("late" if how == "late" else "unavailable")
        assert (miss.detail == "breaker") == (how == "breaker")
        quiet(store)


def test_what_is_there_is_passed_over() -> None:
    with open_store() as store:
        put(store, prompt(8))
        assert told(store, prompt(8)) == []
        assert told(store, prompt(10)) == [(8, 10, "", "never", "")]


def test_a_tail_that_is_there_is_passed_over() -> None:
    with open_store() as store:
        put(store, prompt(10), tail=True)
        assert told(store, prompt(10)) == []
        assert told(store, prompt(12)) == [(10, 12, "", "never", "")]
        assert told(store, prompt(12), 10) == [(10, 12, "", "never", "")]


def test_evicted() -> None:
    with small(3) as store:
        put(store, prompt(12))
        put(store, prompt(4, 1))
        assert store.lookup(prompt(12)).tokens == 8
        assert told(store, prompt(14)) == [
            (8, 12, "memory", "evicted", "lru"),
            (12, 14, "", "never", ""),
        ]


def test_an_evicted_tail() -> None:
    with small(2) as store:
        put(store, prompt(7), tail=True)
        store._tiered.memory._evict(1)  # a put needs more room than a tail has
        assert store.lookup(prompt(7)).tokens == 4
        for longer in (7, 8, 11):  # also where it was the beginning of a block
            fates = told(store, prompt(longer))
            assert fates[0] == (4, 7, "memory", "evicted", "lru")
            assert fates[1:] == ([(7, longer, "", "never", "")] if longer > 7 else [])


def test_what_is_there_behind_a_gap_shares_its_fate() -> None:
    with open_store() as store:
        put(store, prompt(12))
        first = store._names.of(None).full(prompt(4))
        store._tiered.remove(first)
        assert told(store, prompt(12)) == [(0, 12, "memory", "removed", "removed")]


def test_neighbours_become_one_and_the_latest_time_counts() -> None:
    with small(3) as store:
        put(store, prompt(12))
        for seed in range(1, 4):
            put(store, prompt(4, seed))
        (fate,) = store.why(prompt(12))
        assert (fate.start, fate.stop, fate.what) == (0, 12, "evicted")
        times = [
            store.why(prompt(end), end - BLOCK)[0].at for end in (4, 8, 12)
        ]  # fmt: skip
        assert fate.at == max(times)


def test_cleared_and_of_one_tenant_alone() -> None:
    with open_store() as store:
        put(store, prompt(8), tenant="a")
        put(store, prompt(8), tenant="b")
        store.clear(tenant="a")
        assert told(store, prompt(8), tenant="a") == [(0, 8, "memory", "removed", "cleared")]
        assert told(store, prompt(8), tenant="b") == []
        assert told(store, prompt(8), tenant="c") == [(0, 8, "", "never", "")]
        put(store, prompt(8), tenant="a")
        assert told(store, prompt(8), tenant="a") == []


def test_a_flipped_bit_on_disk(tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        put(store, prompt(12), wait=True)
    second = records(tmp_path)
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        at = store._names.of(None).full(prompt(12))[1].hex()
        (file,) = [one for one in second if at.endswith(one.name)]
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        assert get(store, prompt(12)) == 4
        quiet(store)
        ((start, stop, tier, what, detail),) = told(store, prompt(12), 4)
        assert (start, stop, tier, what) == (4, 12, "file", "damaged")
        assert detail


def test_not_admitted_below(tmp_path: Path) -> None:
    with small(4, disk(tmp_path), policy=Inclusive(2)) as store:
        put(store, prompt(4))
        for seed in range(1, 6):
            put(store, prompt(4, seed))
        assert told(store, prompt(4)) == [(0, 4, "file", "refused", "admission")]


@pytest.mark.parametrize("after", ["put", "restart"])
def test_a_tier_that_is_left_alone(tmp_path: Path, after) -> None:
    place = FaultyBackend(DiskBackend(tmp_path, 1 << 20, sync="never"))
    with open_store("memory://4MiB", place) as store:
        (tier,) = store._tiered.tiers
        put(store, prompt(8), wait=True)
        if after == "restart":
            store._tiered.memory.remove(store._names.of(None).full(prompt(8)))
        for _ in range(3):
            tier.calls.failed("read", "", "a test")
        if after == "put":
            assert told(store, prompt(12)) == [(8, 12, "faulty", "unavailable", "breaker")]
        else:
            assert told(store, prompt(8)) == [(0, 8, "faulty", "unavailable", "breaker")]
        tier.calls.succeeded("read")
        assert get(store, prompt(8)) == 8


def test_a_failure_since_it_was_sought() -> None:
    place = FaultyBackend(MemoryBackend(1 << 20))
    with open_store("memory://4MiB", place) as store:
        put(store, prompt(8), wait=True)
        store._tiered.memory.remove(store._names.of(None).full(prompt(8)))
        since = time.time()
        place.fail("get", times=2)
        assert get(store, prompt(8)) == 0
        quiet(store)
        ((start, stop, tier, what, detail),) = told(store, prompt(8), since=since)
        assert (start, stop, tier, what) == (0, 8, "faulty", "unavailable")
        assert detail.startswith("get failed")
        assert told(store, prompt(8)) == []


def test_it_asks_nobody_and_waits_for_nobody(tmp_path: Path) -> None:
    place = FaultyBackend(DiskBackend(tmp_path, sync="never"))  # no budget: it is asked each time
    with small(4, place) as store:
        put(store, prompt(8), wait=True)
        put(store, prompt(16, 1), wait=True)
        calls = place.calls.copy()
        place.hang()
        for start in (0, 4):
            assert store.why(prompt(12), start)[-1].stop == 12
        assert place.calls == calls
        place.heal()


def test_mistakes() -> None:
    with open_store() as store:
        with pytest.raises(InvalidValue, match="start"):
            store.why(prompt(4), 5)
        with pytest.raises(InvalidValue, match="tenant"):
            store.why(prompt(4), tenant=5)


# --- where it came from ----------------------------------------------------------------------


def test_sources_of_get_and_prefetch(tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        assert store.tiers == ("memory", "file")
        put(store, prompt(15), wait=True, tail=True)
        full = store._names.of(None).full(prompt(15))
        store._tiered.memory.remove(full[1:])
        sources: list[tuple[str, int]] = []
        assert get(store, prompt(15), 2, sources=sources) == 13
        assert sources == [("memory", 2), ("file", 8), ("memory", 3)]
        store._tiered.memory.remove(full[:1])
        prefetch = store.prefetch(prompt(15), 3)
        assert prefetch.wait(10) == 15
        assert prefetch.start == 0
        assert prefetch.sources == (("file", 4), ("memory", 11))
        sources.clear()
        assert get(store, prompt(15), sources=sources) == 15
        assert sources == [("memory", 15)]
        sources.clear()
        assert get(store, prompt(15, 9), sources=sources) == 0
        assert sources == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_found_and_what_is_told_cover_a_prompt(data: st.DataObject) -> None:
    """Over a tiny memory and a small place below it, prompts that begin alike."""
    below = CountingBackend(MemoryBackend(6 * 4096))
    with small(4, below, policy=Inclusive(data.draw(st.integers(1, 2)))) as store:
        texts = [np.concatenate((prompt(6), prompt(10, seed))) for seed in range(3)]
        seen: set[bytes] = set()  # all that was put, whether or not there was room for it
        for _ in range(data.draw(st.integers(0, 8))):
            text = texts[data.draw(st.integers(0, 2))][: data.draw(st.integers(1, 16))]
            step = data.draw(st.sampled_from(["put", "get", "clear"]))
            if step == "put":
                put(store, text, tail=True)
                seen |= {text[:end].tobytes() for end in range(4, len(text) + 1, 4)}
                seen.add(text.tobytes())
            elif step == "get":
                get(store, text)
            else:
                store.clear()
            quiet(store)
        for text in texts:
            found = store.lookup(text).tokens
            fates = told(store, text, found)
            assert fates == told(store, text)
            assert found == len(text) or fates[0][0] == found
            for start, stop, _, what, _ in fates:
                for end in range(start // 4 * 4 + 4, stop + 1, 4):
                    assert (what == "never") == (text[:end].tobytes() not in seen)
