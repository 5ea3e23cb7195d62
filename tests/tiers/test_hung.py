"""Tiers that hang, fail or are slow: what that costs, and that everything else goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tier_bench import SHORT, get, name, put, settle, there, until

from kvkeep.store.tiers import Exclusive

if TYPE_CHECKING:
    from tier_bench import Bench

    from faults import FaultyBackend
    from kvkeep.store.tiers import TieredStore

LONG = 20.0
"""Seconds that nobody waits for: a call that takes a tenth of it waited for something hung."""


def emptied(store: TieredStore) -> TieredStore:
    """Nothing in memory any more; what is below stays."""
    settle(store)
    store.memory.remove([item.block for item in store.memory.backend.list()])
    return store


def test_a_hung_read_costs_its_timeout_and_the_next_tier_has_it(bench: Bench) -> None:
    slow, good = bench.memory(64), bench.memory(64)
    first = bench.spec(slow, timeout=SHORT, pause=LONG)
    store = bench.store(16, first, good)
    first = store.tiers[0]
    put(store, range(8))
    emptied(store)
    slow.hang("get")
    started = time.monotonic()
    assert get(store, range(8)) == 8
    took = time.monotonic() - started
    assert SHORT <= took < LONG / 10
    assert first.counters.late >= 3
    assert first.calls.state == "open"
    assert store.tiers[1].counters.hits == 8
    # From now on it costs nothing.
    emptied_blocks = [name(number) for number in range(8)]
    store.memory.remove(emptied_blocks)
    asked = slow.calls["get"]
    slow.timeout = LONG  # of who waits for it
    started = time.monotonic()
    assert get(store, range(8)) == 8
    assert time.monotonic() - started < LONG / 4
    assert slow.calls["get"] == asked
    assert first.counters.skipped_calls > 0


def test_two_hung_tiers_cost_two_timeouts_and_the_third_has_it(bench: Bench) -> None:
    slow = [bench.memory(64), bench.memory(64)]
    specs = [bench.spec(place, timeout=SHORT, pause=LONG) for place in slow]
    store = bench.store(16, *specs, bench.disk())
    put(store, range(4))
    emptied(store)
    for place in slow:
        place.hang("get")
    started = time.monotonic()
    assert get(store, range(4)) == 4
    assert 2 * SHORT <= time.monotonic() - started < LONG / 10
    assert [tier.calls.state for tier in store.tiers] == ["open", "open", "closed"]


def test_two_slow_tiers_that_are_in_time_are_waited_for(bench: Bench) -> None:
    places = [bench.memory(64), bench.disk()]
    store = bench.store(16, *places)
    put(store, range(12))
    emptied(store)
    for place in places:
        place.slow(0.02, "get")
    store.tiers[0].remove(
        store.tiers[0].states.delete([name(number) for number in range(1, 12, 2)])
    )
    assert get(store, range(12)) == 12
    assert [tier.counters.hits for tier in store.tiers] == [6, 6]
    assert [tier.counters.late for tier in store.tiers] == [0, 0]
    assert [tier.calls.state for tier in store.tiers] == ["closed", "closed"]


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_it_is_tried_again_later_and_comes_back(how: str, bench: Bench) -> None:
    place = bench.memory(64)
    tier = bench.spec(place, timeout=SHORT, pause=0.1)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(4))
    emptied(store)
    place.hang("get") if how == "hang" else place.fail("get")
    for _ in range(3):
        get(store, range(4))
    assert tier.calls.state != "closed"
    opened = tier.calls.opened
    until(lambda: not tier.calls.blocks("read"))
    assert get(store, range(4)) == 0, "the try failed, too"
    assert tier.calls.opened > opened
    place.heal()
    until(lambda: get(store, range(4)) == 4)
    assert tier.calls.state == "closed"


def test_writes_to_a_hung_tier_are_dropped_and_memory_goes_on(bench: Bench) -> None:
    place = bench.memory(256)
    tier = bench.spec(place, timeout=SHORT, pause=LONG)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    place.hang("put")
    for first in range(0, 192, 4):
        assert len(put(store, range(first, first + 4)).kept) == 4
        assert get(store, range(first, first + 4)) == 4
        time.sleep(0.02)
    assert tier.calls.state == "open"
    assert tier.counters.drops > 0
    assert tier.counters.writes == 0
    place.heal()
    settle(store)


def test_waiting_for_writes_costs_a_hung_tier_its_timeout(bench: Bench) -> None:
    hung, good = bench.memory(64), bench.memory(64)
    store = bench.store(16, bench.spec(hung, timeout=SHORT, pause=LONG), good)
    hung.hang("put")
    started = time.monotonic()
    assert put(store, range(4), wait=LONG).kept == [0, 1, 2, 3]
    assert time.monotonic() - started < LONG / 4
    assert there(store.tiers[1]) == [0, 1, 2, 3]
    hung.heal()


def test_a_flush_says_that_it_hangs_and_does_the_others(bench: Bench) -> None:
    hung, good = bench.memory(64), bench.disk()
    store = bench.store(16, bench.spec(hung, timeout=SHORT, pause=SHORT), good)
    hung.hang("put")
    put(store, range(4))
    started = time.monotonic()
    assert not store.flush(LONG)
    assert time.monotonic() - started < LONG / 4
    assert good.calls["flush"] == 1
    hung.heal()
    settle(store)
    # The writes that hung count as late and may open the breaker; it closes after its pause.
    until(lambda: store.flush(LONG), LONG)


def test_a_close_flushes_those_that_do_not_hang(bench: Bench) -> None:
    hung, good = bench.memory(64), bench.disk()
    store = bench.store(16, bench.spec(hung, timeout=SHORT), good)
    hung.hang("put", "close")
    put(store, range(4))
    started = time.monotonic()
    assert not store.close(2.0)
    assert time.monotonic() - started < LONG / 4
    assert good.calls["flush"] == 1
    assert good.calls["close"] == 1


def test_a_hung_tier_does_not_take_the_one_above_it_along(bench: Bench) -> None:
    """What tier 1 evicts goes to tier 2, which hangs: tier 1 goes on reading and writing."""
    upper, lower = bench.memory(8), bench.memory(64)
    specs = [
        bench.spec(upper, timeout=2 * SHORT, pause=LONG),
        bench.spec(lower, timeout=2 * SHORT, pause=LONG),
    ]
    store = bench.store(8, *specs, policy=Exclusive())
    tiers = store.tiers
    lower.hang("put")
    for first in range(0, 600, 2):
        put(store, range(first, first + 2))
        time.sleep(0.03)
        if first >= 58 and tiers[0].counters.demotions_dropped:  # later on a busy machine
            break
    assert store.flush(0.0) in {True, False}
    assert tiers[0].calls.opened == 0, "tier 1 is well"
    assert tiers[0].writing.wait(LONG)
    for number in there(tiers[0]):
        assert get(store, [number]) == 1
    assert tiers[0].counters.demotions_dropped > 0
    lower.heal()


@pytest.mark.parametrize("each", [False, True])
def test_a_tier_that_hangs_when_it_is_asked_leaves_time_to_ask_the_next(
    bench: Bench, each: bool
) -> None:
    """Both may hold what another process has written; one caller's time is for both."""
    writer = bench.store(16, bench.disk())
    slow, good = bench.memory(64), bench.disk()
    slow.shared = True
    store = bench.store(16, bench.spec(slow, pause=LONG), good)
    put(writer, range(4))
    settle(writer)
    slow.hang("sizes")
    blocks = [name(number) for number in range(4)]
    ask = store.locate_each if each else store.locate
    assert list(ask(blocks, time.monotonic() + 4 * SHORT)) == [2] * 4


