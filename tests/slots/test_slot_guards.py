"""Pins on slots: what they keep, when they give way, how they end."""

from __future__ import annotations

import pytest
from slot_requests import Clock, fill, seen

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.slots import OutOfSlots, SlotCache, SlotCopy


def test_eviction_spares_pinned_slots() -> None:
    cache = SlotCache(3, 8)
    for token in (1, 2, 3):
        fill(cache, [token, 0])
    pin = cache.pin([1, 0])
    assert (pin.slot, pin.held) == (0, True)
    assert cache.acquire([9]).slot == 1
    assert cache.acquire([9]).slot == 2
    assert pin.held


def test_a_soft_pin_gives_way_before_out_of_slots() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1, 0])
    fill(cache, [2, 0])
    pins = [cache.pin([1, 0]), cache.pin([2, 0])]
    assert cache.acquire([9]).slot == 0
    assert [pin.held for pin in pins] == [False, True]
    assert not cache.unpin(pins[0])
    assert seen(cache).pinned == 1


def test_a_hard_pin_does_not_give_way() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1, 0])
    fill(cache, [2, 0])
    pin = cache.pin([1, 0], hard=True)
    lease = cache.acquire([9])
    assert lease.slot == 1
    before = seen(cache)
    with pytest.raises(OutOfSlots, match="1 are running and 1 are hard-pinned"):
        cache.acquire([8])
    assert seen(cache) == before
    assert pin.held
    assert cache.unpin(pin)
    assert cache.acquire([8]).slot == 0


def test_all_but_one_slot_can_be_hard_pinned_so_the_cache_cannot_be_wedged() -> None:
    cache = SlotCache(3, 8)
    for token in (1, 2, 3):
        fill(cache, [token, 0])
    cache.pin([1, 0], hard=True)
    cache.pin([2, 0], hard=True)
    cache.pin([1], hard=True)  # the same slot once more
    before = seen(cache)
    with pytest.raises(IllegalStep, match="2 of 3 slots"):
        cache.pin([3, 0], hard=True)
    assert seen(cache) == before
    assert before.hard_pinned == 2
    cache.pin([3, 0])
    assert cache.acquire([9]).slot == 2


def test_an_only_slot_cannot_be_hard_pinned() -> None:
    cache = SlotCache(1, 8)
    fill(cache, [1, 0])
    with pytest.raises(IllegalStep, match="0 of 1"):
        cache.pin([1, 0], hard=True)
    assert cache.pin([1, 0]).held


def test_a_pin_lasts_as_long_as_it_was_asked_to() -> None:
    clock = Clock()
    cache = SlotCache(2, 8, clock=clock)
    fill(cache, [1, 0])
    fill(cache, [2, 0])
    pin = cache.pin([1, 0], ttl=10, hard=True)
    clock.now += 9.5
    assert pin.held
    clock.now += 0.5
    assert not pin.held
    assert seen(cache).pinned == 0
    fill(cache, [2, 0])
    assert cache.acquire([9]).slot == 0
    assert cache.unpin(pin) is False


def test_the_budget_of_hard_pins_counts_those_that_hold() -> None:
    clock = Clock()
    cache = SlotCache(2, 8, clock=clock)
    fill(cache, [1, 0])
    fill(cache, [2, 0])
    cache.pin([1, 0], ttl=5, hard=True)
    clock.now += 6
    assert cache.pin([2, 0], hard=True).held


def test_a_request_that_begins_with_a_pinned_prefix_may_use_its_slot() -> None:
    cache = SlotCache(1, 8)
    fill(cache, [1, 2, 3, 4])
    pin = cache.pin([1, 2])
    for prompt in ([1, 2, 9], [1, 2, 8, 8]):
        with cache.acquire(prompt) as lease:
            assert lease.num_cached == 2
            lease.publish(len(prompt))
    assert pin.held
    cache.check()


def test_a_pinned_prompt_is_copied_when_it_is_asked_for_exactly() -> None:
    cache = SlotCache(2, 8)
    slot = fill(cache, [1, 2, 3])
    cache.pin([1, 2, 3])
    lease = cache.acquire([1, 2, 3])  # writes at 2, which the pin guards
    assert lease.copy == SlotCopy(src=slot, dst=1, tokens=2)
    assert cache.match([1, 2, 3]) == 3


def test_the_longest_of_several_pins_counts() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1, 2, 3, 4])
    fill(cache, [5, 5])
    pins = [cache.pin([1]), cache.pin([1, 2, 3]), cache.pin([1, 2])]
    assert cache.acquire([1, 2, 7]).slot == 1  # the older one would lose what the second guards
    assert all(pin.held for pin in pins)
    assert cache.acquire([1, 2, 8]).slot == 0
    assert [pin.held for pin in pins] == [True, False, True]
    cache.check()


def test_pins_on_a_running_slot_hold_after_it() -> None:
    cache = SlotCache(2, 8)
    lease = cache.acquire([1, 2, 3, 4])
    lease.publish(4)
    soft, hard = cache.pin([1, 2, 3]), cache.pin([1, 2], hard=True)
    with pytest.raises(IllegalStep, match="2 are hard-pinned"):
        lease.truncate(1)
    assert soft.held
    lease.release(keep=False)
    assert (soft.held, hard.held) == (False, True)
    assert cache.match([1, 2, 3, 4]) == 2
    cache.check()


def test_cutting_a_running_slot_ends_soft_pins_on_what_is_cut() -> None:
    cache = SlotCache(2, 8)
    lease = cache.acquire([1, 2, 3, 4])
    lease.publish(4)
    long, short = cache.pin([1, 2, 3]), cache.pin([1, 2])
    lease.truncate(2)
    assert (long.held, short.held) == (False, True)


def test_a_pin_is_ended_once() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1])
    pin = cache.pin([1])
    assert cache.unpin(pin)
    with pytest.raises(IllegalStep, match="unpinned before"):
        cache.unpin(pin)


def test_a_pin_of_another_cache_is_refused() -> None:
    ours, theirs = SlotCache(2, 8), SlotCache(2, 8)
    fill(ours, [1])
    fill(theirs, [1])
    pin = theirs.pin([1])
    with pytest.raises(InvalidValue, match="not a pin of this cache"):
        ours.unpin(pin)
    assert pin.held


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
def test_a_pin_needs_a_time_that_makes_sense(ttl: float) -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1])
    with pytest.raises(InvalidValue, match="ttl"):
        cache.pin([1], ttl=ttl)
