"""Models, tokens, health, metrics, the cache's state, and the document that describes it all."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.serve.engine import Limits

pytestmark = pytest.mark.model

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LONG = "What does textwrap.dedent do? " * 10


def test_the_model_is_listed(server):
    client = server.openai()
    (model,) = client.models.list().data
    assert model.id == "kvkeep-tiny"
    assert client.models.retrieve("kvkeep-tiny") == model


def test_a_name_may_have_slashes(start_server):
    with start_server(name="org/model-1.0") as server:
        client = server.openai()
        assert client.models.retrieve("org/model-1.0").id == "org/model-1.0"
        answer = client.completions.create(model="org/model-1.0", prompt="x", max_tokens=1)
        assert answer.model == "org/model-1.0"


@pytest.mark.parametrize("text", ["hello", "", "naïve 日本 🙂", "a\x00b", "<|end|>"])
def test_text_to_tokens_and_back(server, text):
    answer = server.http.post("/tokenize", json={"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert answer["tokens"] == server.engine.tokenizer.encode(text).tolist()
    back = server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert back == ("" if text == "<|end|>" else text)


def test_tokens_of_a_conversation_are_those_that_are_counted(server):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()
    chat = {"messages": messages, "max_tokens": 1}
    used = server.http.post("/v1/chat/completions", json=chat).json()["usage"]
    assert used["prompt_tokens"] == tokens["count"]


def test_health(server):
    answer = server.http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def metrics(server):
    """Name and labels → value; it is what Prometheus' own parser reads."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_count_what_was_done(start_server):
    with start_server() as server:
        twice = {**GREEDY, "prompt": LONG, "n": 2}
        drafted = {**GREEDY, "prompt": LONG, "max_tokens": 40, "kvkeep": {"draft_tokens": 4}}
        used = [
            server.http.post(COMPLETIONS, json=asked).json()["usage"]["prompt_tokens_details"]
            for asked in (twice, twice, drafted)
        ]
        server.http.post(COMPLETIONS, json={**GREEDY, "prompt": [5000]})
        found = metrics(server)
        prompt = len(server.engine.tokenizer.encode(LONG))
        assert found["kvkeep_requests_total", "completions", "length"] == 3
        assert found["kvkeep_requests_total", "completions", "refused"] == 1
        assert found["kvkeep_prompt_tokens_total",] == 3 * prompt
        cached = sum(details["cached_tokens"] for details in used)
        assert found["kvkeep_cached_tokens_total",] == cached > prompt
        assert found["kvkeep_generated_tokens_total",] == 2 * 2 * 4 + 40
        assert found["kvkeep_time_to_first_token_seconds_count",] == 3
        assert found["kvkeep_request_seconds_count",] == 3
        assert found["kvkeep_inter_token_seconds_count",] >= 2 * 2 * 3
        stats = server.engine.cache.stats()
        pages = {key[1]: value for key, value in found.items() if key[0] == "kvkeep_pages"}
        assert sum(pages.values()) == stats.pages_total
        assert pages["free"] == stats.pages_free
        assert found["kvkeep_requests_running",] == found["kvkeep_requests_waiting",] == 0
        assert found["kvkeep_preemptions_total",] == 0


def test_metrics_of_two_servers_are_their_own(start_server, server):
    server.http.post(COMPLETIONS, json={**GREEDY, "prompt": "x"})
    with start_server() as other:
        assert metrics(other)["kvkeep_prompt_tokens_total",] == 0


def test_stats(server):
    server.http.post(COMPLETIONS, json={**GREEDY, "prompt": [7], "max_tokens": 1})
    stats = server.stats()
    assert stats["cache"]["pages_total"] == 1024
    assert stats["engine"]["steps"] > 0


# --- the tree --------------------------------------------------------------------------------


@pytest.fixture
def planted(server):
    """Three prompts of which two share 32 tokens, and one of another tenant."""
    server.http.post("/kv/clear", json={}).raise_for_status()
    head = [7] * 32
    for tail, salt in ((8, None), (9, None), (10, "tenant")):
        asked = {**GREEDY, "prompt": [*head, *[tail] * 40], "max_tokens": 1, "cache_salt": salt}
        server.http.post(COMPLETIONS, json=asked).raise_for_status()
    return server


def test_clearing_one_tenant_leaves_the_others(planted):
    clear = planted.http.post("/kv/clear", json={"cache_salt": "tenant"})
    assert clear.json() == {"pages": 4, "stored_bytes": 0, "tiers": []}
    assert planted.stats()["cache"]["pages_cached"] == 6
    everything = planted.http.post("/kv/clear", json={}).json()
    assert everything == {"pages": 6, "stored_bytes": 0, "tiers": []}
    assert planted.stats()["cache"]["pages_used"] == 0


# --- the document ----------------------------------------------------------------------------


def test_the_document_describes_what_there_is(server):
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/messages", "/v1/messages/count_tokens",
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}",
        "/tokenize", "/detokenize", "/health", "/livez", "/ready", "/metrics",
        "/kv/stats", "/kv/clear", "/kv/remove",
        "/kv/sessions/{session}", "/kv/explain", "/kv/explain/{id}", "/kv/requests", "/kv/summary",
        "/kv/live", "/kv/map", "/kv/map/{id}", "/kv/cost",
    }  # fmt: skip
    names = set(document["components"]["schemas"])
    assert "ErrorResponse" in names
    assert "HTTPValidationError" not in names  # nothing here answers so
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            refused = operation["responses"]["default"]["content"]["application/json"]
            assert refused["schema"]["$ref"].endswith(("/ErrorResponse", "/MessagesErrorResponse"))
    prompt = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert len(prompt["anyOf"]) == 4


def test_the_examples_of_the_document_are_answered(server):
    document = server.http.get("/openapi.json").json()
    asked = 0
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is None or path == "/kv/remove":  # it needs a key
            continue
        schema = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        for example in document["components"]["schemas"][schema]["examples"]:
            assert server.http.post(path, json=example).status_code == 200, (path, example)
            asked += 1
    assert asked >= 5


def test_the_queue_may_be_without_bound(start_server):
    with start_server(limits=Limits(max_running=2)) as server:
        answer = server.http.post(COMPLETIONS, json={**GREEDY, "prompt": ["x"] * 100})
        assert len(answer.json()["choices"]) == 100
        server.assert_idle()


def test_nothing_is_left_behind(server):
    server.assert_idle()
