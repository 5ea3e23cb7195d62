"""What computing takes: the formula, and files that are none."""

from __future__ import annotations

import json

import pytest

from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.core.errors import InvalidValue

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


GOOD = '{"kvkeep_cost": 1, "seconds_per_token": %s}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object"),
        ("{}", "kvkeep_cost is missing"),
        ('{"kvkeep_cost": true, "seconds_per_token": 1}', "kvkeep_cost is True"),
        ('{"kvkeep_cost": 2, "seconds_per_token": 1}', "kvkeep_cost is 2"),
        ('{"kvkeep_cost": 1}', "seconds_per_token is missing"),
        (GOOD % "NaN", "seconds_per_token is nan"),
        (GOOD % "Infinity", "seconds_per_token is inf"),
        (GOOD % "1e999", "seconds_per_token is inf"),
        (GOOD % ("1" + "0" * 400), "0 … 1e+12"),
        (GOOD % ("1" * 5000), "not JSON"),
        (GOOD % "-0.1", "seconds_per_token is -0.1"),
        (GOOD % "true", "a number is needed"),
        (GOOD % "null", "a number is needed"),
        (GOOD % '"1"', "a number is needed"),
        (GOOD % '[1], "name": "x"', "a number is needed"),
        (GOOD % ('1, "name": "' + "x" * 513 + '"'), "at most 512 characters"),
        (GOOD % '1, "name": 7', "name is text"),
        (GOOD % ("1" + " " * (1 << 20)), "more than 1,048,576 bytes"),
    ],
)
def test_files_that_are_none_say_why(text, said, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="latin-1" if "\xff" in text else "utf-8")
    with pytest.raises(InvalidValue) as error:
        CostModel.read(path)
    assert said in str(error.value)
    assert "cost.json" in str(error.value)
    assert len(str(error.value)) < 400


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InvalidValue, match="cannot read"):
            CostModel.read(path)
    with pytest.raises(InvalidValue, match="cannot write"):
        CostModel(COST).write(tmp_path / "no folder" / "cost.json")
