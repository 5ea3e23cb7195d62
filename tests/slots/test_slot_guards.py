"""Pins on slots: what they keep, when they give way, how they end."""

from __future__ import annotations

import pytest
from slot_requests import Clock, fill, seen

from kvkeep.core.errors import IllegalStep, InvalidValue, OutOfSlots
from kvkeep.core.slots import SlotCache


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
