"""Tiers that come and go under a store in use, against a dict: found, or counted as left behind.

``KVKEEP_FUZZ=long`` searches longer.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tier_bench import Bench, checked, get, name, put, settle

from kvkeep.core.errors import IllegalStep
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers import Exclusive, Inclusive, PassThrough

LONG = os.environ.get("KVKEEP_FUZZ") == "long"
SECONDS = 60.0 if LONG else 2.5
BLOCKS = 24
MEMORY = 32
ROOM = 64  # blocks of a place: all of them fit, so no tier ever evicts

numbers = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True)


class Comings(RuleBasedStateMachine):
    """A store with memory that is emptied now and then, and up to three of five directories.

    ``must`` are the blocks that have to be found; ``may`` are those that a directory had when it
    was detached, and that were not removed since: they are found again once it is attached.
    """

    policy: Any = Inclusive

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.bench = Bench(Path(self._folder.name))
        self.store = self.bench.store(MEMORY, self.bench.disk(ROOM, "p0"), policy=self.policy())
        self.at = {self.store.tiers[0].name: 0}  # tier → number of its directory
        self.must: set[int] = set()
        self.may: set[int] = set()
        self.behind: dict[int, set[int]] = {}  # what directories that are not attached have

    @rule(some=numbers)
    def put(self, some: list[int]) -> None:
        written = put(self.store, some, wait=20)
        kept = [some[at] for at in (*written.kept, *written.already)]
        assert kept == some[: len(kept)] or sorted(kept) == sorted(some)
        assert len(kept) == len(some)
        self.must |= set(kept)

    @rule(some=numbers)
    def read(self, some: list[int]) -> None:
        count = get(self.store, some)  # which proves each byte
        assert {*some[:count]} <= self.must | self.may
        if count < len(some):
            assert some[count] not in self.must

    @rule()
    def memory_is_emptied(self) -> None:
        settle(self.store)
        self.store.memory.remove([name(number) for number in range(BLOCKS)])

    @rule(some=numbers)
    def remove(self, some: list[int]) -> None:
        assert self.store.remove([name(number) for number in some]).complete
        self.are_gone(set(some))

    @precondition(lambda self: self.behind)
    @rule()
    def clear(self) -> None:
        assert self.store.clear(name(0)[:SPACE_BYTES]).complete
        self.are_gone(set(range(BLOCKS)))

    def are_gone(self, some: set[int]) -> None:
        """Nowhere, not even in a directory that comes back later."""
        self.must -= some
        self.may -= some
        self.behind = {place: known - some for place, known in self.behind.items()}

    @precondition(lambda self: len(self.at) < 3)
    @rule(place=st.integers(0, 4), top=st.booleans())
    def attach(self, place: int, top: bool) -> None:
        spec = self.bench.spec(self.bench.disk(ROOM, f"p{place}"))
        below = self.store.memory.name if top else None
        if place in self.at.values():
            with pytest.raises(IllegalStep, match="attached already"):
                self.store.attach(spec, below)
            return
        self.at[self.store.attach(spec, below)] = place
        self.may |= self.behind.pop(place, set())

    @precondition(lambda self: len(self.at) > 1)
    @rule(which=st.integers(0, 2), move=st.booleans())
    def detach(self, which: int, move: bool) -> None:
        settle(self.store)
        tier = self.store.tiers[which % len(self.at)]
        known = {int.from_bytes(block[16:], "big") for block in tier.catalogue.blocks()}
        result = self.store.detach(tier.name, move=move, timeout=20)
        assert tier not in self.store.tiers
        self.behind[self.at.pop(tier.name)] = known
        self.may -= known  # unless another has them, which is no promise
        if move:
            assert result.left == 0
            return
        assert result.moved == 0
        elsewhere = {
            int.from_bytes(block[16:], "big")
            for other in self.store.tiers for block in other.catalogue.blocks()
        }  # fmt: skip
        assert result.left == len(known - elsewhere)
        self.must -= known - elsewhere
        self.may |= known  # in memory, or in another tier

    @rule()
    def flush(self) -> None:
        assert self.store.flush(20)

    @invariant()
    def the_names_are_those_of_the_tiers(self) -> None:
        assert [*self.store.names] == ["memory", *(tier.name for tier in self.store.tiers)]
        assert {tier.name for tier in self.store.tiers} == {*self.at}

    def teardown(self) -> None:
        settle(self.store)
        checked(self.store)
        self.bench.end()
        self._folder.cleanup()


class PassingComings(Comings):
    """With a policy under which reads do not fill memory."""

    policy = PassThrough


STEPS = settings(
    max_examples=200 if LONG else 15, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestComings = Comings.TestCase
TestComings.settings = STEPS
TestPassingComings = PassingComings.TestCase
TestPassingComings.settings = STEPS


# --- with threads ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _deadlocks_show_where():
    faulthandler.dump_traceback_later(4 * SECONDS + 120, exit=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_tiers_come_and_go_under_threads(bench, policy):
    """No wrong byte, no error, no wait without end; and at last all books agree."""
    store = bench.store(16, bench.disk(ROOM, "p0"), policy=policy())
    over = threading.Event()
    failed: list[BaseException] = []
    done = [0] * 4

    def use(number: int) -> None:
        chance = random.Random(number)
        try:
            while not over.is_set():
                begin = chance.randrange(40)
                some = range(begin, begin + chance.randrange(1, 8))
                match chance.randrange(5):
                    case 0 | 1:
                        put(store, some)
                    case 2 | 3:
                        get(store, some, deadline=chance.choice([None, 0.0, 1.0]))
                    case _:
                        blocks = [name(one) for one in some]
                        store.losses_of(blocks)
                        store.pins.pin(blocks[:1], 0.1)
                        store.stats()
                        if chance.random() < 0.2:
                            store.remove(blocks)
                done[number] += 1
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failed.append(error)
            over.set()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    chance = random.Random(9)
    places = {store.tiers[0].name: 0}
    changes = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not over.is_set():
        free = [number for number in range(4) if number not in places.values()]
        if len(places) == 1 or (free and chance.random() < 0.5):
            place = chance.choice(free)
            below = chance.choice([None, store.memory.name, chance.choice([*places])])
            attached = store.attach(bench.spec(bench.disk(ROOM, f"p{place}")), below)
            places[attached] = place
        else:
            leaving = chance.choice([*places])
            store.detach(leaving, move=chance.random() < 0.7, timeout=10)
            del places[leaving]
        changes += 1
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failed:
        raise failed[0]
    assert changes > 4
    assert min(done) > 10
    settle(store)
    assert store.flush(20)
    checked(store)


def test_a_tier_that_hangs_now_and_then_is_detached_and_attached_under_threads(bench):
    store = bench.store(16, bench.disk(ROOM, "steady"))
    over = threading.Event()
    failed: list[BaseException] = []

    def use(number: int) -> None:
        chance = random.Random(number)
        try:
            while not over.is_set():
                begin = chance.randrange(20)
                some = range(begin, begin + 4)
                (put if chance.random() < 0.5 else get)(store, some)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failed.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not failed:
        place = bench.disk(ROOM, "shaky")
        attached = store.attach(bench.spec(place, timeout=0.1), "memory")
        time.sleep(0.1)
        place.hang()
        began = time.monotonic()
        store.detach(attached, timeout=0.3)
        assert time.monotonic() - began < 20
        place.heal()
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failed:
        raise failed[0]
    settle(store)
    checked(store)
