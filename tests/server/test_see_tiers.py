"""What tiers give and do not give, over HTTP: from where it came, and why the rest did not."""

from __future__ import annotations

import json
import time

import pytest
from real_server import eventually
from see_help import BLOCK, ask, explained, forget_pool, only, storing, tokens_of

from faults import FaultyBackend
from kvkeep.store.backends.memory import MemoryBackend

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

BIG = "memory://16MiB"
LONG = 257  # four blocks, and the last token


@pytest.fixture
def faulty():
    """A tier below memory that does what it is told; its faults end with the test."""
    backend = FaultyBackend(MemoryBackend(64 << 20))
    backend.timeout = 0.3
    yield backend
    backend.heal()


def test_from_memory_and_from_a_file(tmp_path):
    tiers = (BIG, f"file://{tmp_path}/tier?size=64MiB")
    prompt = tokens_of(1, LONG)
    with storing(*tiers) as server:
        assert explained(server, ask(server, prompt))["computed"] == {"new": LONG}
        forget_pool(server, prompt)
        told = explained(server, ask(server, prompt))
        assert told["reused"] == {"memory": LONG - 1}
        assert told["computed"] == {"last_token": 1}
        assert "memory" in told["sentence"]
        longer = explained(server, ask(server, prompt + tokens_of(2, 40)))
        assert longer["reused"]["pool"] >= 256
        assert set(longer["computed"]) <= {"new", "page_remainder"}
    with storing(*tiers) as server:
        told = explained(server, ask(server, prompt))
        assert told["reused"] == {"file": LONG - 1}
        live = server.http.get("/kv/live").json()
        memory, file = live["tiers"]
        assert (memory["name"], file["name"]) == ("memory", "file")
        assert file["hits"] >= 3
        assert file["blocks"] >= 3
        assert live["totals"]["loaded_tokens"] == live["totals"]["cached_tokens"] == LONG - 1
        assert sum(reused for _, _, reused in live["history"]) == LONG - 1
        assert live["tenants"][0]["reused_tokens"] == LONG - 1


def test_a_damaged_file(tmp_path):
    tiers = ("memory://4MiB", f"file://{tmp_path}/tier?size=64MiB")
    prompt = tokens_of(3, LONG)
    with storing(*tiers) as server:
        ask(server, prompt)
    files = list((tmp_path / "tier").glob("?" * 32 + "/" + "?" * 64))
    assert len(files) >= 3
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[5000] ^= 1
        file.write_bytes(raw)
    with storing(*tiers) as server:
        told = explained(server, ask(server, prompt))
        assert only(told, "damaged")["evidence"]["tier"] == "file"
        assert told["computed"]["damaged"] >= 64
        assert told["reused"] == {}
        assert "checksum" in told["sentence"]
        assert server.http.get("/kv/live").json()["tiers"][1]["damaged"] >= 1


def test_a_tier_that_hangs(faulty):
    with storing("memory://1MiB", faulty, load_timeout=0.2) as server:
        prompt = tokens_of(4, LONG)
        ask(server, prompt)
        forget_pool(server, prompt)
        push_out_of_memory(server)
        faulty.hang("get", "sizes")
        began = time.monotonic()
        told = explained(server, ask(server, prompt))
        span = only(told, "tier_unavailable")
        assert span["evidence"]["tier"] == "faulty"
        assert span["evidence"]["why"] in {"late", "error"}
        assert span["evidence"]["waited_s"] > 0.1
        assert told["computed"]["tier_unavailable"] >= 64
        # While it hangs, the server tells how it is all the same.
        live = server.http.get("/kv/live")
        assert live.status_code == 200
        assert time.monotonic() - began < 20
        faulty.heal()


def push_out_of_memory(server):
    """Ask for so much else that the little memory in front keeps nothing of before."""
    for seed in range(100, 112):
        ask(server, tokens_of(seed, LONG))
    forget_pool(server)


def test_a_tier_that_fails_and_is_left_alone(faulty):
    with storing("memory://1MiB", faulty) as server:
        prompts = [tokens_of(seed, LONG) for seed in range(5, 12)]
        for prompt in prompts:
            ask(server, prompt)
        forget_pool(server, prompt)
        push_out_of_memory(server)
        faulty.fail("get", "sizes")
        why = []
        for prompt in prompts:
            told = explained(server, ask(server, prompt))
            span = only(told, "tier_unavailable")
            assert span["evidence"]["tier"] == "faulty"
            why.append(span["evidence"]["why"])
        assert set(why) <= {"error", "breaker"}
        assert why[-1] == "breaker"
        assert server.http.get("/kv/live").json()["tiers"][1]["breaker"] == "open"
        summary = server.http.get("/kv/summary?last=7").json()
        assert summary["causes"][0]["reason"] == "tier_unavailable"


