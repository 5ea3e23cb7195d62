"""The shipped contract suite over every policy, and the order of each against a naive list."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import (
    ARC,
    FIFO,
    GDSF,
    LFU,
    LRU,
    POLICIES,
    S3FIFO,
    SLRU,
    TLRU,
    Adaptive,
    Entry,
    EvictionPolicy,
    Priority,
    Reuse,
    TwoQ,
    policy,
)
from kvkeep.core.eviction.depths import Depths
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.testing import PolicyTests
from kvkeep.testing.policy_suite import drain, new_entry

if TYPE_CHECKING:
    from collections.abc import Callable


class TestLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return LRU()


class TestLFU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return LFU()


class TestFIFO(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return FIFO()


class TestPriority(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return Priority()


class TestSLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return SLRU()


class TestSLRUThatProtectsNothing(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return SLRU(0)


class TestSLRUThatProtectsAll(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return SLRU(1)


class TestTwoQ(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return TwoQ()


class TestTwoQInAMemory(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return fitted(TwoQ(0.3))


class TestAdaptive(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return fitted(Adaptive())


class TestDepths(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return fitted(Depths())


class TestARC(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return ARC()


class TestARCInAMemory(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        policy = ARC()
        policy.fit(40, 1)
        for number in [*range(20), *range(60), *range(30, 50)]:  # its target has moved
            policy.requested([b"before all tests" + bytes([number] * 16)])
        assert policy._directory.target
        return policy


class TestS3FIFO(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return S3FIFO()


class TestS3FIFOInAMemory(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return fitted(S3FIFO(0.5, again=1), 40)


class TestGDSF(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return GDSF()


class TestGDSFInAMemory(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return fitted(GDSF(even_tokens=1000))


class TestTLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return TLRU()


class TestTLRUInAMemory(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return fitted(TLRU(spare_tokens=1500))


class TestReuse(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return Reuse()


class TestReuseInAMemory(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        policy = fitted(Reuse(), 40)
        for number in [*range(60), *range(40)] * 8:  # it has learned something
            policy.requested([b"before all tests" + bytes([number] * 16)])
        return policy


def fitted(policy: EvictionPolicy, size: int = 100) -> EvictionPolicy:
    policy.fit(size, 1)
    return policy


# --- order, against lists ------------------------------------------------------------------------

ORDERS: dict[str, tuple[type[EvictionPolicy], Callable[[Entry], tuple[int, ...]]]] = {
    "lru": (LRU, lambda entry: (entry.last_used,)),
    "fifo": (FIFO, lambda entry: (entry.stored,)),
    "lfu": (LFU, lambda entry: (entry.hits, entry.last_used)),
    "priority": (Priority, lambda entry: (entry.priority, entry.last_used)),
}

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "hit", "used", "hold", "pop", "trim", "inherit", "split"]),
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
            entries.append(new_entry(policy, size=number + 2, priority=number % 3))
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
            if step in {"hit", "used"}:
                getattr(policy, step)(entry)
            elif step == "inherit":
                child = new_entry(policy, priority=number)
                child.hits = number % 4
                policy.inherit(entry, child)
            elif step == "split" and entry.size > 1:
                upper = Entry()
                upper.size, entry.size = 1, entry.size - 1
                policy.split(upper, entry)
                policy.inherit(upper, entry)  # the lower one goes, the upper one may go next
                entries[entries.index(entry)] = entry = upper
            policy.add(entry)
    assert drain(policy) == sorted(entries, key=key)


class NaiveSLRU:
    """Two lists of (last used, entry), and nothing but sums and minima."""

    def __init__(self, protected: float) -> None:
        self.share = protected
        self.probation: list[Entry] = []
        self.protected: list[Entry] = []

    def add(self, entry: Entry) -> list[Entry]:
        """Returns what was demoted, in order."""
        demoted = []
        if not entry.hits:
            self.probation.append(entry)
            return []
        self.protected.append(entry)
        while sum(e.size for e in self.protected) > self.share * sum(
            e.size for e in self.protected + self.probation
        ):
            oldest = min(self.protected, key=lambda e: e.last_used)
            self.protected.remove(oldest)
            self.probation.append(oldest)
            demoted.append(oldest)
        return demoted

    def remove(self, entry: Entry) -> None:
        (self.protected if entry in self.protected else self.probation).remove(entry)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["new", "new", "hit", "hit", "pop", "trim", "used"]),
            st.integers(0, 11),
        ),
        max_size=60,
    )
)
def test_slru_against_two_lists(share: float, steps: list[tuple[str, int]]) -> None:
    policy, naive = SLRU(share), NaiveSLRU(share)
    for step, number in steps:
        entries = naive.probation + naive.protected
        if step == "new":
            entry = new_entry(policy, size=number + 1)
            policy.add(entry)
            naive.add(entry)
        elif entries and step in {"pop", "trim"}:
            victim = policy.pop()
            first = naive.probation or naive.protected
            # What was demoted last has had the policy's clock advanced for it: last_used tells.
            assert victim is min(first, key=lambda entry: entry.last_used)
            naive.remove(victim)
            if step == "trim":
                victim.size = max(1, victim.size - 1)
                policy.put_back(victim)
                naive.probation.append(victim)
        elif entries:
            entry = entries[number % len(entries)]
            policy.discard(entry)
            naive.remove(entry)
            getattr(policy, "hit" if step == "hit" else "used")(entry)
            demoted = naive.add(entry)
            before = policy._time
            policy.add(entry)
            assert [e.last_used for e in demoted] == list(range(before + 1, policy._time + 1))
            assert not any(e.hits for e in demoted)
        assert len(policy) == len(naive.probation) + len(naive.protected)


def test_slru_spares_what_was_reused_from_a_scan() -> None:
    policy = SLRU(0.8)
    scan = [new_entry(policy) for _ in range(100)]
    for entry in scan[:50]:
        policy.add(entry)
    reused = [new_entry(policy) for _ in range(10)]
    for entry in reused:
        policy.hit(entry)
        policy.add(entry)
    for entry in scan[50:]:
        policy.used(entry)
        policy.add(entry)
    assert drain(policy) == scan + reused


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_slru_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(InvalidValue, match="protected is a share"):
        SLRU(share)


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


def test_removing_what_lies_between_keeps_the_heap_small() -> None:
    queue = AgeQueue()
    first, last = Entry(), Entry()
    queue.push(first, 0)
    queue.push(last, 1000)
    chance = random.Random(2)
    for _ in range(5000):
        entry = Entry()
        queue.push(entry, chance.randrange(1, 1000))
        queue.remove(entry)
    assert len(queue._heap) < 200
    assert [queue.pop(), queue.pop(), queue.pop()] == [first, last, None]


# --- by name -------------------------------------------------------------------------------------


def test_policies_have_names() -> None:
    for name in POLICIES:
        assert policy(name).name == name
        assert policy(name) is not policy(name)
    mine = SLRU(0.5)
    assert policy(mine) is mine
    with pytest.raises(InvalidValue, match="lru, lfu, fifo, slru, priority"):
        policy("mru")
