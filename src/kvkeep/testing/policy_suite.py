"""`PolicyTests`: the contract of `kvkeep.core.eviction.base`, one sentence of it a test."""

from __future__ import annotations

import random
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.eviction import Entry, EvictionPolicy

__all__ = ["PolicyTests", "drain", "new_entry"]


def new_entry(policy: EvictionPolicy, size: int = 1, priority: int = 0) -> Entry:
    """An entry that was just stored."""
    entry = Entry()
    entry.size = size
    policy.stored(entry, priority)
    return entry


def drain(policy: EvictionPolicy) -> list[Entry]:
    """Pop until nothing is left."""
    popped = []
    while (entry := policy.pop()) is not None:
        popped.append(entry)
    return popped


def _fill(policy: EvictionPolicy, count: int, size: int) -> list[Entry]:
    """Entries that were used now and then, all of which may go."""
    chance = random.Random(3)  # noqa: S311 - a test, not a secret
    entries = [new_entry(policy, size, priority=chance.randrange(3)) for _ in range(count)]
    for _ in range(40):
        policy.hit(chance.choice(entries))
    for entry in entries:
        policy.add(entry)
    return entries


class PolicyTests:
    """Subclass it, fill in `make_policy`, and pytest runs all of it.

    It says nothing of which entry goes first: that is the policy's own, and its own tests'.
    """

    def make_policy(self) -> EvictionPolicy:
        """A new policy with no entries."""
        raise NotImplementedError("say how to make the policy that is to be tested")

    def test_it_has_a_name(self) -> None:
        """Its name and length are in its repr, and what it says of an entry is text."""
        policy = self.make_policy()
        assert policy.name
        assert policy.name in repr(policy)
        entry = new_entry(policy)
        assert isinstance(policy.describe(entry), str)
        policy.add(entry)
        assert isinstance(policy.describe(entry), str)

    def test_a_new_policy_has_no_victim(self) -> None:
        """Nothing was added: `pop` says None, again and again."""
        policy = self.make_policy()
        assert len(policy) == 0
        assert policy.pop() is None
        assert policy.pop() is None
        assert len(policy) == 0

    def test_events_have_an_order(self) -> None:
        """``last_used`` and ``stored`` count events, larger is later; `hit` counts ``hits``."""
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

    def test_what_grew_is_as_new_as_its_tail(self) -> None:
        """``stored`` and ``last_used`` are those of its last pages."""
        policy = self.make_policy()
        first, second = new_entry(policy), new_entry(policy)
        first.size += 2
        policy.grown(first)
        assert first.stored > second.stored
        assert first.last_used > second.last_used
        assert first.hits == 0

    def test_what_comes_back_has_a_hit(self) -> None:
        """What is stored and ``known`` was asked for before."""
        policy = self.make_policy()
        entry = Entry()
        entry.size = 1
        policy.stored(entry, 0, known=True)
        assert entry.hits == 1
        policy.add(entry)
        assert policy.pop() is entry

    def test_it_is_told_what_is_asked_for(self) -> None:
        """If it `remembers`, it knows the leading blocks that were asked for lately."""
        policy = self.make_policy()
        policy.fit(400, 4)
        keys = [number.to_bytes(32, "big") for number in range(1, 31)]
        first, second, other = keys[:10], keys[:5] + keys[10:15], keys[15:20]
        knows = 1 if policy.remembers else 0
        assert policy.requested([]) == 0
        assert policy.requested(first) == 0
        assert policy.requested(second) == 5 * knows
        assert policy.requested(other) == 0
        assert policy.requested(first) == 10 * knows
        assert policy.requested(second) == 10 * knows
        assert policy.requested([keys[29], *first]) == 0, "what leads is not known"

    def test_it_does_not_remember_for_ever(self) -> None:
        """What was asked for many memories ago is forgotten."""
        policy = self.make_policy()
        policy.fit(64, 4)
        for number in range(2000):
            policy.requested([number.to_bytes(32, "big")])
        assert policy.requested([bytes(32)]) == 0

    def test_an_entry_cut_in_two_is_as_old_as_it_was(self) -> None:
        """The front has the age and priority of the whole."""
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
        """The later use, the higher priority, the sum of hits."""
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

    def test_each_entry_goes_once(self) -> None:
        """Whatever was added is popped, exactly once; then there is no victim."""
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

    def test_what_is_discarded_does_not_go(self) -> None:
        """It may be added again later, as often as that happens."""
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

    def test_what_is_put_back_is_next(self) -> None:
        """An entry that lost its tail goes before all others, whatever its place was.

        A policy that takes in `portions` may have had enough of it; then another is next.
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

    def test_victims_go_in_portions(self) -> None:
        """As an index takes them: each time a page or more, until all are gone."""
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

    def test_what_is_put_back_may_be_discarded(self) -> None:
        """The rest of a victim is used again like any other entry."""
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

    def test_what_is_held_for_a_moment_keeps_its_place(self) -> None:
        """A request that is refused holds what it found and gives it back: no order changes."""

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
        """Between `discard` and `add` an entry is used, inherits, grows and is cut."""
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
        """Added, discarded, popped and put back: the policy always has just what is left."""
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
        """The same with steps that hypothesis chooses, so that a fault is shown in few of them."""
        steps = st.tuples(
            st.sampled_from(["stored", "add", "add", "discard", "pop", "put_back", "hit", "used"]),
            st.integers(0, 7),
        )

        @settings(max_examples=200, deadline=None)
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
