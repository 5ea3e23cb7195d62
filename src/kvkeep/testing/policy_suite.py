"""`PolicyTests`: one test for each sentence of the contract in `kvkeep.core.prefix.policy`."""

from __future__ import annotations

import random
from itertools import count, islice
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, OutOfPages
from kvkeep.core.eviction import Entry, EvictionPolicy

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence

__all__ = ["PolicyTests", "drain", "new_entry", "use"]

_MOMENTS = count(1)


def use(entry: Entry) -> Entry:
    """Count a use of an entry, as a tree does, and return it."""
    entry.last_used = next(_MOMENTS)
    return entry


def new_entry(size: int = 1, priority: int = 0) -> Entry:
    """Return an entry that was just stored."""
    entry = Entry()
    entry.size, entry.priority = size, priority
    return use(entry)


def drain(policy: EvictionPolicy) -> list[Entry]:
    """Pop all victims."""
    popped = []
    while (entry := policy.pop()) is not None:
        popped.append(entry)
    return popped


def _fill(policy: EvictionPolicy, number: int, size: int) -> list[Entry]:
    """Return entries that were added, used in a random pattern."""
    chance = random.Random(3)  # noqa: S311 - a test, not a secret
    entries = [new_entry(size, priority=chance.randrange(3)) for _ in range(number)]
    for _ in range(40):
        use(chance.choice(entries)).hits += 1
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
        entry = new_entry()
        policy.add(entry)
        assert isinstance(policy.describe(entry, entry.last_used), str)

    def test_a_new_policy_has_no_victim(self) -> None:
        """`pop` returns None, repeatedly."""
        policy = self.make_policy()
        assert len(policy) == 0
        assert policy.pop() is None
        assert policy.pop() is None
        assert len(policy) == 0

    def test_each_entry_is_popped_once(self) -> None:
        """Each added entry is popped exactly once; then there is no victim."""
        policy = self.make_policy()
        entries = [new_entry(size=1 + at % 3, priority=at % 4) for at in range(50)]
        for entry in entries[::2]:
            use(entry).hits += 1
        for at, entry in enumerate(entries, 1):
            policy.add(entry)
            assert len(policy) == at
        popped = drain(policy)
        assert len(popped) == len(set(map(id, popped))) == 50
        assert len(policy) == 0

    def test_a_discarded_entry_is_not_popped(self) -> None:
        """A discarded entry is not popped, and may be added again, repeatedly."""
        policy = self.make_policy()
        entries = [new_entry() for _ in range(20)]
        for _ in range(3):
            for entry in entries:
                policy.add(entry)
            for entry in entries[::3]:
                policy.discard(entry)
            assert len(policy) == 13
            popped = drain(policy)
            assert len(popped) == 13
            assert not {*map(id, popped)} & {*map(id, entries[::3])}

    def test_an_entry_put_back_goes_on(self) -> None:
        """A tree takes at least a page of a victim at a time, until all entries are evicted."""
        policy = self.make_policy()
        entries = _fill(policy, 30, size=7)
        taken = 0
        while (victim := policy.pop()) is not None:
            portion = policy.portion(victim, 3)
            assert 1 <= portion <= 3
            portion = min(portion, victim.size)
            taken += portion
            victim.size -= portion
            if victim.size:
                policy.put_back(victim)
        assert taken == 7 * len(entries)

    def test_an_entry_put_back_may_be_discarded(self) -> None:
        """The rest of a victim can be discarded, used and added like any other entry."""
        policy = self.make_policy()
        for priority in (0, 1):
            policy.add(new_entry(size=4, priority=priority))
        victim = policy.pop()
        assert victim is not None
        victim.size = 2
        policy.put_back(victim)
        policy.discard(victim)
        assert len(policy) == 1
        policy.add(use(victim))
        assert len(drain(policy)) == 2

    def test_a_short_hold_keeps_the_order(self) -> None:
        """A refused request discards the entries that it matched and adds them again."""

        def order(held: int | None) -> list[int]:
            policy = self.make_policy()
            entries = _fill(policy, 30, size=2)
            for entry in entries[::4]:
                policy.discard(entry)
                policy.add(use(entry))
            if held is not None:
                policy.discard(entries[held])
                policy.add(entries[held])
            numbers = {id(entry): number for number, entry in enumerate(entries)}
            return [numbers[id(entry)] for entry in drain(policy)]

        for held in range(30):
            assert order(held) == order(None), (
                "an entry was discarded and added again without a use, and lost its place; "
                "order equal entries by last_used"
            )

    def test_sizes_may_change_at_any_time(self) -> None:
        """A candidate loses its front when another prompt cuts it, and its tail when it gives."""
        policy = self.make_policy()
        entries = _fill(policy, 20, size=8)
        for entry in entries:
            entry.size, entry.depth = 3, entry.depth + 5
        for entry in entries[::2]:
            policy.discard(entry)
        assert {id(entry) for entry in drain(policy)} == {id(entry) for entry in entries[1::2]}

    def test_thousands_of_entries_in_any_order(self) -> None:
        """Entries are added, discarded, popped and put back; the policy always holds the rest."""
        policy = self.make_policy()
        chance = random.Random(1)  # noqa: S311 - a test, not a secret
        outside = [new_entry(size=1 + at % 7, priority=at % 5) for at in range(3000)]
        inside: dict[Entry, None] = {}
        for turn in range(20_000):
            roll = chance.random()
            if roll < 0.5 and outside:
                entry = use(outside.pop(chance.randrange(len(outside))))
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
            st.sampled_from(["new", "add", "add", "discard", "pop", "put_back"]),
            st.integers(0, 7),
        )

        @settings(max_examples=100, deadline=None)
        @given(st.lists(steps, max_size=40))
        def run(walk: list[tuple[str, int]]) -> None:
            policy = self.make_policy()
            outside: list[Entry] = []
            inside: list[Entry] = []
            for step, number in walk:
                if step == "new":
                    outside.append(new_entry(size=number + 1, priority=number % 3))
                elif step in {"pop", "put_back"}:
                    victim = policy.pop()
                    assert (victim is None) == (not inside)
                    if victim is not None and step == "put_back":
                        victim.size = max(1, victim.size - 1)
                        policy.put_back(victim)
                    elif victim is not None:
                        inside.remove(victim)
                        outside.append(victim)
                elif step == "discard" and inside:
                    outside.append(inside.pop(number % len(inside)))
                    policy.discard(outside[-1])
                elif outside and step == "add":
                    inside.append(use(outside.pop(number % len(outside))))
                    policy.add(inside[-1])
                assert len(policy) == len(inside)
            assert {*map(id, drain(policy))} == {*map(id, inside)}

        run()

    def test_a_cache_works_with_it(self) -> None:
        """Random requests of a small cache are served, and all that is counted agrees."""
        chance = random.Random(5)  # noqa: S311 - a test, not a secret
        cache = PagedCache(24, 2, eviction=self.make_policy())
        running: list[Sequence] = []
        for turn in range(600):
            prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 14))]
            try:
                if chance.random() < 0.6:
                    running.append(cache.open(prompt, priority=chance.randrange(3)))
                elif running:
                    sequence = running[chance.randrange(len(running))]
                    sequence.append(prompt[:3])
                    sequence.copies()
                    sequence.publish()
            except OutOfPages:
                pass
            while len(running) > 3:
                running.pop(chance.randrange(len(running))).close(keep=chance.random() < 0.9)
            if turn % 50 == 0:
                cache.check()
        for sequence in running:
            sequence.close()
        cache.evict(24)
        cache.check()
        assert cache.stats().pages_used == 0

    def test_it_serves_one_cache(self) -> None:
        """Its records belong to one cache: a second one refuses it."""
        policy = self.make_policy()
        PagedCache(4, eviction=policy)
        try:
            PagedCache(4, eviction=policy)
        except InvalidValue:
            return
        raise AssertionError("two caches with one policy")
