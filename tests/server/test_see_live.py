"""/kv/live: small, shared, monotonic, and right."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest
from real_server import eventually
from see_help import COMPLETIONS, ask, tokens_of

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

FRESH_S = 0.6  # an answer is half a second old at most


def live(server):
    return server.http.get("/kv/live").raise_for_status().json()


def test_it_says_what_is(start_server):
    with start_server(num_pages=64, what_if=1.0) as server:
        empty = live(server)
        assert empty["totals"] == dict.fromkeys(empty["totals"], 0)
        assert empty["ttft"]["cold"] == {"count": 0, "p50_s": None, "p95_s": None}
        assert (empty["model"], empty["policy"], empty["page_size"]) == ("kvkeep-tiny", "lru", 16)
        assert (empty["tiers"], empty["tenants"]) == ([], [])
        assert empty["text"]
        prompt = tokens_of(1, 100)
        for salt in (None, None, "red"):
            ask(server, prompt, salt, kvkeep={"session": "talk"})
        for seed in range(2, 12):
            ask(server, tokens_of(seed, 100))
        time.sleep(FRESH_S)
        told = live(server)
        stats = server.stats()
        cache, engine = stats["cache"], stats["engine"]
        for name in ("requests", "prompt_tokens", "cached_tokens", "generated_tokens"):
            assert told["totals"][name] == engine[name]
        assert cache["evicted_pages"] > 0
        pages = told["pages"]
        assert (
            pages["total"]
            == 64
            == sum(pages[name] for name in ("free", "cached_evictable", "cached_held", "private"))
        )
        assert told["ttft"]["cold"]["count"] == 12
        assert told["ttft"]["warm"]["count"] == 1
        assert told["ttft"]["warm"]["p50_s"] == told["ttft"]["warm"]["p95_s"] > 0
        assert sum(prompt for _, prompt, _ in told["history"]) == 1300
        assert sum(reused for _, _, reused in told["history"]) == 96
        assert told["what_if"]
        assert {one["times"] for one in told["what_if"]} >= {0.5, 1, 2}
        none, red = told["tenants"]
        assert (none["cache_salt"], none["requests"], none["reused_tokens"]) == ("", 12, 96)
        assert (red["cache_salt"], red["requests"]) == ("red", 1)
        assert none["pages"] + red["pages"] == cache["pages_cached"]
        # All of one moment: the sources of reuse, the totals, and the history.
        (pool,) = told["reused"]
        assert (pool["source"], pool["tokens"]) == ("pool", 96)
        assert pool["saved_s"] > 0
        (evicted,) = told["losses"]
        assert (evicted["kind"], evicted["what"], evicted["place"]) == (
            "eviction", "evicted", "pool",
        )  # fmt: skip
        pages = cache["evicted_pages"]
        assert (evicted["minute"], evicted["ten_minutes"], evicted["total"]) == (pages,) * 3
        assert told["at"] == pytest.approx(time.time(), abs=30)
        assert told["uptime_s"] > FRESH_S
        # Small: a second is not worth more.
        assert len(server.http.get("/kv/live").content) < 16_384


def test_those_who_ask_at_once_are_told_the_same(server):
    cache = server.engine.cache
    looks = 0
    real = cache.stats

    def counted():
        nonlocal looks
        looks += 1
        return real()

    cache.stats = counted
    try:
        with ThreadPoolExecutor(8) as pool:
            began = time.monotonic()
            told = list(pool.map(lambda _: server.http.get("/kv/live").text, range(200)))
            seconds = time.monotonic() - began
    finally:
        del cache.stats
    assert looks <= 2 + seconds / 0.5
    assert len(set(told)) == looks or len(set(told)) <= looks + 1


def test_totals_never_go_back_and_move_while_it_works(server):
    body = {"prompt": tokens_of(3, 60), "max_tokens": 600, "ignore_eos": True, "stream": True}
    seen = []
    with server.http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for _ in range(3):
            seen.append(live(server))
            time.sleep(FRESH_S)
    for earlier, later in pairwise(seen):
        assert later["at"] > earlier["at"]
        for name, total in earlier["totals"].items():
            assert later["totals"][name] >= total
    assert seen[-1]["totals"]["generated_tokens"] > seen[0]["totals"]["generated_tokens"]
    assert max(one["running"] for one in seen) == 1
    assert max(one["pages"]["private"] + one["pages"]["cached_held"] for one in seen) > 0
    eventually(lambda: not live(server)["running"])
    server.assert_idle()


def test_requests_that_are_refused_are_counted_apart(start_server):
    with start_server() as server:
        for _ in range(3):
            body = {"prompt": tokens_of(4, 9000), "max_tokens": 1}
            assert server.http.post(COMPLETIONS, json=body).status_code == 400
        time.sleep(FRESH_S)
        (refused,) = live(server)["losses"]
        assert (refused["kind"], refused["what"], refused["place"], refused["minute"]) == (
            "refusal", "refused", "requests", 3,
        )  # fmt: skip


def test_what_is_told_needs_the_key(start_server):
    with start_server(api_key="open sesame") as server:
        assert server.http.get("/kv/live").status_code == 401
        headers = {"Authorization": "Bearer open sesame"}
        assert server.http.get("/kv/live", headers=headers).is_success
        for path in ("requests", "summary", "explain/x"):
            assert server.http.get(f"/kv/{path}").status_code == 401
        assert server.http.post("/kv/explain", json={"prompt": "a"}).status_code == 401


def test_a_look_that_fails_is_tried_again(server, monkeypatch):
    time.sleep(FRESH_S)
    with monkeypatch.context() as patch:

        def broken():
            raise RuntimeError("as was asked")

        patch.setattr(server.engine, "stats", broken)
        assert httpx.get(f"{server.url}/kv/live").status_code == 500
    assert httpx.get(f"{server.url}/kv/live").status_code == 200


def test_reading_needs_the_key(start_server):
    with start_server(api_key="open sesame") as server:
        for path in ("live", "requests", "summary", "explain/x"):
            assert server.http.get(f"/kv/{path}").status_code == 401
        assert server.http.post("/kv/explain", json={"prompt": "a"}).status_code == 401
