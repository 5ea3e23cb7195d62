"""GDSF: its order against a table of worths, and what makes one run worth more than another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import GDSF, Entry
from kvkeep.testing.policy_suite import drain, new_entry

PAGES = 8  # a block; at `even` pages of context a page costs twice what the first one does
EVEN = 1024 / 512 * PAGES


def at(policy: GDSF, depth: int, size: int = 2, hits: int = 0) -> Entry:
    entry = new_entry(policy, size)
    entry.depth = depth
    for _ in range(hits):
        policy.hit(entry)
    return entry


def served() -> GDSF:
    policy = GDSF(even_tokens=1024)
    policy.fit(1000, PAGES)
    return policy


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "new", "hit", "used", "pop", "trim", "grow"]),
            st.integers(0, 40),
        ),
        max_size=60,
    )
)
def test_the_least_worth_goes_and_the_floor_rises(steps: list[tuple[str, int]]) -> None:
    policy = served()
    floor = 0.0
    worths: dict[Entry, float] = {}
    stands: dict[Entry, float] = {}  # the floor when it was used last

    def put(entry: Entry) -> None:
        middle = entry.depth + entry.size / 2
        worths[entry] = stands[entry] + (1 + entry.hits) * (1 + middle / EVEN)
        policy.add(entry)

    for step, number in steps:
        if step == "new":
            entry = at(policy, depth=number, size=1 + number % 5)
            stands[entry] = floor
            put(entry)
        elif worths and step in {"pop", "trim"}:
            victim = policy.pop()
            assert victim is not None
            floor = min(worths.values())
            assert worths.pop(victim) == pytest.approx(floor)
            if step == "trim":
                victim.size = max(1, victim.size - 1)
                policy.put_back(victim)
                worths[victim] = floor
        elif worths:
            entry = list(worths)[number % len(worths)]
            policy.discard(entry)
            if step == "hit":
                policy.hit(entry)
                stands[entry] = floor
            elif step == "grow":
                entry.size += 2
                policy.grown(entry)
                stands[entry] = floor
            else:
                policy.used(entry)
            put(entry)
    assert len(policy) == len(worths)
    assert [worths[entry] for entry in drain(policy)] == pytest.approx(sorted(worths.values()))


def test_the_deep_end_is_worth_more() -> None:
    policy = served()
    shallow, deep = at(policy, depth=0), at(policy, depth=int(EVEN))
    assert policy.worth(deep) - policy.worth(shallow) == 1, "twice the cost, at so much context"
    for entry in (deep, shallow):
        policy.add(entry)
    assert drain(policy) == [shallow, deep]


def test_what_was_asked_for_often_is_worth_more_until_it_ages() -> None:
    policy = served()
    often = at(policy, depth=0, hits=3)
    policy.add(often)
    went = []
    for _ in range(8):
        policy.add(at(policy, depth=0))
        went.append(policy.pop())
    assert often in went[2:6], "the floor has risen above what it was worth"


def test_a_prefix_stands_as_high_as_what_hung_from_it() -> None:
    policy = served()
    parent = at(policy, depth=0)
    for _ in range(5):
        policy.add(at(policy, depth=0))
        policy.pop()
    child = at(policy, depth=2)
    low = at(policy, depth=0)
    policy.inherit(parent, child)
    policy.hit(low)
    policy.add(low)
    policy.add(parent)
    assert policy.pop() is parent
    assert policy.pop() is low


def test_without_a_memory_depth_is_nothing() -> None:
    policy = GDSF()
    assert policy.worth(at(policy, depth=10**9)) == policy.worth(at(policy, depth=0)) == 1


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_it_refuses_tokens_that_are_none(wrong: int) -> None:
    with pytest.raises(InvalidValue, match="even_tokens"):
        GDSF(even_tokens=wrong)
    with pytest.raises(InvalidValue, match="block_tokens"):
        GDSF(block_tokens=wrong)
