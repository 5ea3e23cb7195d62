"""Hints in front of policies: the contract still holds, and the order is that of three lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep.core.eviction.hints import Hinted

from kvkeep.core.eviction import LRU, POLICIES, Entry, EvictionPolicy, Priority, policy
from kvkeep.testing import PolicyTests
from kvkeep.testing.policy_suite import drain, new_entry


class TestHintedLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return Hinted(LRU())


class TestHintedPriority(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return Hinted(Priority())


class TestAwaited(PolicyTests):
    """One with hints about every entry: the contract asks for no order."""

    def make_policy(self) -> EvictionPolicy:
        return AllAwaited(LRU())


class AllAwaited(Hinted):
    """Awaits whatever is stored."""

    def stored(self, entry: Entry, priority: int) -> None:
        super().stored(entry, priority)
        entry.due = 5.0


@pytest.mark.parametrize("name", POLICIES)
def test_it_passes_for_the_policy_inside(name: str) -> None:
    inner = policy(name)
    hinted = Hinted(inner)
    assert hinted.name == name
    assert (hinted.awaits, hinted.portions) == (inner.awaits, inner.portions)
    entry = new_entry(hinted)
    assert hinted.describe(entry) == inner.describe(entry)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["new", "new", "new", "kill", "await", "await", "none", "pop", "trim", "hit", "hold"]
        ),
        st.integers(0, 11),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_the_dead_then_the_others_then_the_awaited(steps: list[tuple[str, int]]) -> None:
    hinted = Hinted(LRU())
    entries: list[Entry] = []

    def key(entry: Entry) -> tuple[float, ...]:
        if entry.died:
            return 0, entry.died
        return (1, entry.last_used) if entry.due is None else (2, -entry.due, entry.last_used)

    for step, number in steps:
        if step == "new":
            entries.append(new_entry(hinted, size=number + 2))
            hinted.add(entries[-1])
        elif not entries:
            continue
        elif step in {"pop", "trim"}:
            victim = hinted.pop()
            assert victim is not None
            assert key(victim) == min(map(key, entries))
            if step == "pop":
                entries.remove(victim)
            else:
                victim.size -= victim.size > 1
                assert hinted.portion(victim) == victim.size
                hinted.put_back(victim)
                assert hinted.pop() is victim
                hinted.put_back(victim)
        else:
            entry = entries[number % len(entries)]
            hinted.discard(entry)
            if step == "hit":
                hinted.hit(entry)
            if step != "hold":  # for a moment, as by a request that is refused
                entry.died = hinted.death() if step == "kill" else 0
                entry.due = number % 3 - 1.0 if step == "await" else None
            hinted.add(entry)
        assert len(hinted) == len(entries)
    order = drain(hinted)
    assert [key(entry) for entry in order] == sorted(map(key, entries))
