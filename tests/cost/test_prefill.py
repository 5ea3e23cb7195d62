"""What computing takes: the formula, and its file."""

from __future__ import annotations

import json

import pytest

from kvkeep.core.cost import CostModel, PrefillCost

COST = PrefillCost(
    seconds_fixed=0.01,
    seconds_per_token=1e-4,
    seconds_per_token_pair=2e-9,
    decode_seconds_per_token=0.02,
    kv_bytes_per_token=2048,
    name="a model somewhere",
)


def test_each_token_costs_itself_and_those_before_it():
    cost = PrefillCost(seconds_fixed=0.5, seconds_per_token=1, seconds_per_token_pair=0.25)
    # Token n, counted from 0, meets n + 1/2 tokens before it: those, and half of itself.
    by_token = sum(1 + 0.25 * (at + 0.5) for at in range(10, 30))
    assert cost.prefill_s(10, 30) == pytest.approx(0.5 + by_token)
    assert cost.prefill_s(30, 30) == cost.prefill_s(31, 30) == 0
    assert COST.decode_s(11) == pytest.approx(0.2)
    assert COST.decode_s(1) == COST.decode_s(0) == 0


def test_a_file_holds_it(tmp_path):
    path = tmp_path / "cost.json"
    CostModel(COST).write(path)
    assert CostModel.read(path).prefill.cost == COST
    path.write_text(json.dumps({**json.loads(path.read_text()), "measured": [[0, 512, 0.25]]}))
    assert CostModel.read(path).prefill.cost == COST  # further fields are for people
    whole = PrefillCost(seconds_per_token=1)  # a person may write it, and leaves out the rest
    assert CostModel.of({"kvkeep_cost": 1, "seconds_per_token": 1}).prefill.cost == whole
