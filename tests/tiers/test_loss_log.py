"""What tiers remember of what they lost: every way that a block can go."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_bench import PAGE, SHORT, Bench, get, name, put, settle, until

from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, Inclusive, MemorySpec, Miss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.store.tiers import Loss, TieredStore, TierSpec


def loss(store: TieredStore, number: int, since: float | None = None) -> Loss | None:
    (one,) = store.losses_of([name(number)], since)
    return one


def told(store: TieredStore, number: int, since: float | None = None) -> tuple[str, str, str]:
    """Tier, what and detail; the time is one of the test's own."""
    one = loss(store, number, since)
    assert one is not None, "it is there"
    assert one.at is None or time.time() - 60 < one.at <= time.time()
    return one.tier, one.what, one.detail


def test_a_load_that_does_not_pay_tells_both_times() -> None:
    miss = Miss.slower(256, 512, "file", load_s=0.0804, compute_s=0.055)
    assert (miss.start, miss.stop, miss.tier, miss.what) == (256, 512, "file", "slower")
    assert miss.detail == "expected: loading would have taken 80.4 ms, computing 55 ms"
    assert (miss.load_s, miss.compute_s) == (0.0804, 0.055)
    late = Miss.slower(0, 8, "file", load_s=12.3456, compute_s=0.0005, overtaken=True)
    assert late.detail == "overtaken: loading would have taken 12346 ms, computing 0.5 ms"


# --- one tier of memory ----------------------------------------------------------------------


def test_no_room_in_memory(bench: Bench) -> None:
    store = bench.store(4)
    put(store, [1, 2])
    store.pins.pin([name(1), name(2)], 60)
    written = put(store, range(10, 16))
    assert len(written.kept) < 6
    assert told(store, 15) == ("memory", "dropped", "no room")


def test_its_time_was_over(bench: Bench) -> None:
    front = MemorySpec(MemoryBackend(8 * PAGE), ttl=0.05)
    store = bench.store(front)
    put(store, [1])
    assert loss(store, 1) is None
    until(lambda: loss(store, 1) is not None)
    assert told(store, 1) == ("memory", "removed", "ttl")


def test_its_time_was_over_below(bench: Bench) -> None:
    tier = bench.spec(bench.disk(), ttl=0.05)
    store = bench.store(2, tier)
    tier = store.tiers[0]
    put(store, [1])
    settle(store)
    store.memory.remove([name(1)])
    until(lambda: loss(store, 1) is not None)
    assert told(store, 1) == (tier.name, "removed", "ttl")
    tier.expire()
    assert told(store, 1) == (tier.name, "removed", "ttl")


# --- tiers below -----------------------------------------------------------------------------


def test_gone_from_memory_and_there_below(bench: Bench) -> None:
    store = bench.store(4, bench.disk())
    for number in range(8):
        put(store, [number])
        settle(store)
    assert store.memory.counters.evictions == 4
    assert [loss(store, number) for number in range(8)] == [None] * 8


def test_a_demotion_that_arrived_is_no_loss(bench: Bench) -> None:
    tier = bench.spec(bench.disk(16))
    store = bench.store(10, tier, policy=Exclusive())
    tier = store.tiers[0]
    for number in range(20):
        put(store, [number])
        settle(store)
    assert tier.counters.writes
    assert [loss(store, number) for number in range(20)] == [None] * 20


@pytest.mark.parametrize("policy", [Inclusive(2), Exclusive(2)])
def test_not_admitted(bench: Bench, policy) -> None:
    tier = bench.spec(bench.disk())
    store = bench.store(10, tier, policy=policy)
    tier = store.tiers[0]
    put(store, [0])
    get(store, [0])
    for number in range(1, 30):
        put(store, [number])
        settle(store)
    assert told(store, 1) == (tier.name, "refused", "admission")
    assert loss(store, 0) is None


def test_exclusive_refuses_nothing_that_it_would_move_later(bench: Bench) -> None:
    """It admits nothing below memory at first: what is lost then was lost by an eviction."""
    tier = bench.spec(bench.disk(4))
    store = bench.store(10, tier, policy=Exclusive())
    tier = store.tiers[0]
    for number in range(30):
        put(store, [number])
        settle(store)
    assert told(store, 0)[:2] == (tier.name, "evicted")


def test_the_queue_was_full(bench: Bench) -> None:
    place = bench.disk()
    tier = bench.spec(place, queue_bytes=2 * PAGE, writers=1)
    store = bench.store(8, tier)
    tier = store.tiers[0]
    place.hang("put")
    put(store, range(8))
    place.heal()
    settle(store)
    lost = [number for number in range(8) if not tier.known([name(number)])]
    assert lost
    store.memory.remove([name(number) for number in lost])  # as if it had to make room
    for number in lost:
        assert told(store, number) == (tier.name, "dropped", "queue full")


