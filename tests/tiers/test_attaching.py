"""Tiers that are attached to a store in use, and detached: order, names, what moves, what stays."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tier_bench import PAGE, RAW, Bench, get, name, put, settle, there, until

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.eviction import LRU
from kvkeep.store.tiers import AdaptiveTiering, Exclusive, Inclusive, Tier


def names(store) -> list[str]:
    return [tier.name for tier in store.tiers]


def alone(store, numbers) -> None:
    """Memory keeps none of these blocks."""
    store.memory.remove([name(number) for number in numbers])


def stored(bench: Bench, numbers, *places, **more):
    """A store that has written blocks to all its tiers, and has none in memory."""
    store = bench.store(64, *places, **more)
    put(store, numbers, wait=10)
    settle(store)
    alone(store, numbers)
    return store


# --- attaching -------------------------------------------------------------------------------


def test_a_tier_comes_where_it_is_told_and_is_written_at_once(bench):
    store = bench.store(64, bench.disk(at="a"))
    (first,) = names(store)
    lowest = store.attach(bench.spec(bench.disk(at="b")))
    second = store.attach(bench.spec(bench.disk(at="c")), first)
    top = store.attach(bench.spec(bench.disk(at="d")), store.memory.name)
    assert names(store) == [top, first, second, lowest]
    assert list(store.names) == ["memory", *names(store)]
    put(store, range(8), wait=10)
    assert [there(tier) for tier in store.tiers] == [list(range(8))] * 4
    alone(store, range(8))
    assert store.locate([name(0)]) == [1]
    assert get(store, range(8)) == 8


def test_what_an_attached_tier_holds_is_found(bench):
    store = stored(bench, range(8), bench.disk(at="a"), bench.disk(at="b"))
    first, _ = names(store)
    place = bench.disk(at="a")  # the same directory
    assert store.detach(first).left == 0
    store.attach(bench.spec(place), "memory")
    alone(store, range(8))
    until(store.tiers[0].catalogue.blocks)
    assert store.locate([name(0)]) == [1]
    assert get(store, range(8)) == 8


def test_names_are_used_once(bench):
    store = bench.store(64, bench.disk(at="a"))
    spec = bench.spec(bench.disk(at="b"))
    spec.name = "file"
    assert store.attach(spec) == "file"
    again = bench.spec(bench.disk(at="c"))
    again.name = "file"
    assert store.attach(again) == "file2"
    store.detach("file")
    last = bench.spec(bench.disk(at="b"))
    last.name = "file"
    assert store.attach(last) == "file3"


def test_a_slow_listing_delays_nobody(bench):
    store = bench.store(64, bench.disk(at="a"))
    place = bench.disk(at="b")
    place.hang("list")
    began = time.monotonic()
    store.attach(bench.spec(place, timeout=30.0))
    assert time.monotonic() - began < 10
    put(store, range(4), wait=10)
    assert there(store.tiers[1]) == [0, 1, 2, 3]
    place.heal()
    settle(store)
    alone(store, range(4))
    assert get(store, range(4)) == 4


def test_wrong_names_and_places_are_told(bench):
    place = bench.disk(at="a")
    store = bench.store(64, place)
    (first,) = names(store)
    with pytest.raises(InvalidValue, match=rf"no tier is called 'x'; there are memory, {first}"):
        store.attach(bench.spec(bench.disk(at="b")), "x")
    with pytest.raises(IllegalStep, match=rf"is attached already, as {first}"):
        store.attach(bench.spec(place))
    with pytest.raises(InvalidValue, match=rf"no tier is called 'memory'; there are {first}"):
        store.detach("memory")
    with pytest.raises(IllegalStep, match=f"{first} is the last tier below memory"):
        store.detach(first)
    assert names(store) == [first]


def test_a_store_of_memory_alone_can_get_a_tier(bench):
    store = bench.store(64)
    put(store, range(4))
    attached = store.attach(bench.spec(bench.disk(at="a")))
    put(store, range(4, 8), wait=10)
    assert there(store.tiers[0]) == [4, 5, 6, 7]
    with pytest.raises(IllegalStep, match="last tier"):
        store.detach(attached)


def test_quotas_hold_in_an_attached_tier(bench):
    store = bench.store(64, bench.disk(at="a"))
    store.set_quota(name(0)[:16], 4 * PAGE)
    store.attach(bench.spec(bench.disk(at="b")))
    put(store, range(16), wait=10)
    assert len(there(store.tiers[1])) == len(there(store.tiers[0])) == 4


@pytest.mark.parametrize("policy", [Inclusive, Exclusive, AdaptiveTiering])
def test_every_policy_takes_tiers_that_come_and_go(bench, policy):
    store = bench.store(32, bench.disk(at="a"), policy=policy())
    for turn in range(6):
        put(store, range(turn * 8, turn * 8 + 8), wait=10)
        attached = store.attach(bench.spec(bench.disk(at=f"b{turn}")))
        put(store, range(turn * 8, turn * 8 + 12), wait=10)
        assert get(store, range(turn * 8, turn * 8 + 12)) == 12
        if turn % 2:
            assert store.detach(attached).left == 0
    losses = store.losses_of([name(number) for number in range(48)])
    assert "detached" not in [loss.detail for loss in losses if loss]
    if policy is Inclusive:  # others drop what memory has to evict at once
        assert get(store, range(32)) == 32


# --- detaching -------------------------------------------------------------------------------


def test_what_one_tier_alone_has_moves_to_the_others(bench):
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    store.attach(bench.spec(bench.disk(at="b")))
    put(store, range(8, 12), wait=10)  # both have these
    result = store.detach(first)
    assert (result.name, result.moved, result.left) == (first, 8, 0)
    assert result.moved_bytes == 8 * PAGE
    assert there(store.tiers[0]) == list(range(12))
    alone(store, range(12))
    assert get(store, range(12)) == 12


def test_where_there_is_no_room_the_blocks_used_last_move_and_none_is_evicted(bench):
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    get(store, [1, 3, 5])
    alone(store, range(8))
    store.attach(bench.spec(bench.disk(4, at="b")))
    store.tiers[1].catalogue.check()
    put(store, [100], wait=10)
    result = store.detach(first)
    assert (result.moved, result.left) == (3, 5)
    assert there(store.tiers[0]) == [1, 3, 5, 100]
    assert store.tiers[0].counters.evictions == 0
    alone(store, [*range(8), 100])
    losses = store.losses_of([name(number) for number in range(8)])
    assert [loss is None for loss in losses] == [number in (1, 3, 5) for number in range(8)]
    assert {(loss.tier, loss.what, loss.detail) for loss in losses if loss} == {
        (first, "removed", "detached")
    }


@pytest.mark.parametrize("read", [True, False])
def test_the_last_room_waits_for_the_block_used_before(bench, monkeypatch, read):
    """Two blocks are read at a time: the first to arrive may not be the one used last."""
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    get(store, [1, 3, 5])
    store.attach(bench.spec(bench.disk(3, at="b")))
    fetch = Tier.fetch

    def slow(tier, block):
        if block == name(5):
            time.sleep(0.1)
            if not read:
                return None
        return fetch(tier, block)

    monkeypatch.setattr(Tier, "fetch", slow)
    result = store.detach(first)
    assert (result.moved, result.left) == (3, 5)
    assert there(store.tiers[0]) == ([1, 3, 5] if read else [0, 1, 3])


def test_the_order_of_uses_moves_as_well(bench):
    store = stored(bench, range(4), bench.disk(at="a"))
    (first,) = names(store)
    for number in (2, 0, 3, 1):
        get(store, [number])
    alone(store, range(4))
    store.attach(bench.spec(bench.disk(at="b")))
    assert store.detach(first).moved == 4
    order = [int.from_bytes(block[16:], "big") for block, _ in store.tiers[0].catalogue.by_use()]
    assert order == [1, 3, 0, 2]


def test_without_moving_all_stays_in_the_place(bench):
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    place = store.tiers[0]
    store.attach(bench.spec(bench.disk(at="b")))
    result = store.detach(first, move=False)
    assert (result.moved, result.left) == (0, 8)
    assert get(store, range(8)) == 0
    assert there(place) == list(range(8))


def test_pins_move(bench):
    store = stored(bench, range(4), bench.disk(at="a"))
    (first,) = names(store)
    blocks = [name(number) for number in range(4)]
    assert store.pins.pin(blocks[:2], 1000.0) == 2
    store.attach(bench.spec(bench.disk(at="b")))
    store.detach(first)
    assert store.pins.pinned(blocks) == set(blocks[:2])
    (end, _) = store.tiers[0].catalogue.pin_ends(blocks).values()
    assert 900 < end - time.time() <= 1000


def test_writes_that_are_queued_are_finished(bench):
    place = bench.disk(at="a")
    store = bench.store(64, place, bench.disk(at="b"))
    first, _ = names(store)
    place.slow(0.02, "put")
    leaving = store.tiers[0]
    put(store, range(16))
    result = store.detach(first, move=False)
    assert there(leaving) == list(range(16))
    assert result.left == 0


def test_lossy_blocks_do_not_move_to_exact_tiers(bench):
    store = bench.store(64, bench.spec(bench.disk(at="a"), "int8"))
    (first,) = names(store)
    put(store, range(4), wait=10, size=RAW - RAW % 64)
    settle(store)
    store.attach(bench.spec(bench.disk(at="b")))
    result = store.detach(first)
    assert (result.moved, result.left) == (0, 4)
    assert there(store.tiers[0]) == []


def test_reads_that_run_end_with_the_right_bytes(bench):
    place = bench.disk(at="a")
    store = stored(bench, range(8), place)
    (first,) = names(store)
    store.attach(bench.spec(bench.disk(at="b")))
    place.hang("get")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(get, store, range(8))
        place.wait_inside("get")
        place.go_on_slowly(0.1, "get")
        assert store.detach(first, move=False).left == 8
        assert reading.result() > 0  # those that were under way; all were right


def test_a_tier_that_hangs_is_detached_in_time(bench):
    place = bench.disk(at="a")
    store = stored(bench, range(8), place)
    (first,) = names(store)
    store.attach(bench.spec(bench.disk(at="b")))
    place.timeout = 0.2
    place.hang()
    began = time.monotonic()
    result = store.detach(first, timeout=1.0)
    assert time.monotonic() - began < 8
    assert (result.moved, result.left) == (0, 8)
    put(store, range(8), wait=10)
    alone(store, range(8))
    assert get(store, range(8)) == 8
    place.heal()


def test_a_target_that_fails_leaves_what_it_did_not_take(bench):
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    target = bench.disk(at="b")
    store.attach(bench.spec(target, pause=30.0))
    target.fail("put")
    result = store.detach(first)
    assert (result.moved, result.left) == (0, 8)


def test_while_one_is_detached_its_blocks_are_read_and_no_other_change_begins(bench):
    place = bench.disk(at="a")
    store = stored(bench, range(8), place)
    (first,) = names(store)
    target = bench.disk(at="b")
    second = store.attach(bench.spec(target, timeout=20.0))
    settle(store)
    target.hang("put")
    with ThreadPoolExecutor(1) as pool:
        detaching = pool.submit(store.detach, first)
        target.wait_inside("put")
        assert get(store, range(8)) == 8
        for change in (
            lambda: store.detach(second),
            lambda: store.attach(bench.spec(bench.disk(at="c"))),
        ):
            with pytest.raises(IllegalStep, match="is being attached or detached"):
                change()
        target.heal()
        assert detaching.result().left == 0
    alone(store, range(8))
    assert get(store, range(8)) == 8


def test_a_removal_while_blocks_move_removes_them(bench):
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    target = bench.disk(at="b")
    store.attach(bench.spec(target, timeout=20.0))
    settle(store)
    target.hang("put")
    blocks = [name(number) for number in range(8)]
    with ThreadPoolExecutor(2) as pool:
        detaching = pool.submit(store.detach, first)
        target.wait_inside("put")
        removing = pool.submit(store.remove, blocks)
        time.sleep(0.1)
        target.heal()
        assert removing.result().complete
        detaching.result()
    settle(store)
    assert there(store.tiers[0]) == []
    assert get(store, range(8)) == 0


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_what_is_removed_while_it_is_read_to_be_moved_does_not_come_back(bench, how):
    place = bench.disk(at="a")
    store = stored(bench, range(4), place)
    (first,) = names(store)
    store.attach(bench.spec(bench.disk(at="b")))
    settle(store)
    blocks = [name(number) for number in range(4)]
    place.hang("room")  # the record is in hand, and not handed on yet
    with ThreadPoolExecutor(1) as pool:
        detaching = pool.submit(store.detach, first)
        place.wait_inside("room")
        removed = store.remove(blocks) if how == "remove" else store.clear(blocks[0][:16])
        assert removed.complete
        place.heal()
        assert detaching.result().left == 0
    assert there(store.tiers[0]) == []
    assert get(store, range(4)) == 0


def test_a_store_that_is_closed_meanwhile_takes_no_tier(bench):
    store = bench.store(64, bench.disk(at="a"))
    made, go_on = threading.Event(), threading.Event()

    def slow_policy() -> LRU:
        made.set()
        go_on.wait(20)
        return LRU()

    place = bench.disk(at="b")
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(store.attach, bench.spec(place, policy=slow_policy))
        assert made.wait(10)
        assert store.close(10)
        go_on.set()
        with pytest.raises(IllegalStep, match="the store is closed"):
            attaching.result()
    assert len(store.tiers) == 1


@pytest.mark.parametrize("hanging", ["source", "target"])
def test_a_detachment_ends_though_a_place_hangs_and_soon_if_the_store_is_closed(bench, hanging):
    places = {"source": bench.disk(at="a"), "target": bench.disk(at="b")}
    store = stored(bench, range(8), places["source"])
    (first,) = names(store)
    store.attach(bench.spec(places["target"]))
    settle(store)
    for place in places.values():
        place.timeout = 0.3
    places[hanging].hang()
    ended: list[float] = []

    def detach() -> None:
        store.detach(first, timeout=300.0)
        ended.append(time.monotonic())

    detaching = threading.Thread(target=detach, daemon=True)
    detaching.start()
    until(store._changes._changing.locked)
    time.sleep(0.1)
    store.close(1)
    detaching.join(30)
    places[hanging].heal()
    assert ended


def test_closing_ends_a_detachment(bench):
    store = stored(bench, range(8), bench.disk(at="a"))
    (first,) = names(store)
    target = bench.disk(at="b")
    store.attach(bench.spec(target, timeout=1.0))
    settle(store)
    target.slow(0.3, "put")
    detaching = threading.Thread(target=store.detach, args=(first,))
    detaching.start()
    target.wait_inside("put")
    store.close(10)
    detaching.join(20)
    assert not detaching.is_alive()
    with pytest.raises(IllegalStep, match="closed"):
        store.attach(bench.spec(bench.disk(at="c")))
    with pytest.raises(IllegalStep, match="closed"):
        store.detach(first)


def test_a_block_that_a_detached_tier_has_is_written_anew_where_it_is_missing(bench):
    """It would be gone soon: that it is there yet is no reason not to store it."""
    store = stored(bench, range(4), bench.disk(at="a"))
    (first,) = names(store)
    target = bench.disk(at="b")
    store.attach(bench.spec(target, timeout=20.0))
    settle(store)
    target.hang("put")
    with ThreadPoolExecutor(1) as pool:
        detaching = pool.submit(store.detach, first)
        target.wait_inside("put")
        written = put(store, range(4))
        assert len(written.kept) + len(written.already) == 4
        target.heal()
        detaching.result()
    settle(store)
    assert there(store.tiers[0]) == [0, 1, 2, 3]
