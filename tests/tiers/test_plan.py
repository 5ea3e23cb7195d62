"""What moves where: the policies by themselves, and what becomes of blocks under them."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from tier_bench import PAGE, Bench, above, get, name, put, settle, there, until

from kvkeep.core.errors import InvalidValue
from kvkeep.store.tiers import TIERINGS, Exclusive, Inclusive, tiering
from kvkeep.store.tiers.two_queues import TwoQ

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.store.tiers import TieredStore


def emptied(store: TieredStore) -> None:
    settle(store)
    store.memory.remove([item.block for item in store.memory.backend.list()])


def everywhere(store: TieredStore) -> list[list[int]]:
    """Numbers of the blocks in memory and in each tier."""
    settle(store)
    return [above(store), *(there(tier) for tier in store.tiers)]


def each_is_found(store: TieredStore, numbers: Iterable[int]) -> bool:
    """Whether every block can be read, with time for those that have to leave."""
    for number in numbers:
        if get(store, [number]) != 1:
            return False
        settle(store)
    return True


# --- by themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
@pytest.mark.parametrize("after", [0, -1, 1.5, "2", True, None])
def test_a_wrong_admit_after_is_refused(policy: Any, after: Any) -> None:
    with pytest.raises(InvalidValue, match=r"admit_after is .*at least 1"):
        policy(after)


def test_tierings_have_names() -> None:
    assert [repr(tiering(one)) for one in TIERINGS] == [
        "Inclusive(admit_after=1)",
        "Inclusive(admit_after=2)",
        "Exclusive(admit_after=1)",
        "Exclusive(admit_after=2)",
    ]
    assert repr(tiering("inclusive:7")) == "Inclusive(admit_after=7)"


@pytest.mark.parametrize("wrong", ["", "best", "exclusive:-1", "inclusive:", "inclusive:0", "x:1"])
def test_other_names_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidValue, match=r"no tiering .*there are inclusive, .*exclusive:2"):
        tiering(wrong)


# --- inclusive -------------------------------------------------------------------------------


def test_inclusive_writes_everything_everywhere_and_takes_nothing_away(bench: Bench) -> None:
    store = bench.store(8, bench.memory(64), bench.disk())
    put(store, range(8), wait=20)
    assert everywhere(store) == [list(range(8))] * 3
    emptied(store)
    assert get(store, range(4)) == 4
    assert everywhere(store) == [list(range(4)), list(range(8)), list(range(8))]


def test_the_fastest_tier_that_has_it_is_read(bench: Bench) -> None:
    fast, slow = bench.memory(4), bench.disk()
    store = bench.store(16, fast, slow)
    put(store, range(8), wait=20)
    emptied(store)
    slow.calls.clear()
    kept = len(there(store.tiers[0]))
    assert get(store, range(8)) == 8
    assert (fast.calls["get"], slow.calls["get"]) == (kept, 8 - kept) == (4, 4)


@pytest.mark.parametrize("how", ["get", "touch", "both"])
def test_admit_after_writes_at_that_touch(how: str, bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place, policy=Inclusive(admit_after=3))
    put(store, range(4))
    for step in range(2):
        assert everywhere(store)[1] == []
        if how == "touch" or (how == "both" and not step):
            store.used([name(number) for number in range(9)])
        else:
            assert get(store, range(4)) == 4
        if how == "touch":
            put(store, range(4))
    assert everywhere(store)[1] == [0, 1, 2, 3]
    assert place.calls["put"] == 4
    get(store, range(4))
    put(store, range(8))
    settle(store)
    assert place.calls["put"] == 4, "what was not stored when it was touched, was not touched"


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_a_request_that_puts_its_prompt_and_its_answer_is_one_touch(
    policy: type[Inclusive | Exclusive], bench: Bench
) -> None:
    place = bench.disk()
    store = bench.store(12, place, policy=policy(admit_after=2))
    for first in range(0, 50, 5):
        for stop in (3, 4, 5):
            put(store, range(first, first + stop))
            settle(store)
    assert everywhere(store)[1] == [], "no prompt was repeated"
    first = min(above(store))
    assert get(store, [first]) == 1
    put(store, range(60, 72))
    assert everywhere(store)[1] == [first]


def test_a_block_that_was_evicted_and_is_put_again_is_touched_again(bench: Bench) -> None:
    store = bench.store(4, bench.disk(), policy=Inclusive(admit_after=2))
    for number in (0, 1, 2, 3, 4, 0):
        put(store, [number])
    assert everywhere(store)[1] == [0]


def test_a_prompt_that_is_put_in_parts_is_not_requested_again(bench: Bench) -> None:
    """Under `2q`, what was requested goes last: a put of a prompt's beginning is no request."""
    tier = bench.spec(bench.disk(8), policy=TwoQ)
    store = bench.store(64, tier)
    put(store, range(10, 12), wait=20)
    assert get(store, range(10, 12)) == 2
    for stop in (1, 2, 3):
        put(store, range(stop), wait=20)
    put(store, range(20, 26), wait=20)
    assert set(everywhere(store)[1]) & {0, 1, 2, 10, 11} == {10, 11}


