"""`PolicyTests`: one test for each sentence of the contract in `kvkeep.core.eviction.base`."""

from __future__ import annotations

import random
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.eviction import Entry, EvictionPolicy

__all__ = ["PolicyTests", "drain", "new_entry"]


def new_entry(policy: EvictionPolicy, size: int = 1, priority: int = 0) -> Entry:
    """Return an entry that was just stored."""
    entry = Entry()
    entry.size = size
    policy.stored(entry, priority)
    return entry


def drain(policy: EvictionPolicy) -> list[Entry]:
    """Pop all victims."""
    popped = []
    while (entry := policy.pop()) is not None:
        popped.append(entry)
    return popped


def _fill(policy: EvictionPolicy, count: int, size: int) -> list[Entry]:
    """Return evictable entries, used in a random pattern."""
    chance = random.Random(3)  # noqa: S311 - a test, not a secret
    entries = [new_entry(policy, size, priority=chance.randrange(3)) for _ in range(count)]
    for _ in range(40):
        policy.hit(chance.choice(entries))
    for entry in entries:
        policy.add(entry)
    return entries


class PolicyTests:
    """Subclass it, implement `make_policy`, and pytest runs all tests.

    The suite does not check which entry is evicted first: test that for your policy.
    """

    def make_policy(self) -> EvictionPolicy:
        """Return a new policy without entries."""
        raise NotImplementedError("override make_policy: it returns the policy to be tested")

    def test_it_has_a_name(self) -> None:
        """Its repr contains its name, and `describe` returns text."""
        policy = self.make_policy()
        assert policy.name
        assert policy.name in repr(policy)
        entry = new_entry(policy)
        assert isinstance(policy.describe(entry), str)
        policy.add(entry)
        assert isinstance(policy.describe(entry), str)

    def test_a_new_policy_has_no_victim(self) -> None:
        """`pop` returns None, repeatedly."""
        policy = self.make_policy()
        assert len(policy) == 0
        assert policy.pop() is None
        assert policy.pop() is None
        assert len(policy) == 0

    def test_events_have_an_order(self) -> None:
        """``last_used`` and ``stored`` number events in order; `hit` increments ``hits``."""
        policy = self.make_policy()
        first, second = new_entry(policy, priority=3), new_entry(policy, priority=-1)
        assert (first.priority, second.priority) == (3, -1)
        assert first.stored < second.stored
        assert first.last_used < second.last_used
        assert first.hits == second.hits == 0
        policy.used(first)
        assert first.last_used > second.last_used
        assert first.hits == 0
        policy.hit(second)
        assert second.last_used > first.last_used
        assert second.hits == 1
        assert first.stored < second.stored

    def test_a_grown_entry_is_as_recent_as_its_tail(self) -> None:
        """`grown` updates ``stored`` and ``last_used``."""
        policy = self.make_policy()
        first, second = new_entry(policy), new_entry(policy)
        first.size += 2
        policy.grown(first)
        assert first.stored > second.stored
        assert first.last_used > second.last_used
        assert first.hits == 0

    def test_both_parts_of_a_split_entry_keep_its_age(self) -> None:
        """The front part of a split entry has the age and priority of the whole."""
        policy = self.make_policy()
        lower, upper = new_entry(policy, size=4, priority=2), Entry()
        policy.hit(lower)
        before = (lower.stored, lower.last_used, lower.priority)
        upper.size, lower.size = 1, 3
        policy.split(upper, lower)
        assert (upper.stored, upper.last_used, upper.priority) == before
        assert (lower.stored, lower.last_used, lower.priority) == before
        policy.add(lower)
        assert policy.pop() is lower
        policy.inherit(upper, lower)
        policy.add(upper)
        assert policy.pop() is upper

    def test_a_parent_inherits_what_used_its_child(self) -> None:
        """A parent inherits the later use, the higher priority and the sum of hits."""
        policy = self.make_policy()
        for last in ("parent", "child"):
            parent, child = new_entry(policy, priority=1), new_entry(policy, priority=1)
            policy.hit(child)
            policy.hit(child)
            policy.hit(parent)
            favoured = parent if last == "parent" else child
            policy.used(favoured)
            favoured.priority = 5
            expected = max(parent.last_used, child.last_used)
            policy.inherit(parent, child)
            assert parent.last_used == expected
            assert parent.priority == 5
            assert parent.hits == 3

    def test_each_entry_is_popped_once(self) -> None:
        """Each added entry is popped exactly once; then there is no victim."""
        policy = self.make_policy()
        entries = [new_entry(policy, size=1 + at % 3, priority=at % 4) for at in range(50)]
        for entry in entries[::2]:
            policy.hit(entry)
        for at, entry in enumerate(entries, 1):
            policy.add(entry)
            assert len(policy) == at
        popped = drain(policy)
        assert len(popped) == len(set(map(id, popped))) == 50
        assert len(policy) == 0

    def test_a_discarded_entry_is_not_popped(self) -> None:
        """A discarded entry is not popped, and may be added again, repeatedly."""
        policy = self.make_policy()
        entries = [new_entry(policy) for _ in range(20)]
        for _ in range(3):
            for entry in entries:
                policy.add(entry)
            for entry in entries[::3]:
                policy.discard(entry)
            assert len(policy) == 13
            popped = drain(policy)
            assert len(popped) == 13
            assert not {*map(id, popped)} & {*map(id, entries[::3])}

    def test_an_entry_put_back_is_next(self) -> None:
        """An entry that lost its tail is the next victim, whatever its rank was.

        A policy with `portions` may choose another one after a portion.
        """
        policy = self.make_policy()
        _fill(policy, 30, size=5)
        for left in range(30, 0, -1):
            victim = policy.pop()
            assert victim is not None
            assert policy.portions or policy.portion(victim) == victim.size
            for size in (3, 1):
                victim.size = size
                policy.put_back(victim)
                assert len(policy) == left
                again = policy.pop()
                assert again is not None
                assert again is victim or policy.portions
                victim = again
        assert policy.pop() is None

    def test_victims_are_evicted_in_portions(self) -> None:
        """An index takes at least a page of a victim at a time, until all entries are evicted."""
        policy = self.make_policy()
        entries = _fill(policy, 30, size=7)
        total = sum(entry.size for entry in entries)
        taken = 0
        while (victim := policy.pop()) is not None:
            portion = policy.portion(victim)
            assert 1 <= portion <= victim.size
            taken += portion
            if portion < victim.size:
                victim.size -= portion
                policy.put_back(victim)
        assert taken == total

    def test_an_entry_put_back_may_be_discarded(self) -> None:
        """The rest of a victim can be discarded, used and added like any other entry."""
        policy = self.make_policy()
        for priority in (0, 1):
            policy.add(new_entry(policy, size=4, priority=priority))
        victim = policy.pop()
        assert victim is not None
        victim.size = 2
        policy.put_back(victim)
        policy.discard(victim)
        policy.hit(victim)
        assert len(policy) == 1
        policy.add(victim)
        assert len(drain(policy)) == 2

    def test_a_short_hold_keeps_the_order(self) -> None:
        """A refused request discards the entries it found and adds them again: the order stays."""

        def order(held: int | None) -> list[int]:
            policy = self.make_policy()
            entries = _fill(policy, 30, size=2)
            for entry in entries[::4]:
                policy.discard(entry)
                policy.hit(entry)
                policy.add(entry)
            if held is not None:
                policy.discard(entries[held])
                policy.add(entries[held])
            numbers = {id(entry): number for number, entry in enumerate(entries)}
            return [numbers[id(entry)] for entry in drain(policy)]

        for held in range(30):
            assert order(held) == order(None), held

    def test_records_may_change_while_an_entry_is_held(self) -> None:
        """Between `discard` and `add` an entry is used, inherits, grows and is split."""
        policy = self.make_policy()
        chance = random.Random(9)  # noqa: S311 - a test, not a secret
        entries = [new_entry(policy, size=8) for _ in range(20)]
        for entry in entries:
            policy.add(entry)
        for _ in range(300):
            entry = chance.choice(entries)
            policy.discard(entry)
            for step in chance.sample(range(5), 3):
                if step == 0:
                    policy.hit(entry)
                elif step == 1:
                    policy.used(entry)
                elif step == 2:
                    policy.inherit(entry, new_entry(policy, priority=chance.randrange(4)))
                elif step == 3:
                    entry.size = chance.randrange(1, 9)
                    policy.grown(entry)
                else:
                    upper = Entry()
                    upper.size = 1
                    policy.split(upper, entry)
            policy.add(entry)
            assert len(policy) == 20
        assert {id(entry) for entry in drain(policy)} == {id(entry) for entry in entries}

    def test_thousands_of_entries_in_any_order(self) -> None:
        """Entries are added, discarded, popped and put back; the policy always holds the rest."""
        policy = self.make_policy()
        chance = random.Random(1)  # noqa: S311 - a test, not a secret
        outside = [new_entry(policy, size=1 + at % 7, priority=at % 5) for at in range(3000)]
        inside: dict[Entry, None] = {}
        for turn in range(20_000):
            roll = chance.random()
            if roll < 0.5 and outside:
                entry = outside.pop(chance.randrange(len(outside)))
                (policy.hit if roll < 0.2 else policy.used)(entry)
                policy.add(entry)
                inside[entry] = None
            elif roll < 0.75 and inside:
                at = chance.randrange(len(inside)) if turn % 20 == 0 else chance.randrange(3)
                entry = next(islice(inside, min(at, len(inside) - 1), None))
                policy.discard(entry)
                del inside[entry]
                outside.append(entry)
            else:
                victim = policy.pop()
                assert (victim is None) == (not inside)
                if victim is None:
                    continue
                assert victim in inside
                if roll < 0.85:
                    policy.put_back(victim)
                else:
                    del inside[victim]
                    outside.append(victim)
            assert len(policy) == len(inside)
        assert {*map(id, drain(policy))} == {*map(id, inside)}

    def test_any_walk_agrees_with_a_set(self) -> None:
        """As the test before, with steps from hypothesis, which shrinks a failure to few steps."""
        steps = st.tuples(
            st.sampled_from(["stored", "add", "add", "discard", "pop", "put_back", "hit", "used"]),
            st.integers(0, 7),
        )

        @settings(max_examples=100, deadline=None)
        @given(st.lists(steps, max_size=40))
        def run(walk: list[tuple[str, int]]) -> None:
            policy = self.make_policy()
            outside: list[Entry] = []
            inside: list[Entry] = []
            for step, number in walk:
                if step == "stored":
                    outside.append(new_entry(policy, size=number + 1, priority=number % 3))
                elif step in {"pop", "put_back"}:
                    victim = policy.pop()
                    assert (victim is None) == (not inside)
                    if victim is not None and step == "put_back":
                        victim.size = max(1, victim.size - 1)
                        policy.put_back(victim)
                        again = policy.pop()
                        assert again is victim or (again is not None and policy.portions)
                        policy.put_back(again)
                    elif victim is not None:
                        inside.remove(victim)
                        outside.append(victim)
                elif step == "discard" and inside:
                    outside.append(inside.pop(number % len(inside)))
                    policy.discard(outside[-1])
                elif outside and step in {"add", "hit", "used"}:
                    entry = outside[number % len(outside)]
                    getattr(policy, step)(entry)
                    if step == "add":
                        outside.remove(entry)
                        inside.append(entry)
                assert len(policy) == len(inside)
            assert {*map(id, drain(policy))} == {*map(id, inside)}

        run()
