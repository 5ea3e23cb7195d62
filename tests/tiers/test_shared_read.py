"""Blocks on their way up: read once, by whoever gives them, for whoever still wants them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from tier_bench import PAGE, RAW, SHORT, Bench, above, content, get, name, put, settle, there, until

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from faults import FaultyBackend
    from kvkeep.store.tiers import TieredStore


def below(bench: Bench, place: FaultyBackend, count: int = 8, front: int = 32) -> TieredStore:
    """A store over ``place``, which has so many blocks that memory has not."""
    store = bench.store(front, place)
    put(store, range(count), wait=20)
    store.memory.remove([name(number) for number in range(count)])
    place.calls.clear()
    place.asked.clear()
    return store


class Readers:
    """Threads that do the same; what they return, in no order."""

    def __init__(self, count: int, work: Callable[[], object]) -> None:
        self.results: list[object] = []
        self._threads = [
            threading.Thread(target=lambda: self.results.append(work())) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> list[object]:
        for thread in self._threads:
            thread.join(20)
        return self.results


def test_what_left_memory_since_it_was_found_there_comes_from_the_fastest(bench: Bench) -> None:
    store = bench.store(32, bench.memory(64), bench.disk())
    put(store, [0], wait=20)
    assert store.locate([name(0)]) == [0]
    store.memory.remove([name(0)])
    assert get(store, [0], levels=[0]) == 1
    assert [tier.counters.hits for tier in store.tiers] == [1, 0]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_many_who_want_one_block_read_it_once(place: str, bench: Bench) -> None:
    behind = bench.memory(64) if place == "memory" else bench.disk()
    store = below(bench, behind)
    behind.hang("get")
    readers = Readers(12, lambda: get(store, [0]))
    behind.wait_inside("get")
    flight = next(iter(store._reader._reads.values()))
    until(lambda: flight._joined == 12)
    behind.heal()
    assert readers.join() == [1] * 12
    assert behind.calls["get"] == 1
    assert store.tiers[0].counters.hits == 1


def test_many_who_want_overlapping_prompts_read_each_block_once(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind, 24, front=64)
    behind.slow(0.01, "get")
    readers = Readers(8, lambda: get(store, range(24)))
    assert readers.join() == [24] * 8
    assert all(behind.asked["get", name(number)] == 1 for number in range(24))


def test_who_leaves_early_takes_nothing_from_those_who_stay(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    behind.hang("get")
    stays = Readers(1, lambda: get(store, [0]))
    behind.wait_inside("get")
    assert get(store, [0], deadline=0.02) == 0
    behind.heal()
    assert stays.join() == [1]
    assert behind.calls["get"] == 1


def test_what_nobody_waits_for_any_more_is_not_read(bench: Bench) -> None:
    """Of what has not begun; what has begun arrives in memory."""
    behind = bench.disk()
    store = bench.store(32, bench.spec(behind, readers=1))
    put(store, range(8), wait=20)
    store.memory.remove([name(number) for number in range(8)])
    behind.hang("get")
    for deadline in (0.05, 0.5, 5.0):
        assert get(store, range(8), deadline=deadline) == 0
        if behind.inside["get"]:  # on a busy machine the first may not have begun either
            break
    behind.heal()
    settle(store)
    assert behind.calls["get"] == 1
    assert above(store) == [0]
    assert get(store, range(8)) == 8


def test_a_deadline_returns_what_arrived(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    assert get(store, range(3)) == 3
    behind.hang("get")
    started = time.monotonic()
    assert get(store, range(8), deadline=0.1) == 3
    assert 0.1 <= time.monotonic() - started < 2.5
    assert get(store, range(8), deadline=0.0) == 3
    behind.heal()
    assert get(store, range(8)) == 8


def test_a_deadline_holds_where_a_place_has_to_be_asked(bench: Bench) -> None:
    behind = bench.disk(None)
    store = below(bench, behind)
    behind.hang("sizes")
    started = time.monotonic()
    assert get(store, range(8), deadline=0.05) == 0
    assert time.monotonic() - started < 2.5
    behind.heal()
    assert get(store, range(8)) == 8


def test_a_flight_whose_place_fails_goes_on_to_the_next(bench: Bench) -> None:
    places = [bench.memory(64), bench.disk(at="a"), bench.disk(at="b")]
    store = bench.store(32, *places)
    put(store, range(8), wait=20)
    store.memory.remove([name(number) for number in range(8)])
    places[0].fail("get", times=2)
    places[1].fail("room", times=1)
    assert get(store, range(8)) == 8
    errors = [tier.counters.errors for tier in store.tiers]
    assert errors in ([2, 1, 0], [2, 0, 0]), "the second is asked for what the first could not give"
    assert sum(tier.counters.hits for tier in store.tiers) == 8
    assert store.tiers[1].counters.hits + store.tiers[2].counters.hits == 2


def test_what_no_place_gives_ends_the_prefix(bench: Bench) -> None:
    places = [bench.memory(64), bench.disk()]
    store = bench.store(32, *places)
    put(store, range(8), wait=20)
    store.memory.remove([name(number) for number in range(8)])
    for place in places:
        place.inner.delete([name(5)])
    assert get(store, range(8)) == 5
    assert [tier.counters.misses for tier in store.tiers] == [1, 1]
    settle(store)
    assert not store.known([name(5)]), "both were asked, and know now"
    assert put(store, range(8), wait=20).kept == [5]
    assert get(store, range(8)) == 8


def test_a_late_answer_is_thrown_away(bench: Bench) -> None:
    slow, good = bench.memory(64), bench.memory(64)
    store = bench.store(32, bench.spec(slow, timeout=SHORT), good)
    put(store, [0], wait=20)
    store.memory.remove([name(0)])
    slow.hang("room")
    assert get(store, [0]) == 1
    assert store.memory.backend.used() == 2 * PAGE
    slow.heal()
    settle(store)
    assert store.memory.backend.used() == PAGE, "the draft of the late one was given back"
    assert store.tiers[0].counters.late == 1
    assert get(store, [0]) == 1


def test_a_block_that_finds_no_room_in_memory_is_handed_out_all_the_same(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind, 8, front=4)
    behind.hang("put")
    put(store, range(100, 104))  # three quarters wait to be written
    assert store.pins.pin([name(103)], 100) == 1
    assert get(store, range(8)) == 8
    assert above(store) == [100, 101, 102, 103]
    behind.heal()


# --- prefetch --------------------------------------------------------------------------------


def plan(count: int) -> Callable[[], tuple[Sequence[bytes], Sequence[int]]]:
    return lambda: ([name(number) for number in range(count)], [RAW] * count)


def test_a_prefetch_brings_blocks_into_memory(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    handle = store.prefetch(plan(12))
    assert handle.wait(20) == 8
    assert handle.done
    assert above(store) == list(range(8))
    assert get(store, range(8)) == 8
    assert behind.calls["get"] == 8


def test_a_prefetch_returns_at_once_and_says_what_came(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    assert get(store, range(2)) == 2
    behind.hang("get")
    handle = store.prefetch(plan(8))
    behind.wait_inside("get")
    assert handle.wait(0.0) <= 2
    assert not handle.done
    until(lambda: handle.ready == 2)
    behind.heal()
    assert handle.wait(20) == 8


def test_a_prefetch_that_is_cancelled_starts_no_more(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind, 64, front=256)
    behind.hang("get")
    handle = store.prefetch(plan(64))
    behind.wait_inside("get")
    handle.cancel()
    behind.heal()
    assert handle.wait(20) < 64
    assert handle.done
    settle(store)
    assert behind.calls["get"] <= 17, "no more than were on their way"


def test_a_prefetch_takes_no_more_than_half_of_memory(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind, 40, front=16)
    put(store, range(100, 104), wait=20)
    get(store, range(100, 104))
    handle = store.prefetch(plan(40))
    assert handle.wait(20) == 8
    assert set(above(store)) >= {*range(8), *range(100, 104)}
    assert behind.calls["get"] == 8


def test_a_prefetch_ends_where_memory_has_no_room(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind, 8, front=8)
    put(store, range(100, 108), wait=20)
    behind.hang("put")
    put(store, range(200, 206))  # they wait to be written
    rest = [number for number in above(store) if number < 200]
    assert store.pins.pin([name(number) for number in rest], 100) == len(rest) == 2
    handle = store.prefetch(plan(4))
    assert handle.wait(20) == 0
    assert handle.done
    assert behind.calls["get"] <= 4
    behind.heal()


def test_a_prefetch_that_finds_nothing_or_fails_is_over(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.store(8, bench.disk())
    assert store.prefetch(plan(8)).wait(20) == 0

    def broken() -> tuple[Sequence[bytes], Sequence[int]]:
        raise ValueError("a plan that fails")

    handle = store.prefetch(broken)
    assert handle.wait(20) == 0
    assert handle.done
    settle(store)
    assert "prefetch failed" in caplog.text


def test_a_prefetch_and_a_read_of_the_same_read_it_once(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    behind.slow(0.02, "get")
    handle = store.prefetch(plan(8))
    assert get(store, range(8)) == 8
    assert handle.wait(20) == 8
    assert behind.calls["get"] == 8


def test_prefetches_beyond_what_may_wait_are_over_at_once(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    behind.hang("get")
    handles = [store.prefetch(plan(8)) for _ in range(300)]
    until(lambda: sum(handle.done for handle in handles) == 300 - 256)
    behind.heal()
    assert max(handle.wait(20) for handle in handles) == 8


def test_a_closed_store_starts_nothing(bench: Bench) -> None:
    store = bench.store(8, bench.disk())
    assert store.close()
    for call in (lambda: store.prefetch(plan(1)), lambda: get(store, [0]), lambda: put(store, [0])):
        with pytest.raises(IllegalStep, match="closed"):
            call()


# --- what is deleted while it is on its way --------------------------------------------------


def test_a_block_that_is_removed_on_its_way_up_does_not_stay(bench: Bench) -> None:
    behind = bench.memory(64)
    store = below(bench, behind)
    behind.hang("room")
    reader = Readers(1, lambda: get(store, [0]))
    behind.wait_inside("room")
    store.remove([name(0)])
    behind.heal()
    reader.join()
    settle(store)
    assert above(store) == []
    assert 0 not in there(store.tiers[0])
    assert get(store, [0]) == 0


def test_a_block_that_is_put_while_it_is_read_is_right(bench: Bench) -> None:
    behind = bench.disk()
    store = below(bench, behind)
    behind.hang("get")
    reader = Readers(1, lambda: get(store, [0]))
    behind.wait_inside("get")
    put(store, [0, 1])
    behind.heal()
    assert reader.join() == [1]
    assert get(store, [0, 1]) == 2
    assert content(name(0)) != content(name(1))
