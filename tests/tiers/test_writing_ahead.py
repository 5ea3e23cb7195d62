"""Blocks that are written down before they have to leave memory: which, and what comes of it."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
from fetch_bench import FAST, LATER, NEVER, PAGE, SPACE, Simulated, ask, memory, talk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tier_bench import SHORT, settle, until

from kvkeep.core.eviction import POLICIES
from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from fetch_bench import Clock
    from tier_bench import Bench

    from faults import FaultyBackend
    from kvkeep.core.returns import Ended, Wait
    from kvkeep.store.tiers import Chain, TieredStore, TieringPolicy
    from kvkeep.store.tiers.fetch_back import FetchBack
    from kvkeep.store.tiers.planner import Copy


class Ahead(RuleBasedStateMachine):
    """Against the definition: what is written ahead, in which order, and what is left."""

    tiering: TieringPolicy = Exclusive()

    def __init__(self) -> None:
        super().__init__()
        self.simulated = Simulated(32, type(self).tiering)
        self.tiers = self.simulated.tiers
        self.waiting: dict[int, tuple[Chain, Wait]] = {}
        numbers = itertools.count(-1000)
        self.simulated.teach(lambda one, ended: self._request(next(numbers), one, ended))
        self.unused = itertools.count(1000)
        self.names = {number: next(self.unused) for number in range(8)}
        moves = self.tiers._fetches
        assert moves is not None
        self.moves = moves
        self.copied: list[bytes] = []
        copy = moves.copy

        def noted(move: Copy) -> bool:
            self.copied.append(move.block)
            return copy(move)

        moves.copy = noted  # type: ignore[method-assign]

    @rule(
        number=st.integers(0, 7),
        more=st.integers(1, 6),
        ended=st.sampled_from([FAST, LATER, NEVER]),
    )
    def request(self, number: int, more: int, ended: Ended) -> None:
        before = self.waiting.get(number)
        if more == 6:  # it never returns: another one begins
            if before is not None:
                self.waiting[self.names[number]] = self.waiting.pop(number)
            self.names[number] = next(self.unused)
            before = None
        one = talk(self.names[number], (0 if before is None else len(before[0].blocks)) + more)
        self._request(number, one, ended)

    def _request(self, number: int, one: Chain, ended: Ended) -> None:
        self.simulated.request(one, ended)
        wait = next(reversed(self.tiers.returns.conversations._known)).wait
        self.waiting[number] = one, wait

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0, 90.0, 1000.0]))
    def later(self, seconds: float) -> None:
        self.simulated.clock.now += seconds

    @rule(number=st.integers(0, 7), seconds=st.sampled_from([1.0, 50.0]))
    def pin(self, number: int, seconds: float) -> None:
        if number in self.waiting:
            self.simulated.memory.pin(self.waiting[number][0].blocks, seconds, 8)

    @rule()
    def fetch_back(self) -> None:
        self.moves.fetch_back()

    @rule()
    def write_ahead(self) -> None:
        memory, tiers, waits = self.simulated.memory, self.tiers, self.tiers.returns.waits
        assert waits is not None
        below = tiers._levels[1].catalogue
        full, least = not tiers.has_room(3), memory.waiting.least()
        bar = 2 * max(0.0, least or 0.0)
        here, there = memory.blocks(), set(below.blocks())
        alone = set(here) - there
        self.copied.clear()
        count = self.moves.write_ahead()
        assert count == len(self.copied)
        assert set(memory.blocks()) == set(here), "all stays in memory"
        left = there - set(below.blocks())
        assert left <= set(here), "no only copy is deleted"
        assert set(below.blocks()) == (there - left) | set(self.copied)
        if not full or least is None or isinstance(tiers.planner.policy, Inclusive):
            assert not self.copied
            assert not left
            return
        for block, level in self.moves._ahead.items():
            # With room below for all, a copy stays there until it is moved out.
            assert block in self.tiers._levels[level].catalogue
        for block in left:
            assert waits.worth(waits.best(block)[0]) > 2 * bar  # type: ignore[arg-type]
        worths: list[float] = []
        at: dict[int, int] = {}
        for block in self.copied:
            assert block in alone
            assert memory._table.blocks[block].evictable
            assert self._worth(block) <= bar
            number, one, wait = next(
                (number, one, wait)
                for number, (one, wait) in self.waiting.items()
                if not wait.over and block in one.blocks
            )
            assert one.blocks.index(block) < at.get(number, len(one.blocks))
            at[number] = one.blocks.index(block)
            worths.append(waits.worth(wait))
        assert worths == sorted(worths)
        assert len(self.moves._ahead) <= max(len(here) // 4 + 1, len(self.moves._ahead) - count)
        if len(self.moves._ahead) < len(here) // 4:  # what is left does not go next
            for one, wait in self.waiting.values():
                for block in one.blocks[: memory.leading(one.blocks)]:
                    go = not wait.over and waits.worth(wait) <= bar and self._worth(block) <= bar
                    if go and memory._table.blocks[block].evictable:
                        assert block in below

    def _worth(self, block: bytes) -> float:
        waits = self.tiers.returns.waits
        assert waits is not None
        wait, _ = waits.best(block)
        return 0.0 if wait is None else waits.worth(wait)

    @invariant()
    def books_agree(self) -> None:
        self.tiers.check()


class AheadInclusive(Ahead):
    tiering = Inclusive()


TestAhead = Ahead.TestCase
TestAheadInclusive = AheadInclusive.TestCase
TestAhead.settings = TestAheadInclusive.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None
)


def test_what_a_tier_does_not_admit_is_not_written() -> None:
    tiers = Simulated(32, Exclusive(admit_after=2))
    for number in range(8):
        tiers.request(talk(number, 4), LATER)
    assert tiers.tiers._fetches is not None
    assert tiers.tiers._fetches.write_ahead() == 0
    tiers.request(talk(0, 4), LATER)  # touched twice now
    tiers.clock.now += 1000
    assert tiers.tiers._fetches.write_ahead() == 4


# --- a real store ----------------------------------------------------------------------------


def full(
    bench: Bench, place: FaultyBackend, tiering: TieringPolicy | None = None, **more: Any
) -> tuple[TieredStore, FetchBack]:
    """A store whose memory of 40 blocks has four conversations of nine, of equal worth."""
    spec = bench.spec(place, policy=POLICIES["returns"], **more)
    store = bench.store(memory(40), spec, policy=tiering or Exclusive())
    store.returns.noted = lambda: None  # rounds begin in the tests
    back = store._reader.fetch_back
    assert back is not None
    for number in range(4):
        ask(store, talk(number, 9), LATER)
    settle(store)
    return store, back


def counts(store: TieredStore) -> dict[str, float]:
    return store.memory.stats().counters


def below(store: TieredStore) -> set[bytes]:
    return set(store.tiers[0].catalogue.blocks())


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_written_ahead_leaves_at_once(bench: Bench, clock: Clock, ahead: bool) -> None:
    place = bench.memory(4000)
    store, back = full(bench, place, timeout=30.0)
    clock.now += 1000
    assert counts(store)["evictions"] == 0
    if ahead:
        assert back.write_ahead() == counts(store)["written_ahead"] == 9
        assert len(set(store.memory.catalogue.blocks()) & below(store)) == 9, "they stay"
    place.hang("put")
    new = talk(10, 6)
    ask(store, new, FAST, wait=0.5)
    left = [one for number in range(4) for one in talk(number, 9).blocks if not store.knows(one)]
    assert bool(left) == (not ahead) or counts(store)["demotions_dropped"] == 0
    if ahead:
        assert counts(store)["demotions_dropped"] == 0
        assert counts(store)["evictions"] >= 6
        assert place.inside["put"] == 0, "nothing waits for the tier"
    else:
        until(lambda: place.inside["put"] > 0)
    place.heal()


def test_fewer_blocks_are_lost_with_a_slow_tier(bench: Bench, clock: Clock) -> None:
    lost: list[float] = []
    found: list[int] = []
    for ahead in (False, True):
        place = bench.memory(4000)
        store, back = full(bench, place, timeout=30.0, writers=1)
        for number in range(10, 14):
            clock.now += 1000
            if ahead:
                assert back.write_ahead() > 0
            place.slow(0.02, "put")
            ask(store, talk(number, 12), LATER)
            place.heal()
            settle(store)
        lost.append(counts(store)["demotions_dropped"])
        talks = [talk(number, 9) for number in range(4)]
        talks += [talk(number, 12) for number in range(10, 14)]
        found.append(sum(len(store.locate(one.blocks)) for one in talks))
        gone = sum(not store.knows(block) for one in talks for block in one.blocks)
        assert gone == lost[-1], "every loss is counted"
    assert lost[1] < lost[0]
    assert found[1] > found[0]


def test_a_tier_has_a_block_no_longer_once_its_conversation_is_back(
    bench: Bench, clock: Clock
) -> None:
    store, back = full(bench, bench.memory(4000))
    clock.now += 1000
    back.write_ahead()
    (number,) = {n for n in range(4) if below(store) & set(talk(n, 9).blocks)}
    assert below(store) == set(talk(number, 9).blocks)
    assert ask(store, talk(number, 10), FAST) == ["memory"] * 9
    settle(store)
    back.write_ahead()
    settle(store)
    assert not below(store) & set(talk(number, 9).blocks), "exclusive"
    assert ask(store, talk(number, 11), FAST) == ["memory"] * 10
    assert counts(store)["demotions_dropped"] == 0


def test_nothing_is_written_where_nothing_has_to(bench: Bench, clock: Clock) -> None:
    store, back = full(bench, bench.memory(4000), Inclusive())
    clock.now += 1000
    writes = store.tiers[0].counters.writes
    assert back.write_ahead() == 0
    assert store.tiers[0].counters.writes == writes
    half = bench.store(
        memory(80), bench.spec(bench.memory(400), policy=POLICIES["returns"]), policy=Exclusive()
    )
    half.returns.noted = lambda: None
    for number in range(4):
        ask(half, talk(number, 9), LATER)
    clock.now += 1000
    assert half._reader.fetch_back is not None
    assert half._reader.fetch_back.write_ahead() == 0, "there is room"


@pytest.mark.parametrize("trouble", ["fails", "is busy"])
def test_a_tier_in_trouble_ends_the_round(bench: Bench, clock: Clock, trouble: str) -> None:
    place = bench.memory(4000)
    store, back = full(bench, place)
    clock.now += 1000
    busy = threading.Event()
    if trouble == "fails":
        place.fail("put")
    else:
        for _ in range(2):
            store.tiers[0].writing.submit(lambda: busy.wait(10))
    assert back.write_ahead() == counts(store)["written_ahead"] == 0
    assert store.tiers[0].counters.errors == (trouble == "fails")
    assert back.fetches.left() <= 1.0, "again soon"
    busy.set()
    place.heal()
    assert all(len(store.locate(talk(number, 9).blocks)) == 9 for number in range(4))


@pytest.mark.parametrize("how", ["remove", "clear", "supersede"])
def test_what_is_removed_during_a_write_does_not_come_back(
    bench: Bench, clock: Clock, how: str
) -> None:
    place = bench.memory(4000)
    store, back = full(bench, place)
    clock.now += 1000
    place.slow(0.2, "put")
    writing = threading.Thread(target=back.write_ahead)
    writing.start()
    until(lambda: place.inside["put"])
    blocks = [block for number in range(4) for block in talk(number, 9).blocks]
    removed = store.clear(SPACE) if how == "clear" else getattr(store, how)(blocks)
    assert removed.complete
    place.heal()
    writing.join(10)
    assert not writing.is_alive()
    settle(store)
    assert not any(store.knows(block) for block in blocks)
    assert not list(place.inner.list())
    ask(store, talk(0, 9), LATER)  # the bytes that are read then are proven
    assert ask(store, talk(0, 10), LATER) == ["memory"] * 9


def test_what_leaves_during_its_write_is_not_lost(bench: Bench, clock: Clock) -> None:
    place = bench.memory(4000)
    store, back = full(bench, place, timeout=30.0)
    clock.now += 1000
    place.hang("put")
    writing = threading.Thread(target=back.write_ahead)
    writing.start()
    until(lambda: place.inside["put"])
    victims = store.memory.catalogue.victims(1)  # type: ignore[attr-defined]
    store.memory.backend.delete(victims)  # type: ignore[attr-defined]
    for block in victims:
        store._evicted_from_memory(block)
    assert not any(store.knows(block) for block in victims)
    place.heal()
    writing.join(10)
    settle(store)
    assert all(store.knows(block) for block in victims)
    assert counts(store)["demotions"] == 1
    assert counts(store)["demotions_dropped"] == 0


@pytest.mark.parametrize("how", ["remove", "clear", "supersede"])
def test_both_copies_are_removed(bench: Bench, clock: Clock, how: str) -> None:
    store, back = full(bench, bench.memory(4000))
    clock.now += 1000
    assert back.write_ahead() == 9
    blocks = [block for number in range(4) for block in talk(number, 9).blocks]
    removed = store.clear(SPACE) if how == "clear" else getattr(store, how)(blocks)
    assert removed.complete
    assert not any(store.knows(block) for block in blocks)
    assert not below(store)
    back.write_ahead()
    ask(store, talk(0, 9), LATER)
    assert ask(store, talk(0, 10), LATER) == ["memory"] * 9


def test_pins_and_quotas_hold(bench: Bench, clock: Clock) -> None:
    store, back = full(bench, bench.memory(4000))
    clock.now += 1000
    pinned = talk(0, 9).blocks
    assert store.pins.pin(pinned, 1e6) == 9
    back.write_ahead()
    assert not below(store) & set(pinned)
    store.set_quota(SPACE, 20 * PAGE)
    for number in range(20, 26):
        ask(store, talk(number, 6), LATER)
        clock.now += 1000
        back.write_ahead()
        settle(store)
        store.check()
    for tier in (store.memory, store.tiers[0]):
        assert tier.catalogue.spaces().get(SPACE, 0) <= 20 * PAGE
    assert ask(store, talk(0, 9), LATER)[:1] == ["memory"]


def test_close_ends_a_write_that_hangs(bench: Bench, clock: Clock) -> None:
    place = bench.memory(4000)
    store, back = full(bench, place, timeout=SHORT)
    clock.now += 1000
    place.hang("put")
    store.memory.counters.count(demotions_dropped=1)
    back.wake()
    until(lambda: place.inside["put"])
    assert not store.close(2.0), "what memory had is not in the tier"
    place.heal()
    assert back.join(10)


def test_without_drops_nothing_is_written_ahead(bench: Bench, clock: Clock) -> None:
    store, back = full(bench, bench.memory(4000))
    clock.now += 1000
    rounds = itertools.count(1)
    fetch_back, done = back.fetch_back, [0]

    def counted() -> int:
        done[0] = next(rounds)
        return fetch_back()

    back.fetch_back = counted  # type: ignore[method-assign]
    back.wake()
    until(lambda: done[0] == 1 and back.idle)
    assert counts(store)["written_ahead"] == 0
    store.memory.counters.count(demotions_dropped=1)
    back.wake()
    until(lambda: counts(store)["written_ahead"] == 9)


def test_it_is_switched_off_with_the_fetches(bench: Bench) -> None:
    front = memory(40, fetch_back=False)
    store = bench.store(front, bench.spec(bench.memory(99)), policy=Exclusive())
    assert store._reader.fetch_back is None
