"""T-LRU: its order against lists, and what it does to a conversation's end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import TLRU, Entry
from kvkeep.testing.policy_suite import new_entry

BUDGET = 6


def served(spare: int = BUDGET) -> TLRU:
    """A page is a block is a token."""
    policy = TLRU(spare_tokens=spare, block_tokens=1)
    policy.fit(1000, 1)
    return policy


def at(policy: TLRU, depth: int, size: int) -> Entry:
    entry = Entry()
    entry.depth, entry.size = depth, size
    policy.stored(entry, 0)
    return entry


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "new", "used", "hit", "take", "part", "pop"]),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_spare_ends_go_first_and_then_what_was_used_longest_ago(
    steps: list[tuple[str, int]],
) -> None:
    policy = served()
    length: dict[Entry, int] = {}
    added: list[int] = []
    spare_when_added: dict[Entry, bool] = {}

    def expected() -> float:
        mean = 0.0
        for at, value in enumerate(added):
            mean = value if not at else mean + (value - mean) / 128
        return mean

    def spare(entry: Entry) -> int:
        keep = math.ceil(length[entry] + expected() - BUDGET)
        return max(0, min(entry.size, entry.depth + entry.size - keep))

    def put(entry: Entry) -> None:
        spare_when_added[entry] = spare(entry) > 0
        policy.add(entry)

    for step, number in steps:
        if step == "new":
            entry = at(policy, depth=number, size=1 + number * 7 % 12)
            length[entry] = entry.depth + entry.size
            if entry.depth >= entry.size:
                added.append(entry.size)
            put(entry)
        elif spare_when_added and step in {"take", "part", "pop"}:
            first = [e for e, was in spare_when_added.items() if was and spare(e)]
            victim = policy.pop()
            assert victim is min(first or spare_when_added, key=lambda e: e.last_used)
            portion = policy.portion(victim)
            assert portion == (spare(victim) or victim.size)
            # What was passed over has no spare pages any more.
            for entry, was in spare_when_added.items():
                if was and entry.last_used < victim.last_used:
                    spare_when_added[entry] = False
            if not first:
                spare_when_added.update(dict.fromkeys(spare_when_added, False))
            del spare_when_added[victim]
            left = victim.size - (1 if step == "part" else portion)
            if step != "pop" and left:
                victim.size = left
                put_back = spare(victim) > 0
                policy.put_back(victim)
                spare_when_added[victim] = put_back
        elif spare_when_added:
            entry = list(spare_when_added)[number % len(spare_when_added)]
            policy.discard(entry)
            getattr(policy, "hit" if step == "hit" else "used")(entry)
            put(entry)
        assert len(policy) == len(spare_when_added)


def test_a_conversation_is_as_long_as_it_was() -> None:
    policy = served(30)
    head = at(policy, 0, 20)
    assert policy.spare(head) == 20, "all of a conversation that can be computed in time"
    tail = at(policy, 20, 20)
    assert policy._added == 20
    assert policy.spare(tail) == 10, "30 to compute next time: 20 new ones, and 10 of these"
    tail.size -= 10
    assert policy.spare(tail) == 0
    assert policy.spare(head) == 10, "if it ended there"
    policy.inherit(head, tail)
    assert policy.spare(head) == 0, "but it is 40 long, and has lost more than it can"


def test_what_begins_behind_a_system_prompt_is_no_continuation() -> None:
    policy = served()
    at(policy, 2, 50)
    assert policy._added is None
    at(policy, 52, 4)
    assert policy._added == 4
    grown = at(policy, 0, 10)
    grown.size += 6
    policy.grown(grown)
    assert policy._added == pytest.approx(4 + 2 / 128)


def test_what_is_no_longer_spare_waits_with_the_others() -> None:
    policy = served()
    old, used, short = at(policy, 0, 5), at(policy, 9, 40), at(policy, 0, 3)
    used.state = 80  # it has lost its end before
    for entry in (old, used, short):
        policy.add(entry)
    assert policy.spare(old) == 5
    at(policy, 10, 10)
    assert policy.spare(old) == policy.spare(short) == 0, "continuations add 10: nothing is spare"
    policy.discard(used)
    policy.used(used)
    policy.add(used)
    small = at(policy, 30, 1)
    small.state = 20  # its conversation was shorter, once
    policy.add(small)
    assert [policy.pop() for _ in range(5)] == [small, old, short, used, None]


def test_without_a_memory_it_is_lru() -> None:
    policy = TLRU()
    entries = [new_entry(policy, size=9) for _ in range(5)]
    for entry in entries:
        policy.add(entry)
    assert [policy.pop() for _ in entries] == entries


def turn(cache: PagedCache, tokens: np.ndarray) -> int:
    """What had to be computed of a prompt."""
    with cache.open(np.append(tokens, -1 % 2**31)) as sequence:
        sequence.copies()
        sequence.publish(len(tokens))
        return len(tokens) - min(sequence.num_cached, len(tokens))


def test_long_conversations_keep_what_the_budget_needs() -> None:
    """One long conversation and many short ones: under LRU it would be gone when it comes back."""
    computed = {}
    for name in ("lru", "tlru"):
        policy = TLRU(spare_tokens=64, block_tokens=1) if name == "tlru" else "lru"
        cache = PagedCache(600, 1, eviction=policy, block_pages=1)
        long = np.arange(400, dtype=np.int32)
        turn(cache, long)
        for other in range(20):
            turn(cache, np.arange(50, dtype=np.int32) + 1000 * (other + 1))
        cache.check()
        computed[name] = turn(cache, np.append(long, np.arange(900, 916, dtype=np.int32)))
    assert computed["lru"] > 200
    assert computed["tlru"] <= 64 + 16


@pytest.mark.parametrize("wrong", [-1, 1.5])
def test_it_refuses_tokens_that_are_none(wrong: int) -> None:
    with pytest.raises(InvalidValue, match="spare_tokens"):
        TLRU(spare_tokens=wrong)
    with pytest.raises(InvalidValue, match="block_tokens"):
        TLRU(block_tokens=wrong)
