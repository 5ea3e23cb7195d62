"""`SlotCache`, step by step. `test_slots_model.py` drives it at random against a naive model."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from slot_requests import all_over, fill, seen

from kvkeep.core.errors import IllegalStep, InvalidValue, KVKeepError, NotCached
from kvkeep.core.keys import Namespace
from kvkeep.core.slots import OutOfSlots, SlotCache, SlotCopy

# -- giving slots out --------------------------------------------------------------------------


def test_the_lowest_empty_slot_is_given_out() -> None:
    cache = SlotCache(4, 8)
    leases = [cache.acquire([i]) for i in range(4)]
    assert [lease.slot for lease in leases] == [0, 1, 2, 3]
    for slot in (3, 1):
        leases[slot].release()
    assert cache.acquire([9]).slot == 1
    assert cache.acquire([9]).slot == 3


def test_a_new_prompt_has_nothing_cached() -> None:
    lease = SlotCache(2, 8).acquire([1, 2, 3])
    assert (lease.num_cached, lease.copy, lease.published, lease.num_tokens) == (0, None, 0, 3)


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


def test_the_version_names_each_hold_on_a_slot() -> None:
    cache = SlotCache(1, 8)
    versions = []
    for _ in range(3):
        with cache.acquire([1]) as lease:
            versions.append(lease.version)
    assert versions == sorted(set(versions))


# -- taking over -------------------------------------------------------------------------------


def test_an_idle_slot_whose_data_the_prompt_begins_with_is_taken_without_a_copy() -> None:
    cache = SlotCache(4, 8)
    fill(cache, [7, 7])
    slot = fill(cache, [1, 2, 3])
    lease = cache.acquire([1, 2, 3, 4])
    assert (lease.slot, lease.num_cached, lease.copy, lease.published) == (slot, 3, None, 3)
    assert seen(cache).takeovers == 1


def test_of_several_idle_beginnings_the_longest_is_taken() -> None:
    cache = SlotCache(4, 8)
    leases = [cache.acquire(prompt) for prompt in ([1], [1, 2, 3], [1, 2])]
    for lease in leases:
        lease.publish(lease.num_tokens)
    for lease in leases:
        lease.release()
    assert cache.acquire([1, 2, 3, 4]).slot == 1


def test_at_least_the_last_prompt_token_is_left_to_compute() -> None:
    cache = SlotCache(2, 8)
    slot = fill(cache, [1, 2, 3])
    lease = cache.acquire([1, 2, 3])
    assert (lease.slot, lease.num_cached) == (slot, 2)
    assert lease.published == 2  # the third is written again, so nobody may copy it now
    assert cache.match([1, 2, 3]) == 2
    cache.check()


def test_a_prompt_of_one_token_has_nothing_to_reuse() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1])
    assert cache.acquire([1]).num_cached == 0


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


def test_a_longer_entry_is_cut_when_no_other_slot_is_free() -> None:
    cache = SlotCache(2, 8)
    other = cache.acquire([8])
    slot = fill(cache, [1, 2, 3, 4, 5])
    lease = cache.acquire([1, 2, 9])
    assert (lease.slot, lease.num_cached, lease.copy, lease.published) == (slot, 2, None, 2)
    assert cache.match([1, 2, 3]) == 2
    stats = seen(cache)
    assert (stats.evictions, stats.evicted_tokens) == (1, 3)
    other.release()


def test_a_longer_entry_is_cut_when_it_is_the_one_to_be_evicted() -> None:
    cache = SlotCache(2, 8)
    oldest = fill(cache, [1, 2, 3])
    fill(cache, [5, 6, 7])
    lease = cache.acquire([1, 2, 9])
    assert (lease.slot, lease.copy) == (oldest, None)
    assert cache.match([5, 6, 7]) == 3


def test_the_slot_taken_keeps_what_it_has_and_only_the_rest_is_copied() -> None:
    cache = SlotCache(3, 8)
    fill(cache, [1, 2])
    longer = cache.acquire([1, 2, 3, 4])  # takes it over
    longer.publish(4)
    again = fill(cache, [1, 2])
    lease = cache.acquire([1, 2, 3, 5])
    assert lease.copy == SlotCopy(src=longer.slot, dst=again, tokens=3, start=2)
    assert lease.published == 2
    cache.check()


def test_a_running_request_shares_what_it_has_published_and_no_more() -> None:
    cache = SlotCache(4, 8)
    first = cache.acquire([1, 2, 3, 4])
    assert cache.acquire([1, 2, 3, 5]).num_cached == 0
    first.publish(2)
    second = cache.acquire([1, 2, 3, 6])
    assert second.copy == SlotCopy(src=first.slot, dst=second.slot, tokens=2)


def test_what_a_copy_brings_is_published_when_it_was_made() -> None:
    cache = SlotCache(4, 8)
    first = cache.acquire([1, 2, 3, 4])
    first.publish(3)
    second = cache.acquire([1, 2, 3, 5])
    first.release(keep=False)
    assert cache.match([1, 2, 3]) == 0
    second.copied()
    assert cache.match([1, 2, 3]) == 3
    cache.check()


# -- eviction ----------------------------------------------------------------------------------


def test_the_least_recently_used_idle_slot_is_evicted() -> None:
    cache = SlotCache(3, 8)
    for token in (1, 2, 3):
        fill(cache, [token, 0])
    with cache.acquire([1, 0, 5]) as lease:  # slot 0 is used again
        lease.publish(3)
    assert cache.acquire([9]).slot == 1
    assert cache.acquire([9]).slot == 2
    assert cache.acquire([9]).slot == 0


def test_being_copied_from_is_a_use() -> None:
    cache = SlotCache(3, 8)
    fill(cache, [1, 1, 1])
    fill(cache, [2, 2, 2])
    with cache.acquire([1, 1, 5]) as lease:
        assert lease.copy
        lease.copied()
    assert cache.acquire([9]).slot == 1


def test_evicted_data_is_not_found() -> None:
    cache = SlotCache(1, 8)
    fill(cache, [1, 2, 3])
    cache.acquire([4, 5, 6])
    assert cache.match([1, 2, 3]) == 0


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


# -- the copy's source -------------------------------------------------------------------------


def test_the_source_is_not_given_out_until_the_copy_was_made() -> None:
    cache = SlotCache(2, 8)
    source = fill(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2, 3, 9])
    assert lease.copy is not None
    with pytest.raises(OutOfSlots):
        cache.acquire([5, 6])
    with pytest.raises(OutOfSlots):
        cache.acquire([1, 2, 7])  # would write at 2, which is still to be copied
    lease.copied()
    assert cache.acquire([5, 6]).slot == source
    cache.check()


def test_the_source_may_be_taken_by_who_writes_behind_what_is_copied() -> None:
    cache = SlotCache(2, 8)
    source = fill(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2, 9])
    assert lease.copy is not None
    taken = cache.acquire([1, 2, 3, 4, 5])
    assert (taken.slot, taken.num_cached, taken.copy) == (source, 4, None)
    with pytest.raises(IllegalStep, match="2 are hard-pinned or being copied"):
        taken.truncate(1)
    taken.truncate(2)
    cache.check()


@pytest.mark.parametrize("order", [[4, 2], [2, 4]])
def test_the_longest_of_several_copies_guards_the_source(order: list[int]) -> None:
    cache = SlotCache(3, 8)
    source = fill(cache, [1, 2, 3, 4, 5])
    leases = {n: cache.acquire([*range(1, n + 1), 9]) for n in order}
    assert all(lease.copy for lease in leases.values())
    with pytest.raises(OutOfSlots):
        cache.acquire([1, 2, 3, 7])
    leases[4].copied()
    assert cache.acquire([1, 2, 3, 7]).slot == source
    cache.check()


def test_publishing_beyond_the_copy_says_that_it_was_made() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2, 3, 9])
    with pytest.raises(IllegalStep, match="pending"):
        lease.publish(2)
    assert seen(cache).pending_copies == 1
    lease.publish(4)
    assert seen(cache).pending_copies == 0
    with pytest.raises(IllegalStep, match="no copy"):
        lease.copied()


def test_a_request_that_ends_before_its_copy_frees_the_source_and_keeps_nothing() -> None:
    cache = SlotCache(2, 8)
    source = fill(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2, 3, 9])
    lease.release()
    stats = seen(cache)
    assert (stats.pending_copies, stats.empty, stats.idle) == (0, 1, 1)
    cache.acquire([8])
    assert cache.acquire([5]).slot == source


def test_forgotten_data_stays_in_place_until_it_is_copied_but_is_not_found() -> None:
    cache = SlotCache(2, 8)
    first = cache.acquire([1, 2, 3])
    first.publish(3)
    second = cache.acquire([1, 2, 3, 4])
    assert second.copy is not None
    first.release(keep=False)
    assert cache.match([1, 2, 3]) == 0
    with pytest.raises(OutOfSlots):
        cache.acquire([7])
    assert seen(cache).empty == 0
    second.copied()
    assert seen(cache).empty == 1
    assert cache.acquire([7]).slot == first.slot


def test_a_pending_copy_cannot_be_cut_away() -> None:
    cache = SlotCache(3, 8)
    fill(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2, 3, 9, 9])
    with pytest.raises(IllegalStep, match="pending"):
        lease.truncate(2)
    lease.truncate(4)
    lease.truncate(3)
    lease.copied()
    lease.truncate(2)
    assert lease.published == 2
    cache.check()


# -- namespaces --------------------------------------------------------------------------------


def test_namespaces_never_share() -> None:
    cache = SlotCache(4, 8)
    fill(cache, [1, 2, 3], "a")
    assert cache.match([1, 2, 3], "b") == 0
    assert cache.match([1, 2, 3], Namespace(tenant="a")) == 3
    assert cache.match([1, 2, 3], Namespace(tenant="a", lora="x")) == 0
    with pytest.raises(NotCached):
        cache.pin([1, 2, 3], "b")
    lease = cache.acquire([1, 2, 3], "b")
    assert (lease.slot, lease.num_cached) == (1, 0)


def test_a_slot_taken_from_another_namespace_keeps_nothing_of_it() -> None:
    cache = SlotCache(1, 8)
    fill(cache, [1, 2, 3], "a")
    lease = cache.acquire([1, 2, 3], "b")
    assert (lease.num_cached, lease.published) == (0, 0)
    assert cache.match([1, 2, 3], "a") == 0


def test_namespaces_that_come_and_go_leave_nothing_behind() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1, 2], "kept")
    cache.pin([1, 2], "kept")
    for number in range(500):
        fill(cache, [1, 2], f"tenant {number}")
    assert len(cache._table.rows._numbers) <= 4
    assert cache.match([1, 2], "kept") == 2
    assert cache.match([1, 2], "tenant 499") == 2
    assert cache.match([1, 2], "tenant 498") == 0
    cache.check()


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
        "takeovers": 1,
        "copies": 1,
        "copied_tokens": 2,
        "evictions": 0,
        "evicted_tokens": 0,
    }
    assert stats.hit_rate == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.idle = 3  # type: ignore[misc]
    lease.release()
    fill(cache, [5, 6])
    fill(cache, [7, 8])
    assert seen(cache).evicted_tokens == 4


def test_a_look_changes_nothing() -> None:
    cache = SlotCache(2, 8)
    fill(cache, [1, 2, 3])
    fill(cache, [4, 5, 6])
    before = seen(cache)
    assert cache.match([1, 2, 3, 4]) == 3
    assert seen(cache) == before
    assert cache.acquire([9]).slot == 0  # still the oldest


def test_objects_say_what_they_are() -> None:
    cache = SlotCache(2, 8)
    lease = cache.acquire([1, 2, 3])
    assert repr(cache) == "<SlotCache 2 slots of 8 tokens: 1 empty, 0 idle, 1 running>"
    lease.publish(2)
    assert repr(lease) == "<SlotLease slot 0 version 1, 2 of 3 tokens published>"
    pin = cache.pin([1, 2])
    assert repr(pin) == "<SlotPin soft, 2 tokens in slot 0, held>"
    assert "SlotCopy(src=0, dst=1, tokens=2, start=0) pending" in repr(cache.acquire([1, 2, 4]))
    lease.release()
    assert repr(lease) == "<SlotLease slot 0 version 1, over>"


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
