"""All costs in one place: kept apart by tier, saved and read again."""

from __future__ import annotations

import json

import pytest

from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue

PREFILL = PrefillCost(seconds_per_token=1e-4, name="a model")
PREFILL_OF = '{"kvkeep_cost": 1, "seconds_per_token": %s}'


def learned() -> CostModel:
    model = CostModel(PREFILL, reads={"file": TransferCost(seconds_per_byte=1e-9)}, model="m1")
    for _ in range(20):
        model.reading("s3").begin()
        model.reading("s3").end(1 << 20)
        model.prefill.observe([(0, 1000)], 0.2)
    model.writing("file")  # asked for, and nothing is known
    return model


def test_a_file_holds_all_that_was_learned(tmp_path):
    model, path = learned(), tmp_path / "cost.json"
    model.write(path)
    again = CostModel.read(path)
    assert again.model == "m1"
    assert again.prefill.prefill_s(0, 3000) == pytest.approx(
        model.prefill.prefill_s(0, 3000), rel=0.05
    )
    for tier in ("s3", "file"):
        assert again.reading(tier).seconds(1 << 24) == pytest.approx(
            model.reading(tier).seconds(1 << 24), rel=0.2
        )
    assert not again.writing("file").known
    assert list(tmp_path.iterdir()) == [path]
    assert again.prefill.cost.name == "a model"


def test_a_file_of_prefill_alone_is_a_seed(tmp_path):
    path = tmp_path / "cost.json"
    CostModel(PREFILL).write(path)
    assert CostModel.read(path).prefill.cost == PREFILL
    assert CostModel.read(path).prefill.prefill_s(0, 10) == pytest.approx(1e-3)


def test_tiers_alone_can_be_known(tmp_path):
    model = CostModel(reads={"file": TransferCost(seconds_per_byte=1e-9)})
    model.write(tmp_path / "cost.json")
    again = CostModel.read(tmp_path / "cost.json")
    assert not again.prefill.known
    assert again.reading("file").known


def test_loads_from_several_tiers_take_turns():
    model = CostModel(
        reads={
            "file": TransferCost(seconds_fixed=1, seconds_per_byte=1e-3),
            "s3": TransferCost(seconds_fixed=2, seconds_per_byte=1e-2),
        }
    )
    took = model.load_s({"file": 10_000, "s3": 1000, "nowhere": 1 << 30})
    assert took == pytest.approx(1 + 10 + 2 + 10, rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object"),
        ("{}", "kvkeep_cost is missing"),
        ('{"tiers": []}', "tiers are objects"),
        ('{"kvkeep_cost": 1}', "seconds_per_token is missing"),
        ('{"kvkeep_cost": true, "seconds_per_token": 1}', "kvkeep_cost is True"),
        ('{"kvkeep_cost": 2, "seconds_per_token": 1}', "kvkeep_cost is 2"),
        ('{"kvkeep_cost": 2, "tiers": {}}', "kvkeep_cost is 2"),
        ('{"kvkeep_cost": null, "tiers": {}}', "kvkeep_cost is None"),
        ('{"kvkeep_cost": 1.0, "tiers": {}}', "kvkeep_cost is 1.0"),
        ('{"kvkeep_cost": 1, "seconds_fixed": 1, "tiers": {}}', "seconds_per_token is missing"),
        ('{"seconds_per_token": 1, "tiers": {}}', "kvkeep_cost is missing"),
        ('{"tiers": {"file": 3}}', "tiers are objects"),
        ('{"tiers": {"file": {"read": 3}}}', "seconds_per_byte"),
        ('{"tiers": {"file": {"read": {"seconds_per_byte": -1}}}}', "seconds_per_byte is -1"),
        ('{"tiers": {"file": {"read": {"seconds_per_byte": true}}}}', "a number is needed"),
        ('{"tiers": {"file": {"read": {"seconds_per_byte": NaN}}}}', "seconds_per_byte is nan"),
        ('{"model": 3, "tiers": {"file": {}}}', "model is text"),
        (json.dumps({"tiers": {f"t{at}": {"read": {"seconds_per_byte": 1}} for at in range(65)}}),
         "64 tiers"),
        (json.dumps({"model": "m" * 513, "tiers": {"a": {}}}), "512 characters"),
        (" " * ((1 << 20) + 1), "more than 1,048,576 bytes"),
        (PREFILL_OF % "NaN", "seconds_per_token is nan"),
        (PREFILL_OF % "Infinity", "seconds_per_token is inf"),
        (PREFILL_OF % "1e999", "seconds_per_token is inf"),
        (PREFILL_OF % ("1" + "0" * 400), "0 … 1e+12"),
        (PREFILL_OF % ("1" * 5000), "not JSON"),
        (PREFILL_OF % "-0.1", "seconds_per_token is -0.1"),
        (PREFILL_OF % "true", "a number is needed"),
        (PREFILL_OF % "null", "a number is needed"),
        (PREFILL_OF % '"1"', "a number is needed"),
        (PREFILL_OF % ('1, "name": "' + "x" * 513 + '"'), "at most 512 characters"),
        (PREFILL_OF % '1, "name": 7', "name is text"),
    ],
)  # fmt: skip
def test_files_that_are_none_say_why(text, said, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="latin-1")
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
        learned().write(tmp_path / "no folder" / "cost.json")
