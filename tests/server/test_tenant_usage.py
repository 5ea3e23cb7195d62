"""What tenants used, over HTTP: the ledger of a real server against what its answers say."""

from __future__ import annotations

from collections import Counter

import pytest
from real_server import NAME, Running, eventually

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

LONG = "Cleaning up docstrings is done by inspect. " * 12


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """A server with tiers and a key."""
    folder = tmp_path_factory.mktemp("tiers")
    runner = Runner.load(bundled_model(), num_pages=256, page_size=16, device="cpu")
    tiers = ["memory://4MiB", f"file://{folder}?size=64MiB"]
    with KVStore(
        runner.geometry, model=NAME, revision=runner.identity, tiers=tiers, block_tokens=64
    ) as store:
        engine = Engine(
            runner, PagedCache(256, 16), Tokenizer.load(bundled_model()),
            limits=Limits(max_running=8), store=store,
        )  # fmt: skip
        server = Running(engine, ServerSettings(name=NAME, api_key="secret", weights={"a": 2.0}))
        server.store, server.sums = store, {}
        server.http.headers["Authorization"] = "Bearer secret"
        try:
            yield server
        finally:
            server.stop()


def usage(server, **query):
    answer = server.http.get("/kv/usage", params=query).raise_for_status().json()
    return answer, {row["cache_salt"]: row for row in answer["tenants"]}


def answered(server) -> dict[str, Counter[str]]:
    """Let three tenants ask, once; return what the answers say of each."""
    if server.sums:
        return server.sums
    client = server.openai(api_key="secret")
    sums: dict[str, Counter[str]] = {salt: Counter() for salt in ("a", "b", "=1+1")}
    for number, salt in enumerate(["a", "a", "b", "=1+1", "a", "b"]):
        told = client.chat.completions.create(
            model=NAME, max_tokens=4 + number, temperature=0,
            messages=[{"role": "user", "content": LONG}], extra_body={"cache_salt": salt},
        ).usage  # fmt: skip
        own = sums[salt]
        own["requests"] += 1
        own["prompt_tokens"] += told.prompt_tokens
        own["read_tokens"] += told.prompt_tokens_details.cached_tokens
        own["computed_tokens"] += told.prompt_tokens - told.prompt_tokens_details.cached_tokens
        own["generated_tokens"] += told.completion_tokens
    eventually(lambda: not server.engine.has_work)
    assert server.flush(30)
    server.sums = sums
    return sums


def test_the_rows_are_the_sums_of_the_answers(tiered):
    clock = tiered.service.watching.tenants.ledger
    client = tiered.openai(api_key="secret")
    sums = answered(tiered)
    answer, rows = usage(tiered)
    assert answer["model"] == NAME
    assert answer["since"] < answer["until"]
    for salt, own in sums.items():
        assert {name: rows[salt][name] for name in own} == own, salt
        pages = tiered.engine.cache.namespaces()
        held = sum(count for space, count in pages.items() if space.tenant == salt)
        assert rows[salt]["pool_tokens"] == held * 16
        assert rows[salt]["stored_tokens"] > 0
        # Memory and disk have each token, and a block with its head takes a little more.
        assert 2 * rows[salt]["stored_tokens"] <= rows[salt]["tier_tokens"]
        assert rows[salt]["tier_tokens"] <= 2.3 * rows[salt]["stored_tokens"]
    assert rows["a"]["read_tokens"] > rows["b"]["read_tokens"] > 0 == rows["=1+1"]["read_tokens"]
    assert rows[None]["requests"] == 0
    tiered.engine.cache.clear()
    assert usage(tiered)[1]["a"]["pool_tokens"] == 0
    told = client.completions.create(
        model=NAME, prompt=[9] * 130, max_tokens=1, extra_body={"cache_salt": "load"}
    )
    tiered.engine.cache.clear()
    assert tiered.flush(30)
    told = client.completions.create(
        model=NAME, prompt=[9] * 130, max_tokens=1, extra_body={"cache_salt": "load"}
    )
    assert usage(tiered)[1]["load"]["loaded_tokens"] == told.usage.model_extra["kvkeep"][
        "loaded_tokens"
    ] > 0  # fmt: skip
    assert clock.tenants


def test_the_largest_alone_and_a_search(tiered):
    answered(tiered)
    whole = usage(tiered)[0]["tenants"]
    assert usage(tiered)[0]["count"] == len(whole) - 1
    few, rows = usage(tiered, most=1, order="computed_tokens")
    first, rest = few["tenants"]
    assert few["count"] == len(whole) - 1
    assert first["computed_tokens"] == max(row["computed_tokens"] for row in whole[:-1])
    assert rest["cache_salt"] is None
    for name in ("requests", "prompt_tokens", "computed_tokens", "pool_tokens"):
        assert first[name] + rest[name] == sum(row[name] for row in whole)
    found, rows = usage(tiered, search="=1")
    assert found["count"] == 1
    assert set(rows) == {"=1+1", None}
    for query in ({"most": 0}, {"order": "age"}, {"search": "x" * 257}):
        assert tiered.http.get("/kv/usage", params=query).status_code == 400


def test_it_needs_the_key_as_all_the_others(tiered):
    assert tiered.http.get("/kv/usage", headers={"Authorization": "Bearer no"}).status_code == 401


def test_the_metrics_have_a_series_for_the_large_ones(tiered):
    answered(tiered)
    text = tiered.http.get("/metrics").text
    rows = usage(tiered)[1]
    assert 'kvkeep_namespace_tokens_total{kind="prompt",namespace="a"}' in text
    for number in range(30):
        body = {"prompt": [number + 9] * 60, "max_tokens": 1, "cache_salt": f"made up {number}"}
        tiered.http.post("/v1/completions", json=body).raise_for_status()
    text = tiered.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("kvkeep_namespace_tokens_total")]
    prompts = [line for line in lines if 'kind="prompt"' in line]
    assert len(prompts) <= 21
    whole = sum(float(line.rpartition(" ")[2]) for line in prompts)
    assert whole == sum(row["prompt_tokens"] for row in rows.values()) + 30 * 60
