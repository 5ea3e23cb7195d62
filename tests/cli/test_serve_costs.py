"""``kvkeep serve`` keeps what it learned of costs, from one run to the next."""

from __future__ import annotations

import json
import os
import signal
import stat

import httpx
import pytest
from test_serve import ended, serving

from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.core.errors import InvalidValue

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]


def ask(url, text):
    body = {"prompt": text, "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def costs(url):
    return httpx.get(f"{url}/kv/cost").raise_for_status().json()


def stopped(process):
    process.send_signal(signal.SIGTERM)
    code, log = ended(process)
    assert code == 0
    assert "Traceback" not in log
    return log


def test_a_restart_begins_with_what_was_learned(tmp_path):
    folder = tmp_path / "kvkeep" / "costs"
    with serving(XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
        assert "seconds_per_token" not in costs(url)
        for number in range(6):
            ask(url, f"{number} " * 50)
        learned = costs(url)
        stopped(process)
    (file,) = folder.iterdir()
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077
    saved = json.loads(file.read_text())
    assert saved["model"] == learned["model"] != ""
    assert saved["observations"] >= learned["observations"]
    with serving(XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
        again = costs(url)
        for name in ("seconds_fixed", "seconds_per_token"):
            assert again[name] == pytest.approx(saved[name], rel=0.1, abs=1e-4)
        assert again["observations"] == 0
        stopped(process)
    assert [one.name for one in folder.iterdir()] == [file.name]
    # Another model, device or other tiers have a file of their own.
    with serving("--no-store", XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
        assert "seconds_per_token" not in costs(url)
        ask(url, "more")
        stopped(process)
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_file_is_begun_anew(tmp_path):
    with serving(XDG_CACHE_HOME=str(tmp_path)) as (process, _, _):
        stopped(process)
    (file,) = (tmp_path / "kvkeep" / "costs").iterdir()
    file.write_text("{")
    with serving(XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
        ask(url, "hello")
        assert "costs are learned anew" in stopped(process)
    assert CostModel.read(file).prefill.known


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "cost.json"
    CostModel(PrefillCost(seconds_per_token=0.5, name="a seed")).write(file)
    with serving("--cost", str(file)) as (process, url, _):
        found = costs(url)
        assert found["seconds_per_token"] == pytest.approx(0.5)
        assert found["name"] == "a seed"
        stopped(process)
    saved = json.loads(file.read_text())
    assert saved["model"]
    saved["model"] = "another"
    file.write_text(json.dumps(saved))
    before = file.read_text()
    with (
        pytest.raises(AssertionError, match="has the costs of 'another', and this is"),
        serving("--cost", str(file)),
    ):
        pass
    assert file.read_text() == before
    with (
        pytest.raises(AssertionError, match="there is no folder"),
        serving("--cost", str(tmp_path / "none" / "cost.json")),
    ):
        pass
    with pytest.raises(InvalidValue):
        CostModel.read(tmp_path / "none")
