"""Costs that are kept in a file from one run to the next."""

from __future__ import annotations

import json
import logging
import os
import threading
import time

import pytest

from kvkeep.core.cost import CostModel, OtherCostVersion, PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue


def learned():
    cost = CostModel(
        PrefillCost(seconds_fixed=0.01, seconds_per_token=0.001, kv_bytes_per_token=512.0),
        reads={"file": TransferCost(seconds_fixed=0.001, seconds_per_byte=1e-9)},
        writes={"file": TransferCost(seconds_per_byte=2e-9)},
    )
    for stop in (64, 500, 4_000) * 6:
        cost.prefill.observe([(0, stop)], 0.02 + 0.002 * stop)
    return cost


def saved(path, model="m", **options):
    with CostModel.saved(path, model, **options) as cost:
        return cost


def test_what_was_learned_is_there_again(tmp_path):
    path = tmp_path / "cost.json"
    learned().write(path)
    cost = saved(path, "a model")
    assert cost.model == "a model"  # the file had none: a seed
    assert cost.prefill.prefill_s(0, 1_000) == pytest.approx(2.02, rel=0.05)
    assert cost.prefill.cost.kv_bytes_per_token == 512
    again = saved(path, "a model")
    assert again.prefill.prefill_s(0, 1_000) == pytest.approx(2.02, rel=0.05)
    assert again.reads()["file"].seconds(1 << 20) == pytest.approx(0.002048, rel=0.05)
    assert os.listdir(tmp_path) == ["cost.json"]


def test_costs_of_another_model_are_refused(tmp_path):
    path = tmp_path / "cost.json"
    saved(path, "one")
    with pytest.raises(InvalidValue, match=r"costs of 'one', and this is 'other': name another"):
        saved(path, "other")
    assert json.loads(path.read_text())["model"] == "one"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"tiers": 3}', '{"kvkeep_cost": "9"}', "[" * 9999]
)
def test_damaged_files(tmp_path, caplog, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=r"cost\.json"):
        saved(path)
    assert path.read_text() == text
    with caplog.at_level(logging.WARNING):
        cost = saved(path, strict=False)
    assert "learned anew" in caplog.text
    assert not cost.prefill.known
    assert json.loads(path.read_text()) == {"kvkeep_cost": 1, "model": "m", "tiers": {}}


def test_a_file_of_another_version_stays_as_it_is(tmp_path, caplog):
    path = tmp_path / "cost.json"
    text = '{"kvkeep_cost": 9, "model": "m", "tiers": {}}'
    path.write_text(text)
    with pytest.raises(OtherCostVersion, match=r"cost\.json: kvkeep_cost is 9; 1 is needed"):
        saved(path)
    with caplog.at_level(logging.WARNING):
        assert not saved(path, strict=False).prefill.known
    assert "costs are not kept" in caplog.text
    assert "kvkeep_cost is 9; 1 is needed" in caplog.text
    assert path.read_text() == text


def test_folders(tmp_path, caplog):
    with pytest.raises(InvalidValue, match="there is no folder"):
        saved(tmp_path / "none" / "cost.json")
    saved(tmp_path / "none" / "deep" / "cost.json", strict=False)
    assert (tmp_path / "none" / "deep" / "cost.json").exists()
    (tmp_path / "file").write_text("")
    assert not saved(tmp_path / "file" / "cost.json", strict=False).prefill.known
    assert "costs are not kept" in caplog.text


def test_a_place_that_goes_away_is_a_warning(tmp_path, caplog):
    path = tmp_path / "costs" / "cost.json"
    with CostModel.saved(path, "m", strict=False, every_s=0.001):
        until(path.exists)
        path.parent.rename(tmp_path / "gone")
        until(lambda: "costs are not kept" in caplog.text)
        time.sleep(0.02)
        assert caplog.text.count("costs are not kept") == 1
        path.parent.mkdir()
    assert path.exists()


def test_it_is_written_now_and_then_and_never_by_halves(tmp_path):
    path = tmp_path / "cost.json"
    with CostModel.saved(path, "m", every_s=0.001) as cost:
        until(path.exists)
        for number in range(200):
            cost.prefill.observe([(0, 10 + number)], 0.1 + number / 100)
            CostModel.read(path)
    assert CostModel.read(path).prefill.prefill_s(0, 100) == pytest.approx(
        cost.prefill.prefill_s(0, 100), rel=1e-3
    )
    assert not any(one.name == "kvkeep costs" for one in threading.enumerate())


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