def full(bench: Bench) -> FaultyBackend:
    """A place that is full of what an earlier process wrote, and whose listing hangs."""
    before = bench.store(16, bench.disk(4))
    put(before, range(4), wait=20)
    assert before.close(20)
    place = bench.disk(4)
    place.hang("list")
    return place


@pytest.mark.parametrize("shared", [False, True])
def test_writes_wait_for_the_first_listing_which_says_what_may_go(
    bench: Bench, shared: bool
) -> None:
    place = full(bench)
    place.shared = shared
    store = bench.store(16, bench.spec(place, timeout=2 * SHORT))
    tier = store.tiers[0]
    put(store, range(10, 13))
    time.sleep(SHORT / 4)
    assert tier.counters.drops == tier.counters.writes == 0
    tier.backend.timeout = LONG
    place.heal()
    settle(store)
    assert (tier.counters.drops, tier.counters.writes, tier.counters.evictions) == (0, 3, 3)
    assert place.calls["list"] == 1, "the listing that they waited for is good for them"


@pytest.mark.parametrize("shared", [False, True])
def test_a_listing_that_hangs_keeps_no_writer(bench: Bench, shared: bool) -> None:
    place = full(bench)
    place.shared = shared
    store = bench.store(16, bench.spec(place, timeout=SHORT))
    tier = store.tiers[0]
    put(store, range(10, 13))
    assert tier.writing.wait(LONG / 4)
    assert (tier.counters.drops, tier.counters.writes) == (3, 0)
    loss = store.losses.of(name(10))
    assert loss is not None
    assert (loss.what, loss.detail) == ("dropped", "no room")
