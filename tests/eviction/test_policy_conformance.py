"""The shipped contract suite over every policy, and the order of each against a naive list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import InvalidValue, PagedCache
from kvkeep.core.eviction import (
    LRU,
    POLICIES,
    AgeQueue,
    Entry,
    EvictionPolicy,
    Priority,
    QueuePolicy,
    policy,
)
from kvkeep.store.tiers.two_queues import TwoQ
from kvkeep.testing import PolicyTests
from kvkeep.testing.policy_suite import drain, new_entry, use

if TYPE_CHECKING:
    from collections.abc import Callable


class TestLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return LRU()


class TestPriority(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return Priority()


class DeepestFirst(QueuePolicy):
    """As in docs/how-to/eviction-policy.md; entries of the suite have equal depths."""

    name = "deepest"

    def age(self, entry: Entry) -> float:
        return -entry.depth


class LFU(QueuePolicy):
    name = "lfu"

    def age(self, entry: Entry) -> float:
        return entry.hits


class TestDeepestFirst(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return DeepestFirst()


class TestLFU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return LFU()


class TestTwoQ(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return TwoQ()


# --- order, against lists ------------------------------------------------------------------------

ORDERS: dict[str, tuple[type[EvictionPolicy], Callable[[Entry], tuple[int, ...]]]] = {
    "lru": (LRU, lambda entry: (entry.last_used,)),
    "priority": (Priority, lambda entry: (entry.priority, entry.last_used)),
}

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "use", "hold", "pop", "trim"]),
        st.integers(0, 11),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_the_order_is_that_of_a_sorted_list(name: str, steps: list[tuple[str, int]]) -> None:
    make, key = ORDERS[name]
    policy = make()
    entries: list[Entry] = []  # all of them may go
    for step, number in steps:
        if step == "new":
            entries.append(new_entry(size=number + 2, priority=number % 3))
            policy.add(entries[-1])
        elif entries and step in {"pop", "trim"}:
            victim = policy.pop()
            assert victim is min(entries, key=key)
            if step == "pop":
                entries.remove(victim)
            else:
                victim.size = max(1, victim.size - 1)
                policy.put_back(victim)
        elif entries:
            entry = entries[number % len(entries)]
            policy.discard(entry)
            policy.add(use(entry) if step == "use" else entry)
    assert drain(policy) == sorted(entries, key=key)


# --- the queue under them ------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "push", "push", "remove", "pop"]), st.integers(0, 9)),
        max_size=80,
    )
)
def test_an_age_queue_is_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    queue = AgeQueue()
    ages: dict[Entry, int] = {}
    for step, number in steps:
        if step == "push":
            entry = Entry()
            queue.push(entry, number)
            ages[entry] = number
        elif step == "remove" and ages:
            entry = list(ages)[number % len(ages)]
            assert entry in queue
            queue.remove(entry)
            del ages[entry]
            assert entry not in queue
        elif step == "pop":
            entry = queue.pop()
            assert (entry is None) == (not ages)
            if entry is not None:
                assert ages[entry] == min(ages.values())
                del ages[entry]
        assert len(queue) == len(ages)


# --- by name -------------------------------------------------------------------------------------


def test_policies_have_names() -> None:
    for name in POLICIES:
        assert policy(name).name == name
        assert policy(name) is not policy(name)
    mine = LRU()
    assert policy(mine) is mine


@pytest.mark.parametrize("name", ["mru", "2q"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidValue, match=rf"no eviction policy '{name}'; .* lru, priority, retu"):
        PagedCache(4, eviction=name)
