"""The server over a store: what it tells, clears, and leaves behind."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from real_server import NAME, Running

from kvkeep.core.cache import PagedCache
from kvkeep.core.events import Stored
from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KEY = "a key of this server"
PROMPT = [7, 8, 9, 10] * 80


@contextmanager
def serving(folder, codec="raw", **settings):
    runner = Runner.load(bundled_model(), num_pages=512, page_size=16, device="cpu")
    tiers = ["memory://16MiB", f"file://{folder}/tier?size=256MiB&codec={codec}"]
    revision = runner.identity
    with KVStore(
        runner.geometry, model=NAME, revision=revision, tiers=tiers, block_tokens=64
    ) as store:
        cache, tokenizer = PagedCache(512, 16), Tokenizer.load(bundled_model())
        engine = Engine(runner, cache, tokenizer, limits=Limits(max_running=8), store=store)
        server = Running(engine, ServerSettings(name=NAME, **settings))
        server.store = store
        if "api_key" in settings:
            server.http.headers["Authorization"] = f"Bearer {settings['api_key']}"
        try:
            yield server
        finally:
            server.stop()


def ask(server, salt=None, **more):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "cache_salt": salt, **more}
    return server.http.post(COMPLETIONS, json=body).raise_for_status().json()


def loaded(answer):
    return answer["usage"]["kvkeep"]["loaded_tokens"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


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


def test_lossy_tokens_are_told(tmp_path):
    with serving(tmp_path, "int8") as server:
        assert "lossy_tokens" not in ask(server)["usage"]["kvkeep"]
    with serving(tmp_path, "int8") as server:
        again = ask(server)
        assert loaded(again) == len(PROMPT) - 1
        assert again["usage"]["kvkeep"]["lossy_tokens"] == len(PROMPT) - 1
        told = server.http.get(f"/kv/explain/{again['id']}").raise_for_status().json()
        assert "file, int8" in {span["source"] for span in told["spans"]}
        assert "kvkeep_loaded_tokens_total" in metrics(server)
        assert "lossy_tokens" not in ask(server)["usage"]["kvkeep"]  # from the pool


def test_clearing_one_salt_and_all(tmp_path):
    with serving(tmp_path) as server:
        for salt in (None, "a", "b"):
            ask(server, salt)
        gone = server.http.post("/kv/clear", json={"cache_salt": "a"}).json()
        assert gone["pages"] > 0
        assert gone["stored_bytes"] > 0
        assert sum(tier["freed_bytes"] for tier in gone["tiers"]) == gone["stored_bytes"]
        assert all(tier["complete"] for tier in gone["tiers"])
        assert loaded(ask(server, "a")) == 0
        server.engine.cache.clear()
        assert loaded(ask(server, "b")) == len(PROMPT) - 1
        assert server.http.post("/kv/clear", json={}).json()["stored_bytes"] > 0
        for salt in (None, "a", "b"):
            answer = ask(server, salt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def remove(server, **asked):
    return server.http.post("/kv/remove", json=asked).raise_for_status().json()


def test_a_prompt_is_removed_from_the_pool_and_all_tiers(tmp_path):
    with serving(tmp_path, api_key=KEY) as server:
        for salt in (None, "a"):
            ask(server, salt)
        other = {"prompt": [3, 4, 5, 6] * 40}
        ask(server, **other)
        assert server.flush(10)
        gone = remove(server, prompt=PROMPT, cache_salt="a")
        assert gone["complete"]
        assert gone["tokens"] == len(PROMPT)
        assert gone["pages"] == len(PROMPT) // 16
        assert gone["pages_in_use"] == 0
        assert [tier["name"] for tier in gone["tiers"]] == ["memory", "file"]
        assert all(tier["freed_bytes"] > 0 and tier["complete"] for tier in gone["tiers"])
        again = remove(server, prompt=PROMPT, cache_salt="a")
        assert (again["pages"], [tier["freed_bytes"] for tier in again["tiers"]]) == (0, [0, 0])
        assert cached(ask(server, "a")) == 0
        assert cached(ask(server)) == len(PROMPT) - 1  # another salt's
        assert cached(ask(server, **other)) == 159
        server.assert_idle()
        remove(server, prompt=PROMPT, cache_salt="a")
    with serving(tmp_path) as server:  # nothing of it lies on the disk
        assert cached(ask(server, "a")) == 0
        assert loaded(ask(server)) == len(PROMPT) - 1
        assert loaded(ask(server, **other)) == 159


def test_texts_and_conversations_are_removed(tmp_path):
    with serving(tmp_path, api_key=KEY) as server:
        text = "A private text. " * 40
        messages = [{"role": "user", "content": text}]
        for path, asked in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": messages})):
            asked["cache_salt"] = path
            body = {**asked, "max_tokens": 1}
            server.http.post(path, json=body).raise_for_status()
            assert remove(server, **asked)["pages"] > 0
            assert cached(server.http.post(path, json=body).json()) == 0


def test_what_a_running_request_uses_is_named(tmp_path):
    with serving(tmp_path, api_key=KEY) as server:
        ask(server)
        cache = server.engine.cache
        with cache.open([*PROMPT, 1], server.service.namespace(None)):
            gone = remove(server, prompt=PROMPT)
            assert (gone["pages"], gone["pages_in_use"]) == (0, len(PROMPT) // 16)
            assert not gone["complete"]
        gone = remove(server, prompt=PROMPT)
        assert (gone["pages"], gone["pages_in_use"]) == (len(PROMPT) // 16, 0)


@pytest.mark.parametrize("what", ["clear", "remove"])
def test_a_tier_that_cannot_delete_is_named(tmp_path, what):
    with serving(tmp_path, api_key=KEY) as server:
        ask(server)
        assert server.flush(10)
        (tier,) = server.store._tiered.tiers

        def fail(*_):
            raise OSError("the disk is gone")

        tier.backend.delete = fail
        body = {"prompt": PROMPT} if what == "remove" else {}
        gone = server.http.post(f"/kv/{what}", json=body).raise_for_status().json()
        assert [(one["name"], one["complete"]) for one in gone["tiers"]] == [
            ("memory", True), ("file", False),
        ]  # fmt: skip
        assert cached(ask(server)) == 0


def test_without_a_key_nobody_removes(tmp_path):
    with serving(tmp_path) as server:
        ask(server)
        refused = server.http.post("/kv/remove", json={"prompt": PROMPT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_api_key")
        assert cached(ask(server)) == len(PROMPT) - 1


def test_requests_that_are_not_to_be_stored(tmp_path):
    with serving(tmp_path) as server:
        ask(server, kvkeep={"store": False})
    with serving(tmp_path) as server:
        assert loaded(ask(server)) == 0


def stored_rows(server):
    """Whatever `ask` stores from now on: its tokens, the answer's among them."""
    events = []
    server.engine.cache.subscribe(events.append)

    def tell(salt, **extras):
        events.clear()
        ask(server, salt, max_tokens=100, ignore_eos=True, kvkeep=extras)
        row = [token for one in events if isinstance(one, Stored) for token in one.tokens.tolist()]
        assert row[: len(PROMPT)] == PROMPT
        assert len(row) > len(PROMPT) + 80
        return row

    return tell


def reuse(server, salt, row):
    body = {"prompt": [*row, 5], "max_tokens": 1, "cache_salt": salt}
    answer = server.http.post(COMPLETIONS, json=body).raise_for_status().json()
    return answer["id"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_answers_that_are_kept_out_of_the_tiers(tmp_path):
    """The prompt is there, the answer is not; why is said."""
    with serving(tmp_path) as server:
        run = stored_rows(server)
        private, public = run("a", answers=False), run("b")
        assert reuse(server, "a", private)[1] == len(private)  # the pool has all of it
        private = run("c", answers=False)
        server.engine.cache.clear()
        id, cached = reuse(server, "c", private)
        assert cached == len(PROMPT)
        assert reuse(server, "b", public)[1] >= len(PROMPT) + 64
        told = server.http.get(f"/kv/explain/{id}").json()
        (found,) = [one for one in told["spans"] if one["evidence"].get("why") == "answer"]
        assert found["reason"] == "not_admitted"
        assert found["start"] == len(PROMPT)
        assert found["stop"] >= len(PROMPT) + 64
        assert "they are an answer, and those were not to be stored" in told["sentence"]
