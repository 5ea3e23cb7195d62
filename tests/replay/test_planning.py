"""Plans: what they replay, and that they recommend what the figures say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from replaying import Chained, Listed, request, workload

from kvkeep.bench.replay import (
    BELADY,
    INFINITE,
    PlannedMemory,
    ReplayRun,
    Workload,
    advise,
    replay,
)
from kvkeep.bench.replay.summary import FEW_REQUESTS
from kvkeep.bench.traces import TraceRequest
from kvkeep.core.cost import PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue


def advice_for(work: Workload, plan: PlannedMemory):
    runs = plan.runs(work)
    outcomes = dict(replay(work, runs))
    assert set(outcomes) == set(runs)
    return advise(plan, outcomes, work), outcomes


def chats(users: int, turns: int, length: int = 8) -> Workload:
    """Users who take turns, each with a prompt that grows."""
    chained = Chained()
    requests = [
        request(float(turn * users + user), chained.ids([(user, at) for at in range(grown)]))
        for turn in range(turns)
        for user in range(users)
        for grown in [(turn + 1) * length]
    ]
    return Workload.read(Listed(requests))


def scans(requests: int, seed: int = 0) -> Workload:
    """A few prompts again and again among very many that never come back."""
    chance = random.Random(seed)
    paths = [
        [("hot", chance.randrange(10)), *range(9)]
        if chance.random() < 0.2
        else [("once", number), *range(9)]
        for number in range(requests)
    ]
    return workload(paths)


@pytest.mark.parametrize(("bandwidth", "pays"), [(1e9, True), (0.001, False)])
def test_a_tier_that_saves_no_time_is_not_recommended(bandwidth, pays):
    cost = PrefillCost(seconds_per_token=0.001, kv_bytes_per_token=100.0)
    read = TransferCost(seconds_per_byte=1 / bandwidth)
    work = chats(6, 4)
    if pays:  # without times as well
        assert advice_for(work, PlannedMemory(75, 20_000))[0].chosen.disk_tokens
    advice, _ = advice_for(work, PlannedMemory(75, 20_000, cost=cost, read=read))
    assert bool(advice.chosen.disk_tokens) == pays
    assert (advice.chosen.tiering is not None) == pays
    said = " ".join(advice.reasons)
    if pays:
        assert "With it, first tokens take" in said
    else:
        assert "But it saves no time" in said
        assert "nothing below it" in advice.recommendation


def test_nothing_is_shared():
    work = workload([[("new", at), 1, 2] for at in range(FEW_REQUESTS)])
    advice, _ = advice_for(work, PlannedMemory(400))
    assert "No cache will help" in str(advice)
    assert (advice.chosen.policy, advice.chosen.disk_tokens) == ("lru", 0)


def test_a_trace_that_lacks_something_does_not_say_that_no_cache_helps():
    paths = [[("new", at), 1, 2] for at in range(FEW_REQUESTS)]
    advice, _ = advice_for(workload(paths[1:]), PlannedMemory(400))
    assert "299 requests, too few" in str(advice)
    assert "No cache will help" not in str(advice)
    work = replace(workload(paths), skipped=30, skipped_reasons=("line 7: no",), dropped=5)
    advice, _ = advice_for(work, PlannedMemory(400))
    assert advice.warnings[:2] == (
        "30 of 330 lines of the trace are skipped: line 7: no",
        "The capture dropped 5 requests, which the trace lacks.",
    )
    assert "No cache will help" not in str(advice)
    work = replace(work, skipped=FEW_REQUESTS)
    with pytest.raises(InvalidValue, match=r"300 of 600 lines are skipped, .*; line 7: no"):
        PlannedMemory(400).runs(work)


def test_lengths_alone_are_no_traffic_without_reuse():
    requests = [TraceRequest(float(at), None, 10, 1) for at in range(FEW_REQUESTS)]
    with pytest.raises(InvalidValue, match="listed has lengths only"):
        PlannedMemory(400).runs(Workload.read(Listed(requests)))
    chained = Chained()
    requests += [request(float(at), chained.ids(["all"])) for at in range(FEW_REQUESTS)]
    advice, _ = advice_for(Workload.read(Listed(requests)), PlannedMemory(400))
    assert advice.warnings[0].startswith("300 of 600 requests have lengths only, and count as")


def test_ample_memory_needs_no_other_policy_and_no_more_of_it():
    advice, outcomes = advice_for(chats(4, 8), PlannedMemory(40_000))
    assert advice.chosen.policy == "lru"
    assert "No other policy is worth a change" in str(advice)
    assert "Half of the memory would be enough" in str(advice)
    best = next(one for run, one in outcomes.items() if run.policy == INFINITE)
    assert f"{100 * best.token_hit_rate:.1f} % of all prompt tokens" in advice.recommendation


def test_scans_ask_for_a_policy_that_withstands_them():
    advice, outcomes = advice_for(scans(400), PlannedMemory(30 * 10 * 4))
    rates = {run.policy: one.token_hit_rate for run, one in outcomes.items() if not run.below
             and run.capacity_tokens == 1200}  # fmt: skip
    assert rates["returns"] > rates["lru"] + 0.02
    assert advice.chosen.policy == "returns"
    assert "were evicted before they were requested" in str(advice)


def test_a_disk_that_brings_something_and_one_that_does_not():
    work = chats(6, 4)
    advice, outcomes = advice_for(work, PlannedMemory(300, 20_000))
    assert advice.chosen.disk_tokens
    assert advice.chosen.tiering in {"inclusive", "inclusive:2", "exclusive"}
    assert "below it with the tiering" in advice.recommendation
    tried = {(run.policy, run.tiering): one.token_hit_rate for run, one in outcomes.items()
             if run.below and run.policy != BELADY}  # fmt: skip
    assert tried[advice.chosen.policy, advice.chosen.tiering] >= max(tried.values()) - 0.005
    idle, _ = advice_for(work, PlannedMemory(200_000, 200_000))
    assert not idle.chosen.disk_tokens
    assert "and nothing below it" in idle.recommendation


def test_what_is_recommended_was_replayed():
    advice, outcomes = advice_for(scans(100), PlannedMemory(300, 600))
    assert advice.chosen.disk_tokens
    assert advice.chosen.policy != "lru"
    run = ReplayRun(advice.chosen.policy, 300, below=(600,), tiering=advice.chosen.tiering)
    share = f"{100 * outcomes[run].token_hit_rate:.1f} % of all prompt tokens need not be computed"
    assert share in advice.recommendation
    assert f"the policy {advice.chosen.policy}" in advice.recommendation


def test_other_namespaces_are_told():
    chained = Chained()
    path = chained.ids(range(20))
    requests = [request(float(at), path, namespace=str(at)) for at in range(30)]
    advice, _ = advice_for(Workload.read(Listed(requests)), PlannedMemory(10_000))
    assert "in another namespace" in str(advice)


@pytest.mark.parametrize("memory", [8, 40])
def test_small_memories(memory):
    advice, _ = advice_for(chats(3, 3), PlannedMemory(memory))
    assert advice.recommendation
