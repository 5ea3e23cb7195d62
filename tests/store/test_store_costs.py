"""A store learns what its reads and writes take, tier by tier."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from store_kv import GQA, disk, get, open_store, put, quiet

from faults import FaultyBackend
from kvkeep.core.cost import CostModel, TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import PassThrough

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = list(range(100, 140))  # ten blocks of four tokens
BLOCK = 4 * GQA.bytes_per_token


def behind(faulty: FaultyBackend, **more: object) -> KVStore:
    """A store that reads from ``faulty`` each time, with the blocks of TOKENS there."""
    store = open_store("memory://4MiB", faulty, policy=PassThrough(), **more)
    put(store, TOKENS, wait=True)
    quiet(store)
    forget(store)
    return store


def forget(store: KVStore) -> None:
    memory = store._tiered.memory
    memory.remove(list(memory.catalogue.blocks()))


def test_reads_are_learned_by_tier() -> None:
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    with behind(faulty) as store:
        reads = store.cost.reading("faulty")
        assert not reads.known
        faulty.slow(0.01, "get")
        for _ in range(4):
            assert get(store, TOKENS) == 40
            forget(store)
        quiet(store)
        assert reads.observations > 0
        # Ten reads by four threads: at least two after another.
        assert reads.seconds(10 * BLOCK) > 0.02
        assert reads.running == 0
        assert reads.queued == 0
        assert store.cost.load_s({"faulty": 10 * BLOCK}) == reads.seconds(10 * BLOCK)


def test_copies_out_of_memory_are_learned() -> None:
    with open_store() as store:
        put(store, TOKENS)
        for _ in range(3):
            get(store, TOKENS)
        copies = store.cost.reading("memory")
        assert copies.observations == 3
        assert 0 < copies.seconds(10 * BLOCK) < 1


def test_writes_are_learned() -> None:
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    faulty.slow(0.01, "put")
    with behind(faulty) as store:
        writes = store.cost.writing("faulty")
        assert writes.observations > 0
        assert writes.seconds(10 * BLOCK) > 0.02
        assert not store.cost.writing("memory").known


@pytest.mark.parametrize("fault", ["fail", "flip"])
def test_reads_that_fail_teach_nothing(fault: str) -> None:
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    with behind(faulty) as store:
        getattr(faulty, fault)(*(["get"] if fault == "fail" else []))
        assert get(store, TOKENS) == 0
        quiet(store)
        faulty.heal()
        assert not store.cost.reading("faulty").known
        assert store.cost.reading("faulty").queued == 0


def test_what_waits_is_known() -> None:
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    with behind(faulty, cost=CostModel(reads={"faulty": TransferCost(seconds_per_byte=1e-3)})) as s:
        reads = s.cost.reading("faulty")
        faulty.hang("get")
        reading = threading.Thread(target=get, args=(s, TOKENS))
        reading.start()
        faulty.wait_inside("get", 4)
        for _ in range(1000):
            if reads.queued == 10 * BLOCK:
                break
            threading.Event().wait(0.01)
        assert reads.queued == 10 * BLOCK
        assert reads.running == 4
        assert reads.busy_s == pytest.approx(10 * BLOCK * 1e-3)
        faulty.heal()
        reading.join(10)
        quiet(s)
        assert reads.queued == 0


def test_engine_and_stores_share_a_model(tmp_path: Path) -> None:
    cost = CostModel(reads={"file": TransferCost(seconds_per_byte=1e-9)})
    with open_store("memory://4MiB", disk(tmp_path), cost=cost) as store:
        assert store.cost is cost
        assert store.cost.load_s({"file": 1e9}) == pytest.approx(1)
    with BlockStore("ns", cost=cost) as blocks:
        assert blocks.cost is cost
    for opened in (lambda: open_store(cost=5), lambda: BlockStore("ns", cost=5)):
        with pytest.raises(InvalidValue, match="cost is 5"):
            opened()