def test_a_write_failed(bench: Bench) -> None:
    place = bench.disk()
    tier = bench.spec(place)
    store = bench.store(2, tier)
    tier = store.tiers[0]
    place.fail("put", times=1)
    put(store, [1])
    settle(store)
    put(store, [2, 3])
    settle(store)
    assert told(store, 1) == (tier.name, "dropped", "write failed")


def test_written_while_the_tier_was_left_alone(bench: Bench) -> None:
    place = bench.disk()
    tier = bench.spec(place, breaker_limit=1, pause=30.0)
    store = bench.store(2, tier)
    tier = store.tiers[0]
    place.fail("put")
    put(store, [1])
    settle(store)
    put(store, [2])
    settle(store)
    put(store, [3, 4])
    settle(store)
    assert told(store, 1) == (tier.name, "dropped", "write failed")
    assert told(store, 2) == (tier.name, "dropped", "breaker")


def test_the_place_has_lost_it(bench: Bench) -> None:
    place = bench.disk()
    store = _below_only(bench, bench.spec(place), range(3))
    tier = store.tiers[0]
    place.inner.delete([name(1)])
    assert get(store, range(3)) == 1
    settle(store)
    assert told(store, 1) == (tier.name, "removed", "gone")


def test_a_record_that_is_not_for_us(bench: Bench) -> None:
    place = bench.disk()
    lossy = bench.store(2, bench.spec(place, codec="fp8"))
    put(lossy, [1])
    settle(lossy)
    tier = bench.spec(place)
    store = bench.store(2, tier)
    tier = store.tiers[0]
    assert get(store, [1]) == 0
    settle(store)
    assert told(store, 1)[:2] == (tier.name, "refused")


# --- tiers that do not answer ----------------------------------------------------------------


def test_a_place_of_others_may_have_anything(bench: Bench) -> None:
    place = bench.disk(None)  # without a budget it is asked each time
    tier = bench.spec(place, breaker_limit=1, pause=30.0)
    store = bench.store(4, tier)
    tier = store.tiers[0]
    assert told(store, 9) == ("", "never", "")
    place.fail("sizes")
    assert store.locate([name(9)]) == []
    assert told(store, 9) == (tier.name, "unavailable", "breaker")


def test_what_a_tier_lost_itself_is_told_while_it_is_away(bench: Bench) -> None:
    place = bench.disk(3)
    tier = bench.spec(place, breaker_limit=1, pause=30.0)
    store = bench.store(2, tier)
    tier = store.tiers[0]
    for number in range(6):
        put(store, [number])
        settle(store)
    place.fail("get")
    assert get(store, [3]) == 0
    assert told(store, 0)[:2] == (tier.name, "evicted")
    assert told(store, 3)[:2] == (tier.name, "unavailable")


def test_late_since_then(bench: Bench) -> None:
    place = bench.disk()
    store = _below_only(bench, bench.spec(place, timeout=SHORT, breaker_limit=100), range(2))
    tier = store.tiers[0]
    began = time.time()
    place.hang("get")
    assert get(store, [0]) == 0
    assert told(store, 0, began) == (tier.name, "late", "no answer")
    place.heal()


# --- where it was read -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of examples: another one each time."""
    root = tmp_path_factory.mktemp("losses")
    return (root / str(number) for number in itertools.count())


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pgrc"), st.integers(0, 11)), max_size=25),
    st.booleans(),
    st.booleans(),
)
def test_a_block_is_there_or_has_a_fate(folders, steps, exclusive, disk) -> None:
    """Whatever was done: what was put once is either there or nobody's "never"."""
    bench = Bench(next(folders))
    try:
        policy = Exclusive() if exclusive else Inclusive()
        place = bench.disk(4) if disk else bench.memory(4)
        store = bench.store(6, bench.spec(place), policy=policy)
        seen: set[int] = set()
        for step, number in steps:
            if step == "p":
                put(store, [number, number + 1])
                seen |= {number, number + 1}
            elif step == "g":
                get(store, [number])
            elif step == "r":
                store.remove([name(number)])
            else:
                store.clear(name(0)[:16])
            settle(store)
        for number in range(13):
            one = loss(store, number)
            assert (one is None) == (get(store, [number]) == 1)
            if one is not None:
                assert (one.what == "never") == (number not in seen)
            settle(store)
    finally:
        bench.end()


def _below_only(bench: Bench, tier: TierSpec, numbers: range) -> TieredStore:
    """A store whose blocks lie in ``tier`` and not in memory."""
    store = bench.store(8, tier)
    put(store, numbers)
    settle(store)
    store.memory.remove([name(number) for number in numbers])
    return store