def test_a_tier_that_is_too_small():
    with storing("memory://1MiB") as server:
        prompt = tokens_of(6, LONG)
        ask(server, prompt)
        push_out_of_memory(server)
        told = explained(server, ask(server, prompt))
        evidence = only(told, "evicted")["evidence"]
        assert (evidence["tier"], evidence["cause"]) == ("memory", "pressure")
        assert evidence["policy"] == "lru"
        assert evidence["ago_s"] >= 0
        assert told["computed"]["evicted"] >= 128


def test_a_tier_that_has_no_room(faulty):
    with storing("memory://1MiB", faulty) as server:
        faulty.fill_up()
        prompt = tokens_of(12, LONG)
        ask(server, prompt)
        push_out_of_memory(server)
        told = explained(server, ask(server, prompt))
        assert only(told, "not_admitted")["evidence"] == {"tier": "faulty", "why": "no_room"}
        assert told["computed"]["not_admitted"] >= 2 * BLOCK


def test_cleared_from_the_store():
    with storing(BIG) as server:
        prompt = tokens_of(7, LONG)
        ask(server, prompt)
        assert server.flush()
        server.http.post("/kv/clear", json={}).raise_for_status()
        told = explained(server, ask(server, prompt))
        assert only(told, "evicted")["evidence"]["cause"] == "cleared"


def test_not_to_be_stored_anywhere():
    with storing(BIG) as server:
        prompt = tokens_of(8, LONG)
        ask(server, prompt, kvkeep={"store": False})
        told = explained(server, ask(server, prompt))
        assert only(told, "not_admitted")["evidence"]["why"] == "store_false"


def test_what_a_store_never_got_has_the_pools_own_reason():
    with storing(BIG) as server:
        base = tokens_of(9, 300)
        ask(server, base)
        changed = [*base[:20], 3, *base[21:]]
        told = explained(server, ask(server, changed))
        assert told["computed"]["diverged"] > 200
        other = explained(server, ask(server, base, "salt"))
        assert "other_namespace" in other["computed"] or "new" in other["computed"]


def test_a_prompt_that_is_not_run_is_looked_up_in_the_store_too(tmp_path, faulty):
    prompt = tokens_of(10, LONG)
    with storing("memory://1MiB", faulty) as server:

        def told():
            return server.http.post("/kv/explain", json={"prompt": prompt}).json()

        assert told()["computed"] == {"new": LONG}
        ask(server, prompt)
        forget_pool(server, prompt)
        assert told()["reused"] == {"memory": LONG - 1}
        push_out_of_memory(server)
        before = server.engine.cache.stats(), faulty.calls["get"]
        assert told()["reused"] == {"faulty": LONG - 1}
        assert (server.engine.cache.stats(), faulty.calls["get"]) == before  # nothing is read


def test_places_have_no_secrets():
    """A server that is not there, so that what is told of it does not come from it."""
    secret = "pass-the-word"
    tiers = (BIG, f"valkey://someone:{secret}@127.0.0.1:1/0?timeout=0.1s")
    with storing(*tiers) as server:
        prompt = tokens_of(11, LONG)
        ask(server, prompt)
        forget_pool(server, prompt)
        answer = ask(server, prompt)
        for path in ("live", "stats", "requests", "summary", f"explain/{answer['id']}"):
            told = server.http.get(f"/kv/{path}")
            assert told.status_code == 200
            assert secret not in told.text
        places = [tier["place"] for tier in server.http.get("/kv/live").json()["tiers"]]
        assert places[1].startswith("valkey://127.0.0.1:1")
        metrics = server.http.get("/metrics").text
        assert secret not in metrics


def test_live_is_right_with_a_store_and_json(tmp_path):
    with storing(BIG, f"file://{tmp_path}/tier?size=1MiB") as server:
        for seed in range(30, 40):
            ask(server, tokens_of(seed, LONG))
        eventually(lambda: server.flush(5.0))
        time.sleep(0.6)
        live = json.loads(server.http.get("/kv/live").text)
        stats = server.stats()
        for told, tier in zip(live["tiers"], stats["store"]["tiers"], strict=True):
            for name in ("hits", "misses", "drops", "errors", "damaged", "read_bytes"):
                assert told[name] == tier["counters"][name]
            assert told["used_bytes"] == tier["used_bytes"]
            assert told["capacity"] == tier["capacity"]
