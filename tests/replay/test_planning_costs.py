"""Plans with prices: no setting that was replayed costs less than the advice, nor does no cache."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import workload

from kvkeep.bench.replay import BOUNDS, PlannedMemory, replay
from kvkeep.bench.replay.candidates import cheapest_of_each_size
from kvkeep.bench.replay.prices import Prices
from kvkeep.core.cost import PrefillCost, TransferCost

BYTES = 131_072
AMOUNTS = st.floats(0, 1e5) | st.sampled_from([0.0, 1e-9, 1e9])


def prices(gpu: float, memory: float, disk: float) -> Prices:
    return Prices(gpu, memory, disk, kv_bytes_per_token=BYTES, prefill_tokens_per_s=100)


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
    plan = PlannedMemory(200, 2000, prices=prices(1, 1, 1), bytes_per_token=float(BYTES))
    return work, dict(replay(work, plan.runs(work)))


@settings(max_examples=50)
@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_nothing_that_was_replayed_costs_less(replayed, gpu, memory, disk):
    work, outcomes = replayed
    given_prices = prices(gpu, memory, disk)
    plan = PlannedMemory(200, 2000, prices=given_prices, bytes_per_token=float(BYTES))
    advice = plan.advice(outcomes, work)
    months = [
        given_prices.month(outcome, work.span_s).total
        for run, outcome in outcomes.items()
        if run.policy not in BOUNDS
    ]
    nothing = given_prices.nothing_kept(next(iter(outcomes.values())), work.span_s).total
    assert advice.chosen.month == min([nothing, *months])
    printed = cheapest_of_each_size(advice.candidates)
    assert printed[0].month == advice.chosen.month
    assert any(one.policy is None for one in printed)
    assert len(printed) == len({(one.memory_tokens, one.disk_tokens) for one in printed})
    assert all(math.isfinite(one.month) for one in printed)
    # Every amount in its sentences is one of those, or a difference: none is below the advice.
    said = re.findall(r"costs \$([\d,.]+\d)", advice.recommendation)
    assert min(float(one.replace(",", "")) for one in said) <= advice.chosen.month * 1.01 + 0.01


def test_no_memory_is_advised_where_none_pays(replayed):
    work, outcomes = replayed
    plan = PlannedMemory(200, 2000, prices=prices(0.0001, 1e6, 1e6), bytes_per_token=float(BYTES))
    advice = plan.advice(outcomes, work)
    assert (advice.policy, advice.tiering, advice.disk) == (None, None, False)
    assert advice.recommendation.startswith("Keep no KV: no memory that was replayed saves")
    assert "the cheapest cache" in advice.recommendation


def test_sizes_are_told_as_they_were_given(replayed):
    work, outcomes = replayed
    for given_bytes, size in ((float(BYTES), "12.5 MiB"), (None, "100 tokens")):
        plan = PlannedMemory(200, 2000, prices=prices(10, 1e-6, 1e9), bytes_per_token=given_bytes)
        advice = plan.advice(outcomes, work)
        assert not advice.disk
        assert size in " ".join(advice.reasons)
        assert (" tokens in memory" in str(advice)) == (given_bytes is None)


def test_a_disk_below_less_memory_is_tried(replayed):
    work, outcomes = replayed
    plan = PlannedMemory(200, 2000, prices=prices(1000, 1e5, 1e-6), bytes_per_token=float(BYTES))
    advice = plan.advice(outcomes, work)
    assert advice.disk
    assert advice.chosen.memory_tokens == 50
    assert "A tier of 250 MiB below memory saves" in str(advice)


@settings(max_examples=50)
@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_the_edge_of_what_was_tried_is_told(replayed, gpu, memory, disk):
    work, outcomes = replayed
    plan = PlannedMemory(200, 2000, prices=prices(gpu, memory, disk))
    advice = plan.advice(outcomes, work)
    cached = [one for one in advice.candidates if one.policy is not None]
    best = min(cached, key=lambda one: one.month) if advice.policy is None else advice.chosen
    sizes = {one.memory_tokens for one in cached if bool(one.disk_tokens) == bool(best.disk_tokens)}
    told = [one for one in advice.warnings if "memory that was tried" in one]
    at = [which for which, size in (("least", min(sizes)), ("most", max(sizes)))
          if best.memory_tokens == size]  # fmt: skip
    assert len(told) == len(at)
    assert all(f" is the {which} memory" in one for one, which in zip(told, at, strict=True))


def test_a_trace_without_a_duration_has_no_costs(replayed):
    work, outcomes = replayed
    plan = PlannedMemory(200, 2000, prices=prices(1, 1, 1))
    advice = plan.advice(outcomes, replace(work, times=np.zeros(len(work))))
    assert advice.chosen.month is None
    assert any("prices tell nothing" in one for one in advice.warnings)


def test_a_tier_that_saves_no_time_is_no_candidate():
    work = workload([[("hot", at % 10), *range(9)] for at in range(40)])
    cost = PrefillCost(seconds_per_token=0.001, kv_bytes_per_token=100.0)
    for bandwidth, pays in ((1e9, True), (0.001, False)):
        read = TransferCost(seconds_per_byte=1 / bandwidth)
        plan = PlannedMemory(
            200, 4000, cost=cost, read=read, prices=prices(10, 1e6, 1e-6), bytes_per_token=1e5
        )
        advice = plan.advice(dict(replay(work, plan.runs(work))), work)
        assert any(one.disk_tokens for one in advice.candidates) == pays
        assert ("saves no time" in str(advice)) != pays
