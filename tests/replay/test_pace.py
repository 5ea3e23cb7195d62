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
from kvkeep.bench.replay.jobs import calls_of
from kvkeep.bench.replay.outcome import Outcome
from kvkeep.bench.replay.tiered import Pace, simulate_tiers
from kvkeep.bench.traces import TraceRequest
from kvkeep.cli import main
from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue

UNIT = 4
COST = PrefillCost(
    seconds_fixed=0.1,
    seconds_per_token=0.011,
    seconds_per_token_pair=0.0007,
    decode_seconds_per_token=0.13,
    kv_bytes_per_token=10.0,
)
SLOW = (TransferCost(seconds_per_byte=1.0),)
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


def test_a_slow_tier_costs_no_time_and_a_fast_one_saves_it():
    work = workload([(3, number % 3, 12, 2) for number in range(60)])
    sizes = [6 * UNIT, 60 * UNIT]

    def ttft(bandwidth):
        reads = (None, TransferCost(seconds_per_byte=1 / bandwidth))
        return simulate_tiers(work, sizes, cost=COST, reads=reads).latency["ttft_s"]["p50"]

    alone = simulate_tiers(work, sizes[:1], cost=COST).latency["ttft_s"]["p50"]
    assert ttft(1e9) < ttft(500.0) < alone
    assert ttft(0.1) <= alone


BANDWIDTHS = st.floats(0.0, 6.0).map(lambda exponent: 10.0**exponent)


@settings(max_examples=200, deadline=None)
@given(
    ROWS,
    st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=14, max_size=14),
    BANDWIDTHS,
    BANDWIDTHS,
    st.floats(0, 3),
)
def test_tiers_of_any_speed_slow_no_request_down(rows, found, one, other, latency):
    """The first token comes as early as with memory alone, or earlier, whatever is stored."""
    work = workload(rows)
    reads = [None] + [
        TransferCost(seconds_fixed=latency, seconds_per_byte=1 / speed) for speed in (one, other)
    ]

    def seconds(levels):
        pace = Pace(work, calls_of(work, None), COST, reads)
        waits, outcome = [], Outcome("", 0, UNIT, "", "")
        for number in pace:
            left, some = int(work.prompt_units[number]), []
            for units in found[number][:levels] + (0,) * (3 - levels):
                some.append(min(left, units))
                left -= some[-1]
            pace.served(number, some, min(sum(some) * UNIT, int(work.tokens[number])))
            waits.append(pace.now - float(work.times[number]))
        pace.finish(outcome)
        assert outcome.latency["loaded_tokens"] >= 0
        assert outcome.latency["computed_stored_tokens"] >= 0
        return waits

    for waited, alone in zip(seconds(3), seconds(1), strict=True):
        assert waited <= alone + 1e-9


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
        (lambda work: simulate_tiers(work, [99], reads=SLOW), "prompts cost something"),
        (
            lambda work: simulate_tiers(
                work, [99], cost=PrefillCost(seconds_per_token=1), reads=SLOW
            ),
            "kv_bytes_per_token",
        ),
        (lambda work: ReplayRun("lru", 99, reads=SLOW), "needs tiers"),
    ],
)
def test_wrong_paces(wrong, message):
    with pytest.raises(InvalidValue, match=message):
        wrong(workload([(1, 0, 3, 1)]))


def test_tiers_of_the_cost_file(tmp_path, capsys):
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    lines = [
        {"timestamp": 900 * number, "input_length": 3072, "output_length": 3,
         "hash_ids": [10 * (number % 4) + at for at in range(6)]}
        for number in range(20)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tiers = {
        "s3": TransferCost(seconds_fixed=0.05, seconds_per_byte=1e-6),
        "file": TransferCost(seconds_per_byte=1e-7),
        "memory": TransferCost(seconds_per_byte=1e-12),
    }
    CostModel(COST, reads=tiers).write(cost)
    words = ["replay", str(trace), "--policy", "lru", "--json", "--jobs", "1", "--cost", str(cost),
             "--tiering", "inclusive"]  # fmt: skip

    def latency(*more):
        assert main([*words, *more]) == 0
        shown = capsys.readouterr()
        return json.loads(shown.out)["latency"], shown.err

    found, said = latency("--capacity", "3072+51200")
    assert found["loaded_s"] > 0
    assert "file (9.5 MiB/s)" in said
    assert "s3" not in said
    assert main([one for one in words if one != "--json"] + ["--capacity", "3072+51200"]) == 0
    assert " loaded" in capsys.readouterr().out
    _, said = latency("--capacity", "3072+3072+51200")
    assert said.index("file") < said.index("s3")
    assert latency("--capacity", "3072")[1] == ""
    assert main([*words, "--capacity", "3072+3072+3072+9999"]) == 2
    assert "3 tiers below memory need as many" in capsys.readouterr().err
