"""`SlotCache`, step by step. `test_slots_model.py` drives it at random against a naive model."""

from __future__ import annotations

import dataclasses
import pickle
import time

import numpy as np
import pytest
from slot_requests import all_over, fill, seen

from kvkeep.core.errors import InvalidValue, KVKeepError, OutOfSlots
from kvkeep.core.slots import SlotCache, SlotCopy

# -- giving slots out --------------------------------------------------------------------------


def test_the_lowest_empty_slot_is_given_out() -> None:
    cache = SlotCache(4, 8)
    leases = [cache.acquire([i]) for i in range(4)]
    assert [lease.slot for lease in leases] == [0, 1, 2, 3]
    for slot in (3, 1):
        leases[slot].release()
    assert cache.acquire([9]).slot == 1
    assert cache.acquire([9]).slot == 3


@pytest.mark.parametrize("num_slots", [1, 7, 8, 9, 29, 30, 31, 63, 64, 65, 1000])
def test_every_slot_is_given_out_once_then_taken_again(num_slots: int) -> None:
    cache = SlotCache(num_slots, 2)
    leases = [cache.acquire([slot, 0]) for slot in range(num_slots)]
    assert [lease.slot for lease in leases] == list(range(num_slots))
    for lease in leases:
        lease.publish(2)
        lease.release()
    assert seen(cache).idle == num_slots
    for slot in reversed(range(num_slots)):
        assert cache.acquire([slot, 0]).slot == slot


# -- taking over -------------------------------------------------------------------------------


def test_a_longer_entry_is_copied_from_and_lives_on() -> None:
    cache = SlotCache(3, 8)
    slot = fill(cache, [1, 2, 3, 4, 5])
    lease = cache.acquire([1, 2, 3, 9])
    assert lease.copy == SlotCopy(src=slot, dst=1, tokens=3, start=0)
    assert (lease.slot, lease.num_cached, lease.published) == (1, 3, 0)
    lease.copied()
    assert lease.copy is None
    assert lease.published == 3
    assert cache.match([1, 2, 3, 4, 5]) == 5


# -- eviction ----------------------------------------------------------------------------------


def test_out_of_slots_when_all_are_running_and_nothing_changes() -> None:
    cache = SlotCache(2, 8)
    leases = [cache.acquire([1, 2]), cache.acquire([3, 4])]
    before = seen(cache)
    for _ in range(3):
        with pytest.raises(OutOfSlots, match="of 2, 2 are running") as caught:
            cache.acquire([1, 2, 3])
        assert seen(cache) == before
    assert isinstance(caught.value, KVKeepError)
    assert isinstance(caught.value, MemoryError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.running, again.total, str(again)) == (2, 2, str(caught.value))
    leases[1].release()
    assert cache.acquire([1, 2, 3]).slot == 1


def test_slots_that_leave_a_prompt_one_after_another_are_not_all_compared() -> None:
    def seconds(prompt: np.ndarray) -> float:
        start = time.perf_counter()
        assert cache.match(prompt) == matched
        return time.perf_counter() - start

    count = 1024
    cache = SlotCache(count, count)
    prompt = np.arange(count)
    for at in range(count):  # slot ``at`` shares so many tokens
        fill(cache, np.where(prompt < at, prompt, prompt + count))
    matched = count - 1
    assert min(seconds(prompt) for _ in range(5)) < 0.005, "ten times as long if all are compared"


# -- the whole ---------------------------------------------------------------------------------


def test_clear_forgets_all_and_ends_every_lease_and_pin() -> None:
    cache = SlotCache(4, 8)
    fill(cache, [1, 2, 3, 4])
    pin = cache.pin([1], hard=True)
    lease = cache.acquire([1, 2, 3, 9])
    assert lease.copy is not None
    cache.clear()
    stats = seen(cache)
    assert (stats.empty, stats.pinned, stats.pending_copies, stats.cached_tokens) == (4, 0, 0, 0)
    assert not pin.held
    all_over(lease)
    assert cache.acquire([1, 2, 3]).num_cached == 0


def test_statistics_count_what_happened() -> None:
    cache = SlotCache(2, 8)
    assert cache.stats().hit_rate == 0
    fill(cache, [1, 2, 3])
    assert repr(cache.stats().copies) == "0"
    fill(cache, [1, 2, 3, 4])  # taken over
    lease = cache.acquire([1, 2, 9])  # copied
    stats = seen(cache)
    assert dataclasses.asdict(stats) == {
        "num_slots": 2,
        "empty": 0,
        "idle": 1,
        "running": 1,
        "pinned": 0,
        "hard_pinned": 0,
        "pending_copies": 1,
        "cached_tokens": 4,
        "acquires": 3,
        "prompt_tokens": 10,
        "hit_tokens": 5,
        "copies": 1,
        "copied_tokens": 2,
        "evicted_tokens": 0,
    }
    assert stats.hit_rate == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.idle = 3  # type: ignore[misc]
    lease.release()
    fill(cache, [5, 6])
    fill(cache, [7, 8])
    assert seen(cache).evicted_tokens == 4


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [-1],
        [2**31],
        [1.5],
        [True],
        [[1, 2]],
        "12",
        np.zeros((1, 2), np.int32),
        np.array(3),
        np.array([1.0]),
        np.array([2**40]),
        list(range(9)),
    ],
    ids=repr,
)
def test_prompts_that_are_none_are_refused_and_change_nothing(tokens: object) -> None:
    cache = SlotCache(2, 8)
    before = seen(cache)
    for refuse in (cache.acquire, cache.pin):
        with pytest.raises(InvalidValue):
            refuse(tokens)  # type: ignore[arg-type]
    assert seen(cache) == before


def test_tokens_come_in_many_forms() -> None:
    torch = pytest.importorskip("torch")
    cache = SlotCache(1, 8)
    fill(cache, [1, 2, 3, 4])
    for tokens in (
        (1, 2, 3),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 0, 2, 0, 3, 0], np.int32)[::2],
        np.array([1, 2, 3], ">i8"),
        np.array([1, 2, 3], ">i4"),
        torch.tensor([1, 2, 3]),
    ):
        assert cache.match(tokens) == 3
    cache.acquire(np.array([1, 0, 2, 0, 3, 0], np.int32)[::2]).publish(3)
    cache.check()


@pytest.mark.parametrize(
    ("slots", "tokens"), [(0, 8), (-1, 8), (2, 0), (True, 8), (2.0, 8), ("2", 8), (2, None)]
)
def test_sizes_that_are_none_are_refused(slots: object, tokens: object) -> None:
    with pytest.raises(InvalidValue):
        SlotCache(slots, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("namespace", [None, 3, b"a"])
def test_namespaces_that_are_none_are_refused(namespace: object) -> None:
    with pytest.raises(InvalidValue, match="namespace"):
        SlotCache(2, 8).acquire([1], namespace)  # type: ignore[arg-type]
