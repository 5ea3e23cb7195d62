"""The server over a store: what it tells, clears, and leaves behind."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from real_server import NAME, Running

from kvkeep.cache import PagedCache
from kvkeep.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.models import bundled_model
from kvkeep.server import Settings
from kvkeep.store import KVStore

pytestmark = pytest.mark.model

COMPLETIONS = "/v1/completions"
PROMPT = [7, 8, 9, 10] * 80


@contextmanager
def serving(folder):
    runner = Runner.load(bundled_model(), num_pages=512, page_size=16, device="cpu")
    tiers = ["memory://16MiB", f"file://{folder}/tier?size=256MiB"]
    revision = runner.identity
    with KVStore(
        runner.geometry, model=NAME, revision=revision, tiers=tiers, block_tokens=64
    ) as store:
        cache, tokenizer = PagedCache(512, 16), Tokenizer.load(bundled_model())
        engine = Engine(runner, cache, tokenizer, limits=Limits(max_running=8), store=store)
        server = Running(engine, Settings(name=NAME))
        try:
            yield server
        finally:
            server.stop()


def ask(server, salt=None, **more):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "cache_salt": salt, **more}
    return server.http.post(COMPLETIONS, json=body).raise_for_status().json()


def loaded(answer):
    return answer["usage"]["kvkeep"]["loaded_tokens"]


def metrics(server):
    lines = server.http.get("/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_a_server_after_a_server(tmp_path):
    with serving(tmp_path) as server:
        first = ask(server)
        ask(server, "tenant")
        assert loaded(first) == 0
    with serving(tmp_path) as server:
        again = ask(server)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert loaded(again) == len(PROMPT) - 1
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
        assert loaded(ask(server)) == 0  # it is in the pool now
        assert loaded(ask(server, "nobody")) == 0
        assert loaded(ask(server, "tenant")) == len(PROMPT) - 1
        told = metrics(server)
        assert float(told["kvkeep_loaded_tokens_total"]) == 2 * len(PROMPT) - 2
        assert float(told["kvkeep_store_loaded_tokens_total"]) == 2 * len(PROMPT) - 2
        assert float(told['kvkeep_store_hits_total{tier="file"}']) >= 2 * 5
        assert float(told['kvkeep_store_used_bytes{tier="file"}']) > 0
        assert float(told['kvkeep_store_breaker_open{tier="file"}']) == 0
        stats = server.stats()["store"]
        assert [tier["name"] for tier in stats["tiers"]] == ["memory", "file"]
        server.assert_idle()


def test_clearing_one_salt_and_all(tmp_path):
    with serving(tmp_path) as server:
        for salt in (None, "a", "b"):
            ask(server, salt)
        cleared = server.http.post("/kv/clear", json={"cache_salt": "a"}).json()
        assert cleared["pages"] > 0
        assert cleared["stored_bytes"] > 0
        assert loaded(ask(server, "a")) == 0
        server.engine.cache.clear()
        assert loaded(ask(server, "b")) == len(PROMPT) - 1
        assert server.http.post("/kv/clear", json={}).json()["stored_bytes"] > 0
        for salt in (None, "a", "b"):
            answer = ask(server, salt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_requests_that_are_not_to_be_stored(tmp_path):
    with serving(tmp_path) as server:
        ask(server, kvkeep={"store": False})
    with serving(tmp_path) as server:
        assert loaded(ask(server)) == 0
