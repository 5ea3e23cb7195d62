"""What a server has learned of its costs, how it loads by that, and how it shows both."""

from __future__ import annotations

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_server import eventually
from see_help import ask, explained, forget_pool, only, storing, tokens_of

from faults import FaultyBackend
from kvkeep.core.cost import CostModel
from kvkeep.store.backends.memory import MemoryBackend

pytestmark = pytest.mark.model

LONG = 513  # eight blocks, and the last token


@pytest.fixture
def faulty():
    """A tier below memory that is as slow as it is told to be."""
    backend = FaultyBackend(MemoryBackend(64 << 20))
    yield backend
    backend.heal()


def costs(server):
    return server.http.get("/kv/cost").raise_for_status().json()


def read_s(server):
    """The seconds that reading a prompt from the tier is expected to take; 0 if never read."""
    reads = CostModel.of(costs(server)).reads()
    return reads["faulty"].seconds(8 * 64 * 2048) if "faulty" in reads else 0.0


def samples(server):
    text = server.http.get("/metrics").raise_for_status().text
    return {
        (one.name, *sorted(one.labels.values())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_server_without_a_store_learns_what_prompts_take(server):
    first = costs(server)
    assert first["tiers"] == {}
    assert first["loads"]["total"]["loads"] == 0
    for seed in range(4):
        ask(server, tokens_of(seed, 100 + 50 * seed))
    found = costs(server)
    assert found["kvkeep_cost"] == 1
    assert found["observations"] >= 4
    assert 0 < found["error"] <= 1
    assert found["kv_bytes_per_token"] == server.engine.runner.geometry.bytes_per_token
    # It is a file of costs as well.
    cost = CostModel.of(found)
    assert cost.prefill.prefill_s(0, 200) > 0
    told = samples(server)
    assert told["kvkeep_prefill_token_seconds",] > 0


def test_a_key_is_needed_where_there_is_one(start_server):
    with start_server(api_key="secret") as server:
        assert server.http.get("/kv/cost", headers={"Authorization": ""}).status_code == 401


def test_what_is_slow_is_computed_and_said_to_be(faulty):
    prompts = [tokens_of(seed, LONG) for seed in range(12)]
    with storing("memory://4MiB", faulty, num_pages=512) as server:
        for prompt in prompts:
            ask(server, prompt)
        forget_pool(server, *prompts)
        faulty.slow(0.5, "get")
        found = None
        asked_at = float("-inf")

        def is_slow():
            """Computing overtakes the read, which ends later; or it has not begun: again then."""
            nonlocal asked_at
            if time.monotonic() - asked_at > 4:
                server.engine.cache.clear()
                ask(server, prompts[0])
                asked_at = time.monotonic()
            return read_s(server) > 0.1

        eventually(is_slow)
        for prompt in prompts[1:7]:  # memory has the end of the last ones
            told = explained(server, ask(server, prompt))
            if any(
                span["reason"] == "not_loaded" and span["evidence"]["why"] == "expected"
                for span in told["spans"]
            ):
                found = told
        assert found is not None, "it learns that the tier is slow"
        evidence = only(found, "not_loaded")["evidence"]
        assert evidence["tier"] == "faulty"
        assert 0 < evidence["compute_s"] <= evidence["load_s"]
        assert "loading them from tier 'faulty' would have taken" in found["sentence"]
        # A prompt that is not sent is judged by the same.
        server.engine.cache.clear()
        asked = server.http.post("/kv/explain", json={"prompt": prompts[0]}).json()
        # Memory may have the end of it meanwhile: then that is loaded.
        assert asked["computed"]["not_loaded"] >= 64
        assert asked["computed"]["not_loaded"] + asked["reused"].get("memory", 0) == 512
        said = costs(server)
        read = said["tiers"]["faulty"]["read"]
        assert read["observations"] > 0
        assert read_s(server) > 0.1
        total = said["loads"]["total"]
        assert total == said["loads"]["recent"]
        assert total["computed"] >= 1
        assert total["computed_stored_tokens"] >= 512
        counted = samples(server)
        name = "kvkeep_store_computed_stored_tokens_total"
        assert counted[name,] == total["computed_stored_tokens"]
        assert counted["kvkeep_store_loads_total", "computed"] == total["computed"]
        assert counted["kvkeep_recomputed_tokens_total", "not_loaded"] > 0


def test_what_is_fast_is_loaded(tmp_path):
    tiers = ("memory://4MiB", f"file://{tmp_path}/tier?size=64MiB")
    prompts = [tokens_of(seed, LONG) for seed in range(20, 32)]
    with storing(*tiers, num_pages=512, token_s=0.0005) as server:
        for prompt in prompts:
            ask(server, prompt)
        forget_pool(server, *prompts)
        before = costs(server)["loads"]["total"]["loads"]  # those whose answer, nothing, was late
        asked = server.http.post("/kv/explain", json={"prompt": prompts[0]}).json()
        assert sum(asked["reused"].values()) > 0
        for prompt in prompts:
            explained(server, ask(server, prompt))
        said = costs(server)
        total = said["loads"]["total"]
        assert total["loads"] - before == len(prompts)
        assert total["loaded_tokens"] > 0
        assert total["loaded_tokens"] == server.engine.stats().loaded_tokens
        assert said["tiers"]["file"]["write"]["observations"] > 0
        json.dumps(said, allow_nan=False)
