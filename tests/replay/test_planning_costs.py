"""Plans with prices: no setting that was replayed costs less than the advice, nor does no cache."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import workload

from kvkeep.bench.replay import BOUNDS, PlannedMemory, Prices, advise, replay
from kvkeep.core.cost import PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue

BYTES = 131_072.0
COST = PrefillCost(seconds_per_token=0.01, kv_bytes_per_token=BYTES)
AMOUNTS = st.floats(0, 1e5) | st.sampled_from([0.0, 1e-9, 1e9])


def planned(gpu: float, memory: float, disk: float) -> PlannedMemory:
    prices = Prices(gpu, memory, disk)
    return PlannedMemory(200, 2000, cost=COST, prices=prices, bytes_per_token=BYTES)


@pytest.fixture(scope="module")
def replayed():
    """A few prompts again and again among others, in memory that is too small, and a tier below."""
    chance = random.Random(1)
    paths = [
        [("hot", chance.randrange(12)), *range(9)]
        if chance.random() < 0.6
        else [("once", number), *range(9)]
        for number in range(100)
    ]
    work = workload(paths)
    return work, dict(replay(work, planned(1, 1, 1).runs(work)))


def test_a_month_is_memory_disk_and_the_time_of_gpus(replayed):
    work, _ = replayed
    gib = int((1 << 30) / BYTES)
    month_s = 365.25 * 86_400 / 12
    busy_s = 0.01 * int(work.tokens.sum())
    plan = planned(3.6, 2.0, 0.5)
    assert plan.month(work, 10 * gib, 0, 1.0) == pytest.approx(20)
    assert plan.month(work, 0, 10 * gib, 1.0) == pytest.approx(5)
    gpus = busy_s / 3600 * 3.6 * month_s / work.span_s
    assert plan.month(work, 0, 0, 0.0) == pytest.approx(gpus)
    assert plan.month(work, 0, 0, 0.25) == pytest.approx(0.75 * gpus)
    assert PlannedMemory(200).month(work, 1, 1, 0.5) is None


@settings(max_examples=50)
@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_nothing_that_was_replayed_costs_less(replayed, gpu, memory, disk):
    work, outcomes = replayed
    plan = planned(gpu, memory, disk)
    advice = advise(plan, outcomes, work)
    months = [
        plan.month(work, run.capacity_tokens, sum(run.below), outcome.token_hit_rate)
        for run, outcome in outcomes.items()
        if run.policy not in BOUNDS
    ]
    assert advice.chosen.month == min([plan.month(work, 0, 0, 0.0), *months])
    assert advice.chosen in advice.candidates


def test_no_memory_is_advised_where_none_pays(replayed):
    work, outcomes = replayed
    advice = advise(planned(0.0001, 1e6, 1e6), outcomes, work)
    assert (advice.chosen.policy, advice.chosen.disk_tokens) == (None, 0)
    assert advice.recommendation.startswith("Keep no KV: no memory that was replayed saves")
    assert "the cheapest cache" in advice.recommendation


def test_a_disk_below_less_memory_is_tried(replayed):
    work, outcomes = replayed
    advice = advise(planned(1000, 1e5, 1e-6), outcomes, work)
    assert advice.chosen.memory_tokens == 50
    assert "and 250 MiB below it" in advice.recommendation


@settings(max_examples=50)
@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_the_edge_of_what_was_tried_is_told(replayed, gpu, memory, disk):
    work, outcomes = replayed
    advice = advise(planned(gpu, memory, disk), outcomes, work)
    cached = [one for one in advice.candidates if one.policy is not None]
    best = min(cached, key=lambda one: one.month)
    sizes = {one.memory_tokens for one in cached if bool(one.disk_tokens) == bool(best.disk_tokens)}
    told = [one for one in advice.warnings if "memory that was tried" in one]
    at = [which for which, size in (("least", min(sizes)), ("most", max(sizes)))
          if best.memory_tokens == size]  # fmt: skip
    assert len(told) == len(at)
    assert all(f" is the {which} memory" in one for one, which in zip(told, at, strict=True))


def test_a_trace_without_a_duration_has_no_costs(replayed):
    work, outcomes = replayed
    advice = advise(planned(1, 1, 1), outcomes, replace(work, times=np.zeros(len(work))))
    assert advice.chosen.month is None
    assert any("prices tell nothing" in one for one in advice.warnings)


def test_a_tier_that_saves_no_time_is_no_candidate():
    work = workload([[("hot", at % 10), *range(9)] for at in range(40)])
    for bandwidth, pays in ((1e9, True), (0.001, False)):
        read = TransferCost(seconds_per_byte=1 / bandwidth)
        plan = replace(planned(10, 1e6, 1e-6), disk_tokens=4000, read=read)
        advice = advise(plan, dict(replay(work, plan.runs(work))), work)
        assert any(one.disk_tokens for one in advice.candidates) == pays
        assert ("saves no time" in str(advice)) != pays


def test_prices_are_parsed():
    assert Prices.parse("gpu=2.5, memory=3,disk=0.1") == Prices(2.5, 3.0, 0.1)
    assert Prices.parse("memory=3,gpu=0") == Prices(0.0, 3.0)
    for text, says in (
        ("gpu=2", "memory is missing"), ("gpu=2,memory=x", "got 'memory=x'"),
        ("cpu=2,memory=3", "got 'cpu=2'"), ("gpu=-1,memory=3", "gpu_hour is -1"),
        ("gpu=nan,memory=3", "gpu_hour is nan"), ("gpu=2,memory=inf", "memory_gib is inf"),
    ):  # fmt: skip
        with pytest.raises(InvalidValue, match=says):
            Prices.parse(text)
    with pytest.raises(InvalidValue, match="prices need the cost"):
        PlannedMemory(200, prices=Prices(1, 1))
    with pytest.raises(InvalidValue, match="a disk needs the price"):
        replace(planned(1, 1, 1), prices=Prices(1, 1))
