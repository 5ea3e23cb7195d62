"""`simulate_shares`: hits of tenants that share memory or tiers, beside what each has alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from replaying import Chained, Listed, request

from kvkeep.bench.replay import (
    ReplayRun,
    Workload,
    replay,
    simulate,
    simulate_shares,
    simulate_tier_shares,
    simulate_tiers,
)
from kvkeep.bench.traces import TraceRequest, generate
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

UNIT = 4


def traffic(seed: int) -> list[TraceRequest]:
    """Requests of three tenants that extend earlier ones, some with answers."""
    chance = random.Random(seed)
    chained = Chained()
    talks: dict[str, list[list[object]]] = {}
    made = []
    for second in range(300):
        tenant = chance.choice(("", "a", "b"))
        mine = talks.setdefault(tenant, [])
        path = [*chance.choice(mine)] if mine and chance.random() < 0.7 else [tenant, second]
        path += range(1 + chance.randrange(6))
        answer = [*path, "said"] if chance.random() < 0.3 else path
        mine.append(answer)
        ids = chained.ids(answer)
        one = request(float(second), ids[: len(path)], unit=UNIT, namespace=tenant)
        said = np.array(ids[len(path) :], np.int64)
        made.append(replace(one, answer=said) if len(said) else one)
    return made


def cut(one: TraceRequest, most: int) -> TraceRequest:
    if len(one.units) <= most:
        return one
    return replace(one, units=one.units[:most], tokens=most * UNIT, answer=None)


@pytest.mark.parametrize("seed", range(3))
def test_alone_is_a_replay_of_its_own_requests(seed: int) -> None:
    requests = traffic(seed)
    work = Workload.read(Listed(requests, UNIT))
    capacity, shares = 60 * UNIT, {"a": 2.0, "b": 0.5}
    found = simulate_shares(work, capacity, "lru", shares=shares)
    assert set(found.shares) == {"", "a", "b"}
    assert found.policy == "lru+shares"
    for tenant, (weight, tokens, hits, alone) in found.shares.items():
        own = [one for one in requests if one.namespace == tenant]
        assert weight == shares.get(tenant, 1.0)
        assert tokens == sum(one.tokens for one in own)
        share = int(capacity * weight / 3.5)
        listed = Listed([cut(one, share // UNIT) for one in own], UNIT)
        assert alone == simulate(Workload.read(listed), share, "lru").hit_tokens
        assert 0 < hits <= tokens
    assert sum(hits for _, _, hits, _ in found.shares.values()) == found.hit_tokens


def test_the_requests_of_one_tenant_alone_are_another_workload() -> None:
    work = Workload.read(Listed(traffic(1), UNIT))
    number = work.namespaces.index("a")
    mine = work.only(number, 10**6)
    which = [at for at in range(len(work)) if work.namespace[at] == number]
    assert mine.namespaces == ("a",)
    assert mine.digest not in {work.digest, work.only(number, 8).digest}
    same: dict[int, int] = {}
    for at, one in enumerate(which):
        assert mine.times[at] == work.times[one]
        for ids, others in (
            (mine.prompt(at), work.prompt(one)),
            (mine.answer(at), work.answer(one)),
        ):
            assert len(ids) == len(others)
            for left, right in zip(ids.tolist(), others.tolist(), strict=True):
                assert same.setdefault(left, right) == right
    assert len(set(same.values())) == len(same) == mine.num_ids


@pytest.mark.parametrize(("policy", "seed"), [("lru", 1), ("returns", 2)])
def test_a_flooder_costs_the_worst_tenant_a_tenth_at_most(policy: str, seed: int) -> None:
    """The flooder begins four fifths of the sessions, each with a prompt never seen again."""
    trace = generate("tenants", seed=seed, requests=1200, unit_tokens=128, changed={"flood": 4})
    work = Workload.read(trace)
    shares = {name: 1 / (1 + int(name.partition("-")[2] or 19)) for name in work.namespaces}
    plain = simulate(work, 800_000, policy)
    found = simulate_shares(work, 800_000, policy, shares=shares)
    kept = {
        name: hits / alone
        for name, (_, _, hits, alone) in found.shares.items()
        if alone and name != "flooder"
    }
    assert len(kept) > 10
    assert min(kept.values()) >= 0.9, kept
    assert found.token_hit_rate >= plain.token_hit_rate - 0.01


@pytest.mark.parametrize("tiering", ["inclusive", "exclusive"])
def test_in_tiers_alone_is_a_replay_of_its_own_requests(tiering: str) -> None:
    requests = traffic(1)
    work = Workload.read(Listed(requests, UNIT))
    sizes, shares = (20 * UNIT, 60 * UNIT), {"a": 2.0, "b": 0.5}
    found = simulate_tier_shares(work, sizes, tiering, "lru", shares=shares)
    assert found.policy == f"lru+shares/{tiering}"
    assert set(found.shares) == {"", "a", "b"}
    for tenant, (weight, tokens, hits, alone) in found.shares.items():
        own = [one for one in requests if one.namespace == tenant]
        assert weight == shares.get(tenant, 1.0)
        assert tokens == sum(one.tokens for one in own)
        parts = [int(size * weight / 3.5) for size in sizes]
        listed = Listed([cut(one, sum(parts) // UNIT) for one in own], UNIT)
        assert alone == simulate_tiers(Workload.read(listed), parts, tiering, "lru").hit_tokens
        assert 0 < hits <= tokens
    assert sum(hits for _, _, hits, _ in found.shares.values()) == found.hit_tokens
    plain = simulate_tiers(work, sizes, tiering, "lru")
    assert not plain.shares
    assert plain.policy == f"lru/{tiering}"


@pytest.mark.parametrize(
    ("tiering", "policy", "seed"),
    [("inclusive", "lru", 1), ("exclusive", "lru", 2), ("exclusive", "returns", 1)],
)
def test_in_tiers_a_flooder_costs_the_worst_tenant_a_tenth_at_most(
    tiering: str, policy: str, seed: int
) -> None:
    trace = generate("tenants", seed=seed, requests=600, unit_tokens=512, changed={"flood": 4})
    work = Workload.read(trace)
    shares = {name: 1 / (1 + int(name.partition("-")[2] or 19)) for name in work.namespaces}
    sizes = 200_000, 600_000
    plain = simulate_tiers(work, sizes, tiering, policy)
    found = simulate_tier_shares(work, sizes, tiering, policy, shares=shares)
    kept = {
        name: hits / alone
        for name, (_, _, hits, alone) in found.shares.items()
        if alone and name != "flooder"
    }
    assert len(kept) > 5
    assert min(kept.values()) >= 0.9, kept
    assert found.token_hit_rate >= plain.token_hit_rate - 0.01


def test_a_run_with_shares_is_another_run() -> None:
    work = Workload.read(Listed(traffic(2), UNIT))
    plain = ReplayRun("returns", 200)
    runs = [plain, replace(plain, shares=(("a", 2.0),)), replace(plain, shares=(("a", 3.0),))]
    found = dict(replay(work, runs))
    assert [found[run].policy for run in runs] == ["returns", "returns+shares", "returns+shares"]
    assert [run.name for run in runs] == ["returns", "returns+shares", "returns+shares"]
    assert [found[run].shares.get("a", [0])[0] for run in runs] == [0, 2.0, 3.0]
    below = ReplayRun("2q", 100, below=(200,), tiering="exclusive", shares=(("a", 2.0),))
    assert below.name == dict(replay(work, [below]))[below].policy == "2q+shares/exclusive"


def test_what_shares_do_not_go_with_is_refused() -> None:
    shares = (("a", 2.0),)
    with pytest.raises(InvalidValue, match="without a bound"):
        ReplayRun("belady", 200, shares=shares)
    cost = PrefillCost(seconds_per_token=0.001)
    with pytest.raises(InvalidValue, match="without times"):
        ReplayRun("lru", 200, below=(400,), cost=cost, shares=shares)
    with pytest.raises(InvalidValue, match="without times"):
        ReplayRun("lru", 200, cost=cost, shares=shares)
    with pytest.raises(InvalidValue, match="the share of 'a'"):
        ReplayRun("lru", 200, shares=(("a", 0.0),))
    work = Workload.read(Listed(traffic(0), UNIT))
    with pytest.raises(InvalidValue, match="'c', but listed has no such tenant; it has 3"):
        ReplayRun("lru", 200, shares=(("c", 1.0),)).check(work)
    ReplayRun("lru", 200, shares=(("", 1.0),)).check(work)
