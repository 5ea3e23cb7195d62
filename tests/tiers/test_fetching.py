"""Blocks that are fetched back before their conversations return: which, when, and what if not."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from fetch_bench import (
    FAST,
    LATER,
    NEVER,
    PAGE,
    SIZE,
    SPACE,
    AtOnce,
    Clock,
    Simulated,
    ask,
    memory,
    talk,
    tell,
)  # fmt: skip
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tier_bench import SHORT, Bench, settle, until

from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.eviction import POLICIES
from kvkeep.store.tiers import (
    Chain,
    Exclusive,
    Inclusive,
    PassThrough,
    TenantWeights,
    TieredStore,
    open_tiers,
)

if TYPE_CHECKING:
    from faults import FaultyBackend
    from kvkeep.core.returns import Ended, Wait
    from kvkeep.store.tiers import TieringPolicy


@pytest.mark.parametrize("tiering", [Inclusive, Exclusive])
def test_what_is_worth_more_than_the_victims_comes_back(tiering: type[TieringPolicy]) -> None:
    tiers = Simulated(12, tiering())
    tiers.teach()
    mine = talk(1, 6)
    tiers.request(mine, LATER)
    for number in range(2, 8):
        tiers.request(talk(number, 4), FAST)  # worth more than an answer, at first
    assert tiers.memory.leading(mine.blocks) < 6
    tiers.clock.now += 50  # tools would have returned long ago
    while tiers.tiers.fetch_due <= tiers.clock.now:
        tiers.tiers.fetch_back()
    assert tiers.memory.leading(mine.blocks) == 6
    fetched, hits, evicted = tiers.counts()
    assert fetched > 0
    assert hits == evicted == 0
    assert tiers.request(talk(1, 7), FAST) == [6, 0], "read from memory"
    assert tiers.counts()[1] == fetched


def test_tenants_with_shares_get_their_blocks_back() -> None:
    tiers = Simulated(12, Inclusive(), shares=TenantWeights({}))
    tiers.teach()
    mine = talk(1, 6)
    tiers.request(mine, LATER)
    for number in range(2, 8):
        tiers.request(talk(number, 4), FAST)
    assert tiers.memory.leading(mine.blocks) < 6
    tiers.clock.now += 50
    while tiers.tiers.fetch_due <= tiers.clock.now:
        tiers.tiers.fetch_back()
    assert tiers.memory.leading(mine.blocks) == 6


@pytest.mark.parametrize("shares", [None, TenantWeights({})])
def test_a_full_quota_trades_no_blocks_of_equal_worth(
    bench: Bench, clock: Clock, shares: TenantWeights | None
) -> None:
    below = bench.spec(bench.memory(4000), policy=POLICIES["returns"])
    store = bench.store(memory(100), below, policy=Inclusive(), shares=shares)
    store.returns.noted = lambda: None  # rounds begin here
    back = store._reader.fetch_back
    assert back is not None
    store.memory.catalogue.set_quota(SPACE, 8 * PAGE)
    for number in range(1, 4):
        ask(store, talk(number, 4), LATER)
    settle(store)
    assert store.memory.catalogue.spaces()[SPACE] <= 8 * PAGE
    for _ in range(5):
        clock.now += 10
        assert back.fetch_back() == 0


def test_a_conversation_that_cannot_be_fetched_stops_no_other() -> None:
    tiers = Simulated(16, Inclusive())
    tiers.teach()
    stuck, mine = talk(1, 5), talk(2, 5)
    for one in (mine, stuck):
        tiers.request(one, LATER)
    for number in range(3, 9):
        tiers.request(talk(number, 4), FAST)
    tiers.clock.now += 50
    moves = tiers.tiers._fetches
    assert moves is not None
    fetch = moves.fetch
    moves.fetch = lambda block, level, size: (  # type: ignore[method-assign]
        block not in stuck.blocks and fetch(block, level, size)
    )
    assert moves.fetch_back() > 0
    assert tiers.memory.leading(mine.blocks) == 5
    assert tiers.memory.leading(stuck.blocks) < 5
    assert moves.fetches.due <= tiers.clock.now + 1.0


@pytest.mark.parametrize("off", ["policy", "argument", "one level", "tiering"])
def test_nothing_is_planned_where_it_is_of_no_use(off: str) -> None:
    levels = [Level("memory", 4, "lru" if off == "policy" else "returns"), Level("d", 9, "returns")]
    levels = levels[:1] if off == "one level" else levels
    policy = PassThrough() if off == "tiering" else Inclusive()
    tiers = TierSimulator(levels, policy, Clock(), fetch_back=off != "argument")
    one = talk(1, 6)
    tiers.put(list(one.blocks))
    tiers.returns.ended(one, one.tokens, FAST, "a")
    if off == "tiering":
        assert tiers.fetch_back() == 0
    else:
        assert tiers.returns.fetches is None
        assert tiers.fetch_due == math.inf


def test_a_block_of_unknown_size_is_as_large_as_those_of_its_prompt() -> None:
    tiers = Simulated(8, Inclusive())
    fetches = tiers.tiers.returns.fetches
    assert fetches is not None
    one = talk(1, 4)
    tiers.tiers.put(list(one.blocks))
    for sizes, begun in [
        ([1, 1, 1, 1], 4),
        ([None, 7, None, 7], 4),
        ([7, 8, None, 7], 2),
        ([None, 8, 7, 7], 0),
        ([None] * 4, None),
    ]:
        wait = tiers.tiers.returns.conversations.ended(one, one.tokens, FAST, "a")[0]
        fetches.begin(wait, one.blocks, sizes)
        known = fetches._known.get(wait)
        assert (None if known is None else len(known.blocks)) == begun
        wait.over = True
        fetches.plan(tiers.memory, tiers.tiers.level_of)
        assert len(fetches) == fetches._blocks == 0


def test_the_memory_of_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Simulated(100, Inclusive())
    fetches = tiers.tiers.returns.fetches
    assert fetches is not None
    monkeypatch.setattr("kvkeep.store.tiers.fetching._MOST", 10)
    monkeypatch.setattr("kvkeep.store.tiers.fetching._MOST_BLOCKS", 24)
    for number in range(1000, 1030):
        tiers.request(talk(number, 1), FAST)
    assert len(fetches) == fetches._blocks == 10
    for number in range(2000, 2030):
        tiers.request(talk(number, 5), FAST)
    assert len(fetches) == 4
    assert fetches._blocks == 20
    for number in range(2026, 2030):  # the latest ones are known: they return
        tiers.request(talk(number, 6), NEVER)
    fetches.plan(tiers.memory, tiers.tiers.level_of)
    assert len(fetches) == 4


class Fetching(RuleBasedStateMachine):
    """Against the definition: what is fetched, in which order, and what is left."""

    tiering: TieringPolicy = Inclusive()

    def __init__(self) -> None:
        super().__init__()
        self.simulated = Simulated(16, type(self).tiering)
        self.simulated.teach()
        self.tiers = self.simulated.tiers
        self.waiting: dict[int, tuple[Chain, Wait]] = {}
        self.unused = itertools.count(1000)
        self.names = {number: next(self.unused) for number in range(10)}
        self.moved: list[bytes] = []
        promote = self.tiers.promote

        def noted(block: bytes, level: int) -> bool:
            self.moved.append(block)
            return promote(block, level)

        self.tiers.promote = noted  # type: ignore[method-assign]

    @rule(
        number=st.integers(0, 9),
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
        self.simulated.request(one, ended)
        wait = next(reversed(self.tiers.returns.conversations._known)).wait
        self.waiting[number] = one, wait

    def all_blocks(self) -> set[bytes]:
        return {block for one in self.tiers._levels for block in one.catalogue.blocks()}

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0, 90.0, 1000.0]))
    def later(self, seconds: float) -> None:
        self.simulated.clock.now += seconds

    @rule()
    def fetch_back(self) -> None:
        waits, memory = self.tiers.returns.waits, self.simulated.memory
        assert waits is not None
        there = self.all_blocks()
        least = -1.0 if self.tiers.has_room(1) else memory.waiting.least()
        here = {b for one, _ in self.waiting.values() for b in one.blocks if b in memory}
        self.moved.clear()
        self.tiers.fetch_back()
        worths: list[float] = []
        at: dict[int, int] = {}  # where a conversation's last block was
        for block in self.moved:
            number, one, wait = next(
                (number, one, wait)
                for number, (one, wait) in self.waiting.items()
                if block in one.blocks
            )
            assert not wait.over
            assert block not in here
            assert at.get(number, -1) < one.blocks.index(block)
            at[number] = one.blocks.index(block)
            worths.append(waits.worth(wait))
            assert worths[-1] > 2 * max(0.0, least)
        assert worths == sorted(worths, reverse=True)
        if isinstance(self.tiers.planner.policy, Exclusive):
            assert there == self.all_blocks(), "nothing is lost"
        # What is left in tiers alone is not worth the next victim.
        bar = 0.0 if self.tiers.has_room(1) else 2 * max(0.0, memory.waiting.least())
        for one, wait in self.waiting.values():
            levels = [self.tiers.level_of(block) for block in one.blocks]
            whole = levels.index(None) if None in levels else len(levels)
            if not wait.over and any(levels[:whole]):
                assert waits.worth(wait) <= bar
        assert self.tiers.fetch_due >= self.simulated.clock.now + 1

    @invariant()
    def books_agree(self) -> None:
        self.tiers.check()
        fetched, hits, evicted = self.simulated.counts()
        blocks = self.simulated.memory._table.blocks.values()
        assert fetched == hits + evicted + sum(block.fetched for block in blocks)


class FetchingExclusive(Fetching):
    tiering = Exclusive()


TestFetching = Fetching.TestCase
TestFetchingExclusive = FetchingExclusive.TestCase
TestFetching.settings = TestFetchingExclusive.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None
)


# --- a real store ----------------------------------------------------------------------------


@pytest.mark.parametrize("tiering", [Inclusive, Exclusive])
@pytest.mark.parametrize("seed", range(2))
def test_a_store_fetches_what_the_simulation_fetches(
    bench: Bench, clock: Clock, tiering: type[TieringPolicy], seed: int
) -> None:
    below = 4000  # nothing is lost, so a request stores one block; several may go in another order
    real = bench.store(
        memory(40), bench.spec(bench.memory(below), policy=POLICIES["returns"]), policy=tiering()
    )
    for tier in real.tiers:
        tier.reading.close(1.0)
        tier.reading, tier.writing = AtOnce(), AtOnce()
    back, simulated = real._reader.fetch_back, Simulated(40, tiering(), below, clock, ahead=True)
    assert back is not None
    real.returns.noted = lambda: None  # rounds begin below
    chance, fetched = random.Random(seed), 0
    simulated.tiers.late = True
    talks: list[list[int]] = []
    for number in range(160):
        clock.now += chance.choice((1.0, 5.0, 30.0, 100.0))
        # Those return that are in memory: what a request reads from below has tests of its own.
        known = [one for one in talks if simulated.memory.leading(talk(*one).blocks) == one[1]]
        one = chance.choice(known) if known and chance.random() < 0.8 else [number, 0]
        talks += [one] if not one[1] else []
        one[1] += 1
        sources = ask(real, talk(*one), ended := chance.choice((FAST, LATER, NEVER)))
        assert simulated.request(talk(*one), ended) == [len(sources), 0]
        clock.now += chance.choice((1.0, 10.0))
        count = simulated.tiers.fetch_back()
        assert back.fetch_back() == count
        back.write_ahead()
        fetched += count
        for level, there in enumerate((real.memory, *real.tiers)):
            mine = simulated.tiers._levels[level].catalogue.blocks()
            assert set(mine) == set(there.catalogue.blocks())
    assert fetched > 10
    counts = real.memory.stats().counters
    assert (counts["fetched"], counts["fetched_hits"], counts["fetched_evicted"]) == (
        simulated.counts()
    )
    assert counts["written_ahead"] == simulated.tiers.stats()[0].written_ahead
    assert (counts["written_ahead"] > 10) == (tiering is Exclusive)
    simulated.tiers.check()


LONG = 20.0
"""Seconds that nobody waits for."""


def crowded(bench: Bench, clock: Clock, place: FaultyBackend, **more: Any) -> TieredStore:
    """A store whose memory lacks a conversation that is worth more than what it has."""
    spec = bench.spec(place, policy=POLICIES["returns"], **more)
    store = bench.store(memory(12), spec)
    noted, store.returns.noted = store.returns.noted, lambda: None
    Simulated(12, Inclusive(), clock=clock).teach(partial(tell, store))
    ask(store, talk(1, 6), LATER)
    for number in range(2, 8):
        ask(store, talk(number, 4), FAST)
    settle(store)
    clock.now += 50
    assert store.memory.catalogue.leading(talk(1, 6).blocks) < 6  # type: ignore[attr-defined]
    store.returns.noted = noted
    return store


def leading(store: TieredStore) -> int:
    return store.memory.catalogue.leading(talk(1, 6).blocks)


def test_a_conversation_is_in_memory_when_it_returns(bench: Bench, clock: Clock) -> None:
    store = crowded(bench, clock, bench.disk())
    store.returns.noted()
    until(lambda: leading(store) == 6)
    until(lambda: store.idle)
    before = store.memory.stats().counters
    assert before["fetched"] > 0
    assert ask(store, talk(1, 7), FAST) == ["memory"] * 6
    counts = store.memory.stats().counters
    assert counts["fetched_hits"] == counts["fetched"] == before["fetched"]


def test_a_round_begins_by_itself_when_waits_grow_older(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("kvkeep.store.tiers.fetch_back.PAUSE", 0.01)
    monkeypatch.setattr("kvkeep.store.tiers.fetching.PAUSE", 0.01)
    store = crowded(bench, clock, bench.disk())
    back = store._reader.fetch_back
    assert back is not None
    clock.now -= 50  # not yet
    store.returns.noted()
    until(lambda: back.fetches.due < math.inf)
    rounds: list[float] = []
    plan = back.fetches.plan

    def counted(*args: Any) -> Any:
        rounds.append(clock.now)
        return plan(*args)

    monkeypatch.setattr(back.fetches, "plan", counted)
    time.sleep(0.1)
    assert len(rounds) < 3, "no busy loop while the clock stands still"


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_requests_never_wait_for_a_fetch_that_hangs(
    bench: Bench, clock: Clock, readers: int
) -> None:
    place = bench.disk()
    store = crowded(bench, clock, place, readers=readers, timeout=LONG)
    place.hang("get", times=1)
    store.returns.noted()
    if readers > 1:
        until(lambda: place.inside["get"])
    else:
        time.sleep(0.05)
        assert not place.inside["get"], "the only reader is left to requests"
    calls = place.calls["get"]
    other = talk(2, 4)  # on the disk alone, as far as memory lacks it
    place.heal("hang") if readers == 1 else None
    begun = time.monotonic()
    sources = ask(store, other, NEVER)
    took = time.monotonic() - begun
    assert len(sources) == 4
    assert readers == 1 or place.calls["get"] > calls or sources == ["memory"] * 4
    assert took < LONG / 4, "as long as the hanging call, at least, if it had waited"
    place.heal()


def test_a_fetch_leaves_a_reader_idle(bench: Bench, clock: Clock) -> None:
    place = bench.disk()
    store = crowded(bench, clock, place, readers=2)
    (tier,) = store.tiers
    busy = threading.Event()
    tier.reading.submit(lambda: busy.wait(10))
    store.returns.noted()
    time.sleep(0.1)
    assert not place.inside["get"]
    assert store.memory.stats().counters["fetched"] == 0
    busy.set()
    until(lambda: tier.reading.unfinished == 0)
    until(lambda: leading(store) == 6 or store._reader.fetch_back.idle)  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["fail", "flip", "truncate"])
def test_a_tier_that_fails_ends_the_round(bench: Bench, clock: Clock, fault: str) -> None:
    place = bench.disk()
    store = crowded(bench, clock, place)
    getattr(place, fault)(*["get"] * (fault == "fail"))
    store.returns.noted()
    until(lambda: store.tiers[0].stats().counters["errors" if fault == "fail" else "damaged"])
    until(lambda: store.idle)
    assert store.memory.stats().counters["fetched"] == 0


def test_close_ends_a_fetch_that_hangs(bench: Bench, clock: Clock) -> None:
    place = bench.disk()
    store = crowded(bench, clock, place, timeout=SHORT)
    place.hang("get", times=1)
    store.returns.noted()
    until(lambda: place.inside["get"])
    store.close(2.0)
    with pytest.raises(IllegalStep):
        store.locate(talk(1, 6).blocks)
    place.heal()
    back = store._reader.fetch_back
    assert back is not None
    assert back._thread is not None
    back._thread.join(10)
    assert not back._thread.is_alive()
    store.returns.noted()  # of a request that ends later


def test_a_removed_block_does_not_come_back(bench: Bench, clock: Clock) -> None:
    place = bench.disk()
    store = crowded(bench, clock, place)
    place.slow(0.2, "get")
    store.returns.noted()
    until(lambda: place.inside["get"])
    assert store.remove(talk(1, 6).blocks).complete
    until(lambda: store.idle)
    place.heal()
    assert store.locate(talk(1, 6).blocks) == []


def test_a_forked_process_fetches_nothing(bench: Bench, clock: Clock) -> None:
    store = crowded(bench, clock, bench.disk())
    store.returns.noted()
    until(lambda: leading(store) == 6)
    until(lambda: store.idle)
    child = os.fork()
    if not child:
        try:
            names = [one.name for one in threading.enumerate()]
            os._exit(any("fetch back" in name for name in names) or not store.close())
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(store, talk(1, 7), FAST) == ["memory"] * 6


def test_where_evicted_blocks_are_written_first_requests_keep_room(
    bench: Bench, clock: Clock
) -> None:
    place = bench.memory(4000)
    store = bench.store(
        memory(40), bench.spec(place, policy=POLICIES["returns"]), policy=Exclusive()
    )
    noted, store.returns.noted = store.returns.noted, lambda: None
    for number in range(1, 12):
        ask(store, talk(number, 9), LATER)
        clock.now += 3
    settle(store)
    before = store.memory.stats().counters["demotions_dropped"]
    place.slow(30.0, "put")  # what is to make room stays, while it is written
    clock.now += 100
    for number in range(1, 12):
        store.returns.ended(talk(number, 9), 9 * SIZE, FAST, "a")
    noted()
    time.sleep(0.2)
    until(lambda: store.idle or place.inside["put"])
    assert store.memory.backend.used() <= 38 * PAGE
    assert store.memory.stats().counters["demotions_dropped"] == before
    place.heal()


def test_it_can_be_switched_off(bench: Bench) -> None:
    for options, back in [
        ("policy=returns", True),
        ("policy=returns&fetch_back=yes", True),
        ("policy=returns&fetch_back=no", False),
        ("policy=lru", False),
        ("policy=lru&fetch_back=no", False),
    ]:
        front, below = open_tiers([f"memory://1MiB?{options}", "memory://2MiB"])
        store = TieredStore(front, below)
        assert (store._reader.fetch_back is not None) == back
        store.close()
    with pytest.raises(InvalidValue, match="policy=returns"):
        open_tiers(["memory://1MiB?fetch_back=yes"])
    with pytest.raises(InvalidValue, match="yes, no"):
        open_tiers(["memory://1MiB?policy=returns&fetch_back=never"])
