"""The status that the connector serves: what came from where, and why not the rest."""

from __future__ import annotations

import http.client
import re
import urllib.error
from typing import TYPE_CHECKING

import pytest
from engines import BLOCK, prompt
from vllm import SamplingParams
from watched import KEY, Watched, fetch, watched

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.options import ConnectorOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def running(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    disk = tmp_path_factory.mktemp("kv")
    tiers = ["memory://4MiB", f"file://{disk}?size=64MiB"]
    with watched(llama, tiers, num_gpu_blocks_override=40, max_model_len=1024) as one:
        yield one


def test_where_a_prompt_came_from(running: Watched) -> None:
    mine = prompt(300, seed=1)
    running.engine.ask([mine])
    assert running.last()["computed"] == {"new": 300}
    running.engine.ask([mine])
    assert running.last()["reused"] == {"pool": 288}
    running.engine.forget()
    running.engine.ask([mine])
    said = running.last()
    assert said["reused"] == {"memory": 288}
    assert said["outcome"] == "done"
    assert said["generated_tokens"] == 6
    assert 0 < said["ttft_s"] <= said["seconds"]
    assert sum(said["computed"].values()) == 12
    assert said["text"] is None


def test_where_prompts_differ(running: Watched) -> None:
    first = prompt(300, seed=2)
    second = [*first[:100], 7, *first[101:]]
    running.engine.ask([first], salt="one tenant")
    running.engine.ask([second], salt="one tenant")
    said = running.last()
    assert said["cache_salt"] == "one tenant"
    assert said["reused"] == {"pool": 96}
    (span,) = [one for one in said["spans"] if one["reason"] == "diverged"]
    assert span["evidence"]["position"] == 100
    assert not {"given", "cached"} & span["evidence"].keys(), "tokens of prompts are not told"


def test_who_evicted_a_prompt(running: Watched) -> None:
    """vLLM's pages are given to others, and what the tiers had was not to be kept."""
    mine = prompt(300, seed=3)
    running.engine.ask([mine], kvkeep={"store": False})
    for seed in range(4):
        running.engine.ask([prompt(400, seed=30 + seed)], kvkeep={"store": False})
    running.engine.ask([mine])
    said = running.last()
    gone = [one for one in said["spans"] if one["reason"] == "evicted"]
    assert gone, said
    assert gone[0]["evidence"]["tier"] == "pool"
    assert gone[0]["evidence"]["cause"] == "pressure"
    culprit = gone[0]["evidence"]["by"]
    assert fetch(f"{running.url}/kv/explain/{culprit}")["prompt_tokens"] == 400
    assert running.get("/kv/stats")["cache"]["evicted_pages"] > 0


def test_what_a_tier_lost_is_said(running: Watched) -> None:
    mine = prompt(300, seed=4)
    running.engine.ask([mine])
    assert running.engine.core.scheduler.reset_prefix_cache(reset_connector=True)
    running.engine.ask([mine])
    said = running.last()
    (span,) = [one for one in said["spans"] if one["reason"] == "evicted"]
    assert span["evidence"]["cause"] == "cleared"


def test_many_at_once_and_long_answers(running: Watched) -> None:
    start = prompt(64, seed=5)
    asked = [start + prompt(40 + n, seed=50 + n) for n in range(12)]
    before = running.get("/kv/stats")["engine"]
    answers = running.engine.ask(asked, max_tokens=70)
    turn = asked[0] + list(answers[0].tokens) + prompt(9, seed=6)
    running.engine.ask([turn])
    said = running.last()
    assert sum(said["reused"].values()) >= (len(asked[0]) + 69) // BLOCK * BLOCK
    after = running.get("/kv/stats")["engine"]
    assert after["running"] == after["waiting"] == 0
    assert after["requests"] - before["requests"] == 13
    assert after["generated_tokens"] - before["generated_tokens"] == 12 * 70 + 6
    assert after["observer_errors"] == 0
    pages = running.get("/kv/stats")["cache"]
    states = ("free", "cached_evictable", "cached_held", "private")
    assert sum(pages[f"pages_{one}"] for one in states) == pages["pages_total"] == 40
    for one in running.get("/kv/requests?last=1000")["requests"]:
        tokens = sum(one["reused"].values()) + sum(one["computed"].values())
        assert tokens == one["prompt_tokens"]


def test_an_aborted_request(running: Watched) -> None:
    llm = running.engine.llm.llm_engine
    params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
    llm.add_request("gone", {"prompt_token_ids": prompt(100, seed=7)}, params)
    for _ in range(4):
        llm.step()
    said = running.last()
    assert said["id"].startswith("gone")
    assert said["outcome"] is None
    assert running.get("/kv/stats")["engine"]["running"] == 1
    llm.abort_request(["gone"], internal=False)
    running.engine.ask([prompt(10, seed=8)])
    assert fetch(f"{running.url}/kv/explain/{said['id']}")["outcome"] == "aborted"
    assert running.get("/kv/stats")["engine"]["running"] == 0


def test_a_request_with_everything_else_told(running: Watched) -> None:
    names = {"cost": "loads", "summary": "causes"}
    for path, field in names.items():
        assert field in running.get(f"/kv/{path}")
    page = running.get("/metrics")
    for name in (
        "kvkeep_store_used_bytes",
        "kvkeep_recomputed_tokens_total",
        "kvkeep_hit_tokens_total",
    ):
        assert f"\n{name}{{" in page
    assert "<title>kvkeep</title>" in fetch(f"{running.url}/", None)


def test_strangers_are_refused(running: Watched) -> None:
    for key in (None, "wrong"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(f"{running.url}/kv/live", key)
        assert refused.value.code == 401
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    for host in ("rebound.example", f"rebound.example:{running.port}"):
        connection.request(
            "GET", "/kv/live", headers={"Host": host, "Authorization": f"Bearer {KEY}"}
        )
        answer = connection.getresponse()
        assert answer.status == 400
        assert b"host name" in answer.read()
    connection.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"status": "nowhere"}, 'an address is needed, as "127.0.0.1:8201"'),
        ({"status": "127.0.0.1:99999"}, "an address is needed"),
        ({"status": True}, "text is needed"),
        ({"status": ":8201", "status_key": "a\nb"}, "status_key is no key"),
        ({"status": ":8201", "status_key_file": "/nowhere/key"}, "cannot read a key from"),
        ({"status_key": KEY}, "no address"),
        ({"statsu": ":8201"}, "did you mean 'status'"),
    ],
)
def test_wrong_options(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(said)) as error:
        ConnectorOptions.parse(wrong)
    assert KEY not in str(error.value)


def test_right_options(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    options = ConnectorOptions.parse({"status": ":8201", "status_key_file": str(key)})
    assert options.status == "127.0.0.1:8201"
    assert options.status_key_file == KEY
    assert KEY not in repr(options)
    assert ConnectorOptions.parse({"status": 8201}).status == "127.0.0.1:8201"
    assert ConnectorOptions.parse({"status": "[::1]:0"}).status == "[::1]:0"
