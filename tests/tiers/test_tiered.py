"""What a store of tiers keeps, drops, pins, counts against quotas, forgets and promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tier_bench import PAGE, RAW, Bench, above, get, name, put, settle, there

from faults import FaultyBackend
from kvkeep.store.backends import WriteBudget
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, Inclusive, MemorySpec

if TYPE_CHECKING:
    from kvkeep.store.tiers import MemoryTier, Tier, TieredStore


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, *tiers: Tier | MemoryTier) -> None:
        self.now = tiers[0].catalogue._clock()
        for tier in tiers:
            tier.catalogue._clock = self

    def __call__(self) -> float:
        return self.now


def emptied(store: TieredStore) -> None:
    settle(store)
    store.memory.remove([item.block for item in store.memory.backend.list()])


# --- writing ---------------------------------------------------------------------------------


def test_what_is_there_is_not_put_again(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    assert put(store, range(4), wait=20).kept == [0, 1, 2, 3]
    written = put(store, range(6), wait=20)
    assert (written.kept, written.already) == ([4, 5], [0, 1, 2, 3])
    emptied(store)
    assert put(store, range(6)).already == list(range(6))
    assert above(store) == [], "what is below is not fetched by a put"
    assert place.calls["put"] == 6


@pytest.mark.parametrize("fault", ["fail", "lose", "fill_up"])
def test_a_failed_write_is_tried_again_by_the_next_put(fault: str, bench: Bench) -> None:
    bad, good = bench.disk(), bench.disk(at="good")
    store = bench.store(16, bad, good)
    if fault == "fail":
        bad.fail("put", times=2)
    elif fault == "lose":
        bad.lose(times=2)
    else:
        bad.fill_up(times=20)
    put(store, range(4), wait=20)
    bad.heal()
    assert there(store.tiers[1]) == [0, 1, 2, 3]
    missing = {*range(4)} - {*there(store.tiers[0])}
    assert missing
    if fault == "lose":  # nobody knows before it is asked for
        emptied(store)
        assert get(store, range(4)) == 4
        settle(store)
    written = put(store, range(4), wait=20)
    assert written.kept == []
    assert there(store.tiers[0]) == [0, 1, 2, 3]


def test_behind_a_dropped_block_nothing_is_written_in_vain(bench: Bench) -> None:
    small, large = bench.disk(), bench.disk(at="large")
    store = bench.store(32, bench.spec(small, queue_bytes=3 * PAGE, writers=1), large)
    tiers = store.tiers
    small.hang("put")
    assert put(store, range(8)).kept == list(range(8))
    assert tiers[0].counters.drops == 5
    small.slow(0.05, "put")
    small.heal("hang")
    settle(store)
    assert there(tiers[0]) == [0, 1, 2], "the beginning, without a gap"
    assert there(tiers[1]) == list(range(8)), "the other tier has it all"
    assert put(store, range(8), wait=20).already == list(range(8))
    assert there(tiers[0]) == list(range(8))


def test_room_that_comes_free_in_the_middle_is_not_used_behind_a_gap(bench: Bench) -> None:
    place = bench.disk()
    tier = bench.spec(place, queue_bytes=2 * PAGE)
    store = bench.store(32, tier)
    tier = store.tiers[0]
    place.hang("put")
    blocks = [name(number) for number in range(6)]

    def fill(at: int, raw: memoryview) -> None:
        raw[:] = bytes(RAW)
        if at == 4:
            place.heal()
            assert tier.writing.wait(10)

    store.write(blocks, [RAW] * 6, fill)
    settle(store)
    assert there(tier) == [0, 1]
    assert tier.counters.drops == 4


def test_a_put_with_wait_waits_for_room_and_for_the_end(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(8, bench.spec(place, queue_bytes=2 * PAGE))
    place.slow(0.005, "put")
    assert put(store, range(40), wait=30).kept == list(range(40))
    assert there(store.tiers[0]) == list(range(40))
    assert store.tiers[0].counters.drops == 0


def test_a_fill_that_raises_leaves_nothing_behind(bench: Bench) -> None:
    store = bench.store(8, bench.disk())

    def fill(at: int, raw: memoryview) -> None:
        del raw
        if at == 2:
            raise ValueError("no such KV")

    with pytest.raises(ValueError, match="no such KV"):
        store.write([name(n) for n in range(4)], [RAW] * 4, fill)
    settle(store)
    assert above(store) == [0, 1]
    assert store.memory.backend.used() == 2 * PAGE


def test_blocks_are_deleted_on_their_way_down(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, bench.spec(place, writers=1, timeout=1.0))
    place.hang("put")
    put(store, range(4))
    place.wait_inside("put")
    store.remove([name(0), name(2)])  # which waits as long as the tier may take
    place.heal()
    settle(store)
    assert there(store.tiers[0]) == above(store) == [1, 3]
    store.clear(name(0)[:16])
    assert there(store.tiers[0]) == above(store) == []


def test_a_listing_that_goes_on_delays_no_lookup(bench: Bench) -> None:
    store = bench.store(64, bench.disk())
    put(store, range(8), wait=20)
    store.close()
    place = bench.disk()
    place.hang("list")
    store = bench.store(64, place)
    assert place.inside["list"] == 1
    assert get(store, range(8)) == 8
    place.heal()
    settle(store)
    assert len(there(store.tiers[0])) == 8


# --- budgets ---------------------------------------------------------------------------------


def test_a_budget_that_became_smaller_holds_from_the_opening_on(bench: Bench) -> None:
    store = bench.store(64, bench.disk(64))
    put(store, range(40), wait=20)
    store.close()
    store = bench.store(64, bench.spec(bench.disk(16), writers=2))
    settle(store)
    assert store.stats()[1].counters["evictions"] == 24
    assert len(there(store.tiers[0])) == 16
    assert store.stats()[1].used_bytes == 16 * PAGE
    put(store, range(100, 104), wait=20)
    assert len(there(store.tiers[0])) == 16, "only what had to go went"


def test_a_smaller_budget_counts_whole_units(bench: Bench) -> None:
    """Where records do not fill them, as those of models do not."""
    size = PAGE + 500
    store = bench.store(64, bench.disk(80))
    put(store, range(40), size=size, wait=20)
    store.close()
    store = bench.store(64, bench.disk(16))
    settle(store)
    assert store.tiers[0].backend.used() == 16 * PAGE
    assert len(there(store.tiers[0])) == 8
    assert get(store, range(40), size=size) == 8, "the end of a prompt goes first"


def test_stores_that_open_a_smaller_place_together_evict_it_once(bench: Bench) -> None:
    store = bench.store(64, bench.disk(300))
    for start in range(0, 256, 32):
        put(store, range(start, start + 32), wait=20)
    store.close()
    places = [bench.disk(128) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        stores = list(threads.map(lambda place: bench.store(8, place), places))
    for one in stores:
        settle(one)
    used = places[0].used() // PAGE
    assert 128 - 3 * 128 // 64 <= used <= 128


# --- quotas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_a_quota_holds_in_every_tier(policy: type[Inclusive], bench: Bench) -> None:
    store = bench.store(32, bench.memory(64), bench.disk(), policy=policy())
    spaces = [name(0, space)[:16] for space in range(2)]
    store.set_quota(spaces[0], 6 * PAGE)
    put(store, range(4), space=1, wait=20)
    for number in range(30):
        size = (1 + number % 3) * PAGE - 128
        assert put(store, [number], space=0, size=size, wait=20).kept == [0]
        settle(store)
        for tier in (store.memory, *store.tiers):
            assert tier.catalogue.spaces().get(spaces[0], 0) <= 6 * PAGE
    assert get(store, range(4), space=1) == 4, "others keep theirs"
    assert get(store, [29], space=0, size=3 * PAGE - 128) == 1


def test_a_quota_smaller_than_a_block_keeps_nothing_and_reads_all_the_same(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    put(store, range(2), wait=20)
    emptied(store)
    put(store, [9], space=1, wait=20)
    store.set_quota(name(0)[:16], PAGE // 2)
    assert put(store, [5]).kept == []
    assert get(store, range(2)) == 2, "through a buffer of its own"
    assert above(store) == [9]
    assert get(store, [9], space=1) == 1


def test_a_quota_lets_the_ends_of_its_own_prompts_go(bench: Bench) -> None:
    store = bench.store(64, bench.memory(64))
    store.set_quota(name(0)[:16], 8 * PAGE)
    for first in (0, 10, 20):
        put(store, range(first, first + 4), wait=20)
    for blocks in (above(store), there(store.tiers[0])):
        assert blocks == [10, 11, 12, 13, 20, 21, 22, 23]
    put(store, range(30, 32), wait=20)
    for blocks in (above(store), there(store.tiers[0])):
        assert blocks == [10, 11, 20, 21, 22, 23, 30, 31]


def test_a_quota_holds_against_many_who_write_at_once(bench: Bench) -> None:
    place = bench.memory(64)
    store = bench.store(64, bench.spec(place, writers=8))
    space = name(0)[:16]
    store.set_quota(space, 8 * PAGE)
    store.memory.catalogue.set_quota(space, 64 * PAGE)
    place.slow(0.002, "put")
    for first in range(0, 120, 8):
        put(store, range(first, first + 8), wait=20)
        assert len(there(store.tiers[0])) <= 8
    assert len(there(store.tiers[0])) > 4


# --- pins ------------------------------------------------------------------------------------


def test_pinned_blocks_outlive_pressure_until_their_time_is_over(bench: Bench) -> None:
    store = bench.store(8, bench.memory(16))
    clock = Clock(store.memory, *store.tiers)
    put(store, range(3), wait=20)
    blocks = [name(number) for number in range(3)]
    assert store.pins.pin(blocks, 60.0) == 3
    for number in range(100, 140):
        put(store, [number], wait=20)
    assert {0, 1, 2} <= {*above(store)}
    assert {0, 1, 2} <= {*there(store.tiers[0])}
    assert [tier.pinned_bytes for tier in store.stats()] == [3 * PAGE, 3 * PAGE]
    clock.now += 61
    assert [tier.pinned_bytes for tier in store.stats()] == [0, 0]
    for number in range(200, 240):
        put(store, [number], wait=20)
    assert not {0, 1, 2} & {*above(store), *there(store.tiers[0])}


def test_pins_hold_half_of_each_tier_at_most(bench: Bench) -> None:
    store = bench.store(8, bench.memory(24))
    put(store, range(6), wait=20)
    put(store, range(6, 12), wait=20)
    put(store, range(12, 16), wait=20)
    blocks = [name(number) for number in range(16)]
    assert store.pins.pin(blocks, 60.0) == 12, "as many as the larger tier may hold"
    memory, below = store.stats()
    assert memory.pinned_bytes <= 4 * PAGE
    assert below.pinned_bytes == 12 * PAGE
    assert store.pins.pin([name(99)], 60.0) == 0
    assert store.pins.unpin(blocks) == 12
    assert [tier.pinned_bytes for tier in store.stats()] == [0, 0]
    assert store.pins.unpin(blocks) == 0


def test_what_is_deleted_is_not_pinned_any_more(bench: Bench) -> None:
    store = bench.store(8, bench.disk())
    put(store, range(3), wait=20)
    store.pins.pin([name(number) for number in range(3)], 60.0)
    store.clear(name(0)[:16])
    assert [tier.pinned_bytes for tier in store.stats()] == [0, 0]


# --- time to live ----------------------------------------------------------------------------


def test_what_outlived_its_time_is_not_found_and_goes(bench: Bench) -> None:
    front = MemorySpec(MemoryBackend(16 * PAGE), ttl=10.0)
    place = bench.memory(64)
    store = bench.store(front, bench.spec(place, ttl=100.0))
    clock = Clock(store.memory, *store.tiers)
    put(store, range(4), wait=20)
    clock.now += 9
    assert store.locate([name(0), name(1)]) == [0, 0]
    assert get(store, [0]) == 1
    clock.now += 9
    assert store.locate([name(0)]) == [0], "a use counts"
    assert store.locate([name(1)]) == [1], "it outlived memory, not the tier"
    clock.now += 90
    assert store.locate([name(2)]) == []
    assert get(store, [2]) == 0
    assert store.locate([name(0)]) == [1], "a use above counts below"
    store.tiers[0].expire()
    assert there(store.tiers[0]) == [0]
    assert put(store, [2], wait=20).kept == [0]
    assert there(store.tiers[0]) == [0, 2]


def test_pins_keep_what_outlived_its_time(bench: Bench) -> None:
    store = bench.store(16, bench.spec(bench.memory(64), ttl=100.0))
    clock = Clock(*store.tiers)
    put(store, range(2), wait=20)
    emptied(store)
    assert store.tiers[0].catalogue.pin([name(0)], 1000.0, 64 * PAGE) == [name(0)]
    clock.now += 500
    assert get(store, [0]) == 1
    assert get(store, [1]) == 0


# --- flush -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_true_promises_that_all_is_below(policy: type[Inclusive], bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(32, place, policy=policy())
    place.slow(0.005, "put")
    put(store, range(20))
    assert store.flush(20)
    assert there(store.tiers[0]) == list(range(20))
    assert place.calls["flush"] == 1
    assert store.flush(20), "and again, with nothing to do"


@pytest.mark.parametrize("call", ["put", "flush"])
def test_false_where_something_could_not_be_done(call: str, bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(32, bench.spec(place, breaker_limit=100), policy=Exclusive())
    put(store, range(4))
    place.fail(call)
    assert not store.flush(20)
    place.heal()
    assert store.flush(20)
    assert there(store.tiers[0]) == [0, 1, 2, 3]


def test_false_where_there_was_no_time(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(32, place)
    place.hang("put")
    put(store, range(4))
    assert not store.flush(0.05)
    place.heal()
    assert store.flush(20)
    assert there(store.tiers[0]) == [0, 1, 2, 3]


def test_all_of_a_large_memory_goes_down_through_a_small_queue(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(64, bench.spec(place, queue_bytes=2 * PAGE), policy=Exclusive())
    put(store, range(50))
    assert store.flush(20)
    assert there(store.tiers[0]) == list(range(50))


# --- several namespaces, places that have to be asked ------------------------------------------


def test_clearing_a_namespace_leaves_others_where_nothing_is_known(bench: Bench) -> None:
    """The place has no budget, so what lies there is known from its listing alone."""
    store = bench.store(32, bench.disk(None))
    for space in (0, 1):
        put(store, range(4), space=space, wait=20)
    other = bench.store(32, bench.disk(None))
    assert other.clear(name(0, 0)[:16]).complete
    assert there(other.tiers[0]) == [0, 1, 2, 3]
    emptied(store)
    assert [get(store, range(4), space=space) for space in (0, 1)] == [0, 4]
    assert other.clear(name(0, 1)[:16]).complete
    assert there(other.tiers[0]) == []


def test_what_is_asked_for_in_the_middle_of_a_prompt_is_located_there(bench: Bench) -> None:
    store = bench.store(64, bench.disk(None), bench.disk(at="e"))
    put(store, range(30), wait=20)
    store.tiers[0].remove(store.tiers[0].states.delete([name(number) for number in range(20, 30)]))
    store.tiers[1].remove(store.tiers[1].states.delete([name(number) for number in range(20)]))
    store.memory.remove([name(number) for number in [*range(3, 10), *range(12, 30)]])
    blocks = [name(number) for number in range(32)]
    assert store.locate(blocks) == [0] * 3 + [1] * 7 + [0] * 2 + [1] * 8 + [2] * 10
    assert get(store, range(32)) == 30
    place = store.tiers[0].backend
    assert isinstance(place, FaultyBackend)
    emptied(store)
    asked = place.calls["sizes"]
    assert store.locate(blocks[:20]) == [1] * 20
    assert place.calls["sizes"] - asked == 3, "about 1, 16 and the rest: no block twice"


def test_a_tier_that_never_takes_what_is_put_did_not_refuse_it(bench: Bench) -> None:
    store = bench.store(8, bench.disk(), policy=Exclusive())
    put(store, range(4), wait=20)
    store.memory.remove([name(number) for number in range(4)])
    assert [store.losses.of(name(number)) for number in range(4)] == [None] * 4
    later = bench.store(8, bench.disk(at="later"), policy=Inclusive(admit_after=2))
    put(later, range(4), wait=20)
    later.memory.remove([name(number) for number in range(4)])
    assert {fate.detail for fate in later.losses_of([name(0)]) if fate} == {"admission"}


# --- write budgets ---------------------------------------------------------------------------


def test_what_a_budget_does_not_allow_is_counted_and_explained(bench: Bench) -> None:
    budget = WriteBudget(12 * 5 * PAGE, 86_400)
    store = bench.store(32, bench.spec(bench.disk(), writes=budget), policy=Inclusive())
    put(store, range(8), wait=5)
    tier = store.stats()[1]
    assert tier.budget is not None
    assert tier.budget["bytes"] == budget.amount
    assert tier.budget["left"] < PAGE
    counters = tier.counters
    assert (counters["writes"], counters["over_budget"], counters["drops"]) == (5, 3, 3)
    put(store, range(100, 132))
    losses = store.losses_of([name(number) for number in range(8)])
    whys = [loss and (loss.what, loss.detail) for loss in losses]
    assert whys.count(("dropped", "write budget")) >= 3


def test_a_block_is_charged_once_however_often_room_is_made_for_it(bench: Bench) -> None:
    budget = WriteBudget(12 * 100 * PAGE, 86_400)
    store = bench.store(32, bench.spec(bench.memory(8), writes=budget), policy=Inclusive())
    for number in range(24):
        put(store, [number], wait=5)
    tier = store.stats()[1]
    assert tier.budget is not None
    assert tier.counters["evictions"] >= 12
    assert tier.budget["left"] >= budget.burst - tier.counters["written_bytes"]