def test_admit_after_spares_writes_of_what_is_asked_for_once(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(8, place, policy=Inclusive(admit_after=2))
    for first in range(0, 80, 4):
        put(store, range(first, first + 4))
        get(store, [first])
        settle(store)
    assert place.calls["put"] == 20
    assert there(store.tiers[0]) == list(range(0, 80, 4))


# --- exclusive -------------------------------------------------------------------------------


def test_exclusive_keeps_a_block_in_one_place(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place, policy=Exclusive())
    for number in range(30):
        put(store, [number])
        settle(store)
    memory, disk = everywhere(store)
    assert sorted(memory + disk) == list(range(30))
    assert memory == list(range(30 - len(memory), 30)), "the oldest went down"
    assert get(store, [3]) == 1
    memory, disk = everywhere(store)
    assert 3 in memory
    assert 3 not in disk
    assert sorted(memory + disk) == list(range(30))


def test_exclusive_moves_down_a_chain_of_three(bench: Bench) -> None:
    store = bench.store(16, bench.memory(8), bench.disk(12), bench.disk(at="e"), policy=Exclusive())
    for number in range(60):
        put(store, [number])
        settle(store)
    places = everywhere(store)
    assert sorted(chain(*places)) == list(range(60)), "nothing is lost, nothing twice"
    assert [len(blocks) for blocks in places[1:3]] == [8, 12]
    newest_first = [number for blocks in places for number in reversed(blocks)]
    assert newest_first == list(range(59, -1, -1)), "each tier has what is older"
    for number in (0, 20, 30, 40, 59):  # from each place
        assert get(store, [number]) == 1
        settle(store)
    places = everywhere(store)
    assert sorted(chain(*places)) == list(range(60))
    assert {0, 20, 30, 40, 59} <= {*places[0]}
    assert each_is_found(store, range(60))


def test_exclusive_lets_the_end_of_the_chain_go(bench: Bench) -> None:
    store = bench.store(8, bench.memory(4), bench.disk(4), policy=Exclusive())
    for number in range(40):
        put(store, [number])
        settle(store)
    places = everywhere(store)
    assert [len(blocks) for blocks in places[1:]] == [4, 4]
    assert sorted(chain(*places)) == list(range(40 - len([*chain(*places)]), 40))
    assert store.stats()[2].counters["demotions"] == 0
    assert store.stats()[2].counters["evictions"] > 0


def test_exclusive_through_codecs(bench: Bench) -> None:
    key = bytes(range(32))
    tiers = [
        bench.spec(bench.disk(4), "raw"),
        bench.spec(bench.memory(16), "lossless"),
        bench.spec(bench.disk(at="e"), "lossless", key=key),
    ]
    store = bench.store(8, *tiers, policy=Exclusive())
    for number in range(40):
        put(store, [number])
        settle(store)
    assert sorted([*chain(*everywhere(store))]) == list(range(40))
    assert each_is_found(store, range(40))


def test_what_was_touched_too_seldom_goes(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(32, place, policy=Exclusive(admit_after=2))
    for number in range(0, 80, 2):
        put(store, [number, number + 1])
        get(store, [number])
        settle(store)
    memory, disk = everywhere(store)
    assert all(number % 2 == 0 for number in disk)
    assert {*range(0, 80, 2)} == {number for number in [*disk, *memory] if number % 2 == 0}


def test_a_damaged_block_is_not_moved_down(bench: Bench) -> None:
    upper, lower = bench.memory(4), bench.disk()
    store = bench.store(8, upper, lower, policy=Exclusive())
    for number in range(11):
        put(store, [number])
        settle(store)
    assert there(store.tiers[0]) == [0, 1, 2, 3]
    upper.flip(times=1)
    put(store, [11])
    settle(store)
    assert 0 not in [*there(store.tiers[0]), *there(store.tiers[1])]
    assert store.tiers[0].counters.damaged == 1
    assert store.tiers[0].counters.demotions_dropped == 1


def test_a_block_that_is_wanted_while_it_moves_up_is_written_again(bench: Bench) -> None:
    """It is being deleted below, has to leave memory at the same time, and is not lost."""
    place = bench.memory(64)
    store = bench.store(32, place, policy=Exclusive())
    for number in range(40):
        put(store, [number])
        settle(store)
    place.hang("delete")
    assert get(store, [0]) == 1
    place.wait_inside("delete")
    assert all(get(store, [number]) for number in above(store) if number)
    put(store, [90])
    until(lambda: 0 not in store.memory.catalogue)
    place.heal()
    settle(store)
    assert 0 in there(store.tiers[0])
    assert 0 not in above(store)
    assert get(store, [0]) == 1


# --- the order in which blocks go ------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("writers", [1, 2, 8])
def test_the_end_of_a_prompt_goes_before_its_beginning(
    where: int, writers: int, bench: Bench
) -> None:
    """Where it was only put, too, and in tiers that are written one block after the other."""
    front, below = (8, 64) if where == 0 else (64, 8)
    store = bench.store(front, bench.spec(bench.memory(below), writers=writers))
    put(store, range(5), wait=20)
    put(store, range(10, 13), wait=20)
    put(store, range(20, 22), wait=20)
    assert everywhere(store)[where] == [0, 1, 2, 10, 11, 12, 20, 21]
    put(store, range(30, 33), wait=20)
    assert everywhere(store)[where] == [10, 11, 12, 20, 21, 30, 31, 32]
    assert get(store, range(10, 12)) == 2
    put(store, range(40, 44), wait=20)
    assert everywhere(store)[where] == [10, 11, 30, 31, 40, 41, 42, 43]


def test_the_order_of_a_prompt_outlives_the_process(bench: Bench) -> None:
    store = bench.store(64, bench.disk(8))
    put(store, range(5), wait=20)
    put(store, range(10, 13), wait=20)
    assert store.close()
    store = bench.store(64, bench.disk(8))
    put(store, range(20, 22), wait=20)
    assert everywhere(store)[1] == [0, 1, 2, 10, 11, 12, 20, 21]


def test_a_prompt_that_is_admitted_as_it_is_read_keeps_its_order(bench: Bench) -> None:
    store = bench.store(64, bench.memory(8), policy=Inclusive(admit_after=2))
    put(store, range(6))
    assert get(store, range(6)) == 6
    settle(store)
    put(store, range(10, 14))
    assert get(store, range(10, 14)) == 4
    assert everywhere(store)[1] == [0, 1, 2, 3, 10, 11, 12, 13]


def test_what_is_read_above_stays_below(bench: Bench) -> None:
    store = bench.store(64, bench.disk(8))
    put(store, range(8), wait=20)
    for _ in range(3):
        get(store, range(2))
    put(store, range(20, 26), wait=20)
    assert everywhere(store)[1] == [0, 1, *range(20, 26)]


def test_blocks_of_mixed_sizes_make_room_for_each_other(bench: Bench) -> None:
    store = bench.store(32, bench.memory(16))
    for number in range(60):
        size = (1 + number % 5) * PAGE - 128
        assert put(store, [number], size=size, wait=20).kept == [0]
        assert get(store, [number], size=size) == 1
    memory = store.stats()[1]
    assert memory.used_bytes is not None
    assert 10 * PAGE < memory.used_bytes <= 16 * PAGE
    assert name(59) in store.tiers[0].catalogue
