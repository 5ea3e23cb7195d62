"""Deletions that fail: their records are deleted later, and are never in the way of a write."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tier_bench import PAGE, Bench, get, name, put, settle, there, until

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, MemorySpec

if TYPE_CHECKING:
    from faults import FaultyBackend
    from kvkeep.store.tiers import Tier, TieredStore

LONG = 20.0
PAUSE = 0.05
ROOM = 8


def full(bench: Bench) -> tuple[TieredStore, Tier, FaultyBackend]:
    """A store of four blocks of memory above a full place of eight."""
    place = bench.memory(ROOM)
    store = bench.store(4, bench.spec(place, pause=PAUSE))
    put(store, range(ROOM), wait=LONG)
    settle(store)
    assert there(store.tiers[0]) == list(range(ROOM))
    return store, store.tiers[0], place


def test_room_is_not_lost_to_deletions_that_failed(bench: Bench) -> None:
    store, tier, place = full(bench)
    for number in range(100, 100 + 3 * ROOM):  # each failure leaves a record behind
        place.fail("delete", times=1)
        put(store, [number], wait=LONG)
        settle(store)
        until(lambda: not tier.calls.any_blocks("delete"))
    put(store, range(200, 200 + ROOM), wait=LONG)
    settle(store)
    assert there(tier) == list(range(200, 200 + ROOM)), "all the room is usable again"
    assert tier.states.undeleted() == []
    assert store.flush(LONG)
    tier.catalogue.check()


def test_blocks_that_a_caller_removed_in_vain_make_room_first(bench: Bench) -> None:
    store, tier, place = full(bench)
    place.fail("delete", times=1)
    store.remove([name(3), name(4)])
    settle(store)
    assert there(tier) == list(range(ROOM))
    assert get(store, range(ROOM)) == 3, "what was removed is not served"
    put(store, [100, 101], wait=LONG)
    settle(store)
    assert there(tier) == [0, 1, 2, 5, 6, 7, 100, 101], "no other block had to leave"


def test_a_record_written_anew_is_not_deleted_instead_of_the_old_one(bench: Bench) -> None:
    store, tier, place = full(bench)
    place.fail("delete", times=1)
    store.remove([name(3)])
    put(store, [3], wait=LONG)
    settle(store)
    assert tier.states.undeleted() == []
    put(store, [100], wait=LONG)
    settle(store)
    assert 3 in there(tier)
    assert get(store, [3]) == 1


def test_nor_while_it_is_being_written(bench: Bench) -> None:
    store, tier, place = full(bench)
    place.fail("delete", times=1)
    store.remove([name(3), name(4)])
    begun, go = threading.Event(), threading.Event()
    inner_put = place.inner.put

    def slow(block: bytes, record: memoryview) -> None:
        if block == name(3):
            begun.set()
            assert go.wait(LONG)
        inner_put(block, record)

    place.inner.put = slow  # type: ignore[method-assign]
    put(store, [3])
    assert begun.wait(LONG)
    put(store, [100])  # makes room by deleting what was left: 4, not 3
    until(lambda: 100 in there(tier))
    assert 3 in there(tier)
    go.set()
    settle(store)
    assert {3, 100} < {*there(tier)}
    assert 4 not in there(tier)
    assert get(store, [3]) == 1


def test_a_flush_does_not_wait_for_blocks_that_expired_in_memory(bench: Bench) -> None:
    front = MemorySpec(MemoryBackend(8 * PAGE), ttl=0.05)
    store = bench.store(front, bench.spec(bench.memory(ROOM)), policy=Exclusive())
    put(store, range(4))
    time.sleep(0.1)
    assert store.flush(LONG)
    assert store.tiers[0].counters.drops == 0
    assert there(store.tiers[0]) == []


def test_what_is_left_counts_for_the_quota(bench: Bench) -> None:
    place = bench.disk(64)
    store = bench.store(64, bench.spec(place, writers=1))
    tier = store.tiers[0]
    tier.catalogue.set_quota(name(0)[:16], 3 * PAGE)
    put(store, range(3), wait=20)
    place.fail("delete", times=2)
    for number in range(10, 16):
        put(store, [number], wait=20)
        assert len(there(tier)) <= 3
    assert not tier.states.undeleted()
    assert there(tier) == [13, 14, 15]
    put(store, [30], space=1, wait=20)
    place.fail("delete")
    for number in range(16, 20):
        put(store, [number], wait=20)
    put(store, [31], space=1, wait=20)
    assert len(there(tier)) == 5, "others have no quota"
    loss = store.losses.of(name(19))
    assert loss is not None
    assert (loss.what, loss.detail) == ("dropped", "quota")


def test_a_quota_counts_what_another_writer_is_evicting(bench: Bench) -> None:
    place = bench.memory(16)
    store = bench.store(16, bench.spec(place, writers=2))
    store.set_quota(name(0)[:SPACE_BYTES], 2 * PAGE)
    put(store, range(1), wait=20)
    put(store, range(1, 2), wait=20)
    place.hang("delete")
    put(store, range(2, 3))
    place.wait_inside("delete")
    put(store, range(3, 4))
    time.sleep(0.1)
    assert there(store.tiers[0]) == [0, 1], "neither new one fits beside both"
    place.heal()
    settle(store)
    assert len(there(store.tiers[0])) == 2
    assert store.tiers[0].counters.drops == 0
