"""Tiering that writes what pays: which blocks it writes, how many hits that keeps, and budgets."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest
from tier_bench import PAGE, Bench, get, name, put

from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.store.backends import WriteBudget
from kvkeep.store.tiers import Inclusive, ValuedTiering
from kvkeep.store.tiers.planner import Demote, Drop, Planner
from kvkeep.store.tiers.valued import BlockValues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers import TieringPolicy


def key(*numbers: int) -> bytes:
    return bytes(16) + blake2b(repr(numbers).encode(), digest_size=32).digest()


def prompts(seed: int, count: int) -> list[list[bytes]]:
    """Conversations that grow by a turn, among prompts that are never asked for again."""
    rng = random.Random(seed)
    turns: dict[int, int] = {}
    found = []
    for number in range(count):
        if rng.random() < 0.7:
            found.append([key(1, number, at) for at in range(4)])
            continue
        talk = rng.randrange(60)
        turns[talk] = turns.get(talk, 0) + 1
        found.append([key(0, talk, at) for at in range(2 + 2 * turns[talk] % 12)])
    return found


def replayed(
    policy: TieringPolicy,
    sizes: Sequence[int],
    count: int = 6000,
    writes: WriteBudget | None = None,
) -> tuple[int, int, TierSimulator]:
    now = [0.0]
    levels = [Level("memory", sizes[0]), Level("disk", sizes[1], writes=writes)]
    if isinstance(policy, ValuedTiering):
        policy.clock = lambda: now[0]
    simulator = TierSimulator(levels, policy, lambda: now[0])
    hits = 0
    for prompt in prompts(1, count):
        now[0] += 1.0
        hits += sum(simulator.request(prompt))
    simulator.check()
    return hits, simulator.stats()[1].writes, simulator


@pytest.mark.parametrize("sizes", [(60, 200), (100, 2000)])
def test_it_keeps_the_hits_with_half_the_writes(sizes: tuple[int, int]) -> None:
    hits, writes, _ = replayed(Inclusive(), sizes)
    fewer, written, _ = replayed(ValuedTiering(), sizes)
    assert fewer >= 0.95 * hits
    assert written <= 0.5 * writes


def test_a_kind_of_block_is_worth_what_such_blocks_were() -> None:
    values = BlockValues()
    often, never = (1, False, 2, 5), (0, True, 1, 5)
    assert values.worth(often) == values.worth(never) == 1
    for _ in range(100):
        values.left(often)
        values.left(never)
        values.came_back([often])
    assert values.hits(often) > 0.9
    assert values.hits(never) < 0.1
    assert values.worth(often) > 1.8
    assert values.worth(never) < 0.2
    worth = values.worth(often)
    values.fade()
    assert values.worth(often) == pytest.approx(worth, rel=0.1)


def test_of_average_blocks_whole_prompts_are_written_or_none() -> None:
    policy = ValuedTiering()
    policy.fit([10_000, 10_000])
    whole = 0
    for number in range(200):
        prompt = [key(number, at) for at in range(5)]
        policy.requested(prompt)
        policy.price = 2.5
        verdicts = {policy.pays(block, 1) for block in prompt[:-1]}
        assert len(verdicts) == 1
        whole += verdicts == {True}
    assert 50 < whole < 110


def test_until_blocks_are_read_again_all_are_written() -> None:
    policy = ValuedTiering()
    policy.fit([10, 10])
    for number in range(2000):
        policy.requested([key(number, at) for at in range(3)])
        assert policy.price == 0
        assert policy.pays(key(number, 2), 1)


def test_what_is_saved_stays_in_memory_and_does_not_count_as_gone() -> None:
    policy = ValuedTiering()
    planner = Planner(policy, 1)
    planner.requested([key(1)])
    planner.store([key(1)])
    assert planner.save(key(1)) == Demote(key(1), 0, 1)
    planner.requested([key(1)])
    assert policy._seen[key(1)].backs == 0
    assert planner.evict(key(1), 0) == Demote(key(1), 0, 1)
    planner.requested([key(1)])
    assert policy._seen[key(1)].backs == 1


@pytest.mark.parametrize(("price", "why"), [(8.0, "admission"), (0.0, "write budget")])
def test_a_refusal_says_whose_price_it_was(price: float, why: str) -> None:
    policy = ValuedTiering()
    planner = Planner(policy, 1)
    policy.attend(lambda _level: 1e9 if why == "write budget" else 0.0)
    policy.price = price * 1e9
    planner.requested([key(1)])
    planner.store([key(1)])
    assert planner.evict(key(1), 0) == Drop(key(1), 0, 1, why)


def test_memory_of_the_policy_is_bounded() -> None:
    policy = ValuedTiering()
    policy.fit([10, 10])
    for number in range(2000):
        policy.requested([key(number, at) for at in range(3)])
    assert len(policy._seen) <= 8 * 20
    assert all(len(trial.kept) <= trial.room for trial in policy._trials)


@pytest.mark.parametrize("a_hour", [120, 360, 720, 1200])
def test_a_replay_keeps_to_a_write_budget(a_hour: int) -> None:
    budget, count = WriteBudget(a_hour, 3600), 6000  # requests, one a second
    allowed = budget.burst + (budget.amount - budget.burst) * count / budget.seconds
    hits, writes, blind = replayed(Inclusive(), (60, 2000), count, budget)
    assert 0.9 * allowed < writes <= allowed
    assert blind.stats()[1].over_budget > 0
    more, written, valued = replayed(ValuedTiering(), (60, 2000), count, budget)
    assert written <= allowed
    assert valued.stats()[1].over_budget > 0
    if a_hour >= 720:  # else both write too little to learn from
        assert more > 1.3 * hits


def test_nothing_is_written_where_reading_saves_nothing() -> None:
    policy = ValuedTiering(saved=lambda level: 0.0 if level == 1 else 1.0)
    assert not policy.pays(key(1), 1)
    assert policy.pays(key(1), 2)


# --- in a store ------------------------------------------------------------------------------


def test_a_store_writes_when_blocks_leave_memory_and_what_is_left_at_a_flush(bench: Bench) -> None:
    store = bench.store(16, bench.spec(bench.disk()), policy=ValuedTiering())
    put(store, range(4))
    store.tiers[0].health.settled(5)
    assert store.tiers[0].counters.writes == 0
    assert store.flush(5)
    assert store.tiers[0].counters.writes == 4
    for number in range(10, 30):
        put(store, [number], wait=5)
    assert store.flush(5)
    assert store.tiers[0].counters.writes == 24
    assert get(store, range(4)) == 4


def test_what_a_budget_does_not_allow_is_counted_and_explained(bench: Bench) -> None:
    budget = WriteBudget(12 * 5 * PAGE, 86_400)
    store = bench.store(32, bench.spec(bench.disk(), writes=budget), policy=Inclusive())
    put(store, range(8), wait=5)
    tier = store.stats()[1]
    assert tier.budget is not None
    assert tier.budget["bytes"] == budget.amount
    assert tier.budget["written"] == 5 * PAGE
    assert tier.budget["left"] < PAGE
    assert (tier.counters["writes"], tier.counters["over_budget"], tier.counters["drops"]) == (
        5,
        3,
        3,
    )
    put(store, range(100, 132))
    losses = store.losses_of([name(number) for number in range(8)])
    whys = [loss and (loss.what, loss.detail) for loss in losses]
    assert whys.count(("dropped", "write budget")) >= 3


def test_a_block_is_charged_once_however_often_room_is_made_for_it(bench: Bench) -> None:
    budget = WriteBudget(12 * 100 * PAGE, 86_400)
    store = bench.store(32, bench.spec(bench.memory(8), writes=budget), policy=Inclusive())
    for number in range(24):
        put(store, [number], wait=5)
    tier = store.stats()[1]
    assert tier.budget is not None
    assert tier.counters["evictions"] >= 12
    assert tier.budget["written"] == tier.counters["written_bytes"]


def test_a_price_that_a_budget_makes_is_counted_and_explained(bench: Bench) -> None:
    policy = ValuedTiering()
    store = bench.store(8, bench.spec(bench.disk()), policy=policy)
    policy.attend(lambda _level: 1e9)
    put(store, range(4))
    put(store, range(10, 16))
    assert store.tiers[0].counters.over_budget >= 2
    assert store.tiers[0].counters.writes == 0
    losses = store.losses_of([name(number) for number in range(4)])
    assert ("refused", "write budget") in [loss and (loss.what, loss.detail) for loss in losses]
