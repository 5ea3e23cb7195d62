"""Tiers that take their time, against times worked out request by request."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Listed

from kvkeep.bench.replay import ReplayRun, Workload
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.bench.traces import TraceRequest
from kvkeep.cli import main
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

UNIT = 4
COST = PrefillCost(
    seconds_fixed=0.1,
    seconds_per_token=0.011,
    seconds_per_token_pair=0.0007,
    decode_seconds_per_token=0.13,
    kv_bytes_per_token=10.0,
)
SPEEDS = (None, 90.0, 25.0)

ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),  # since the one before
        st.integers(0, 3),  # whose beginning it has
        st.integers(1, 12),  # units
        st.integers(0, 9),  # tokens of the answer
    ),
    min_size=1,
    max_size=14,
)


def workload(rows):
    now, requests = 0.0, []
    for number, (pause, family, units, output) in enumerate(rows):
        now += pause + math.sqrt(2 + number) / 100
        ids = 100 * family + np.arange(units)
        requests.append(TraceRequest(now, ids, units * UNIT - number % UNIT, output))
    return Workload.read(Listed(requests, unit_tokens=UNIT))


@settings(max_examples=50, deadline=None)
@given(ROWS, st.sampled_from(["inclusive", "exclusive"]))
def test_times_against_worked_out_ones(rows, tiering):
    """Levels are read from as the same replay without a clock found; times follow from that."""
    work = workload(rows)
    sizes = [4 * UNIT, 6 * UNIT, 20 * UNIT]
    found = []

    def simulate(**more):
        return simulate_tiers(work, sizes, tiering, **more)

    plain = simulate()
    timed = simulate(cost=COST, bandwidths=SPEEDS)
    assert timed.hit_tokens == plain.hit_tokens
    assert timed.misses == plain.misses
    assert [tier["hits"] for tier in timed.tiers] == [tier["hits"] for tier in plain.tiers]
    # What each request found at each level: the difference of all up to it, and all before it.
    before = [0, 0, 0]
    hits = 0
    for count in range(1, len(work) + 1):
        part = simulate_tiers(workload(rows[:count]), sizes, tiering)
        now = [tier["hits"] for tier in part.tiers]
        found.append(([a - b for a, b in zip(now, before, strict=True)], part.hit_tokens - hits))
        before, hits = now, part.hit_tokens
    reads, computed = [0.0, 0.0, 0.0], 0.0
    waits, ends, loaded = [], [], 0.0
    for number, (levels, hit_tokens) in enumerate(found):
        came, tokens = float(work.times[number]), int(work.tokens[number])
        ready = came
        for level, units in enumerate(levels):
            if SPEEDS[level] is not None and units:
                takes = units * UNIT * 10.0 / SPEEDS[level]
                reads[level] = max(came, reads[level]) + takes
                ready = max(ready, reads[level])
                loaded += takes
        begin = max(ready, computed)
        computed = begin + COST.prefill_s(min(hit_tokens, tokens - 1), tokens)
        waits.append(computed - came)
        ends.append(computed + COST.decode_s(int(work.output_tokens[number])))
    told = timed.latency
    assert told["ttft_s"]["mean"] == pytest.approx(np.mean(waits))
    assert told["ttft_s"]["p99"] == pytest.approx(np.quantile(waits, 0.99))
    assert told["loaded_s"] == pytest.approx(loaded)
    assert told["span_s"] == pytest.approx(max(ends) - float(work.times[0]))


def test_a_slow_tier_costs_time_and_a_fast_one_saves_it():
    work = workload([(3, number % 3, 12, 2) for number in range(60)])
    sizes = [6 * UNIT, 60 * UNIT]

    def ttft(bandwidth):
        return simulate_tiers(work, sizes, cost=COST, bandwidths=(None, bandwidth)).latency[
            "ttft_s"
        ]["p50"]

    alone = simulate_tiers(work, sizes[:1], cost=COST).latency["ttft_s"]["p50"]
    assert ttft(1e9) < ttft(500.0) < alone < ttft(20.0)


def test_users_wait_for_answers():
    rows = [(0, number % 3, 6, 5) for number in range(40)]
    work = workload(rows)
    one = simulate_tiers(work, [100 * UNIT], cost=COST, users=1).latency
    assert one["queue_s"]["p99"] == 0
    many = simulate_tiers(work, [100 * UNIT], cost=COST, users=20).latency
    assert many["queue_s"]["p50"] > 0
    assert many["span_s"] < one["span_s"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda work: simulate_tiers(work, [99], users=3), "prompts cost something"),
        (lambda work: simulate_tiers(work, [99], bandwidths=(1.0,)), "prompts cost something"),
        (
            lambda work: simulate_tiers(
                work, [99], cost=PrefillCost(seconds_per_token=1), bandwidths=(1.0,)
            ),
            "kv_bytes_per_token",
        ),
        (lambda work: ReplayRun("lru", 99, bandwidths=(1.0,)), "bandwidths need tiers"),
        (
            lambda work: ReplayRun("lru", 9, below=(9,), cost=COST, bandwidths=(0.0,)),
            "a bandwidth is",
        ),
    ],
)
def test_wrong_paces(wrong, message):
    with pytest.raises(InvalidValue, match=message):
        wrong(workload([(1, 0, 3, 1)]))


def test_from_the_command_line(tmp_path, capsys):
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    COST.write(cost)
    lines = [
        {"timestamp": 900 * number, "input_length": 3072, "output_length": 3,
         "hash_ids": [10 * (number % 4) + at for at in range(6)]}
        for number in range(40)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    arguments = ["replay", str(trace), "--capacity", "3072+51200", "--policy", "lru", "--json",
                 "--tiering", "inclusive", "--jobs", "1"]  # fmt: skip
    timed = ["--cost", str(cost), "--bandwidth", "1MB"]
    assert main([*arguments, *timed]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["latency"]["loaded_s"] > 0
    assert main([*arguments, "--cost", str(cost), "--bandwidth", "fast"]) == 2
    assert "fast" in capsys.readouterr().err
    assert main(["replay", str(trace), "--capacity", "3072", *timed]) == 2
    assert "--bandwidth needs tiers" in capsys.readouterr().err
