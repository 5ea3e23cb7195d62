"""Prompts that are kept in the tiers for a time: the pins, the budget, and what usage says."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import anthropic
import numpy as np
import pytest
from real_server import NAME, PATIENCE_S, Running, eventually

from kvkeep.core.cache import PagedCache
from kvkeep.core.keys import Namespace
from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings
from kvkeep.serve.server.retention import Keep
from kvkeep.serve.server.tier_retention import TierRetention
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

BLOCK = 64
A, B = Namespace(tenant="a"), Namespace(tenant="b")


@contextmanager
def serving(tiers, *, retained=True, **settings):
    runner = Runner.load(bundled_model(), num_pages=256, page_size=16, device="cpu")
    with KVStore(
        runner.geometry, model=NAME, revision=runner.identity, tiers=tiers, block_tokens=BLOCK
    ) as store:
        engine = Engine(
            runner,
            PagedCache(256, 16),
            Tokenizer.load(bundled_model()),
            limits=Limits(max_running=8),
            store=store,
        )
        server = Running(engine, ServerSettings(name=NAME, **settings))
        server.store = store
        server.service.tier_retention._pins._after_s = (0.02, 0.1, 0.3)
        try:
            yield server
        finally:
            server.stop()


def room(tokens):
    """The bytes of so many tokens in a tier, about: records have heads."""
    geometry = Runner.load(bundled_model(), num_pages=8, page_size=16, device="cpu").geometry
    return int(tokens * geometry.bytes_per_token * 1.05)


def prompt(number, length=320):
    return [(number * 37 + at * at) % 450 + 20 for at in range(length)]


def ask(server, number, retention=None, salt="a", **more):
    usage = server.openai().completions.create(
        model=NAME, prompt=prompt(number, **more), max_tokens=1, temperature=0,
        extra_body={"cache_salt": salt, "prompt_cache_retention": retention},
    ).usage  # fmt: skip
    return usage, usage.model_extra["kvkeep"]


def pinned(server):
    return max(tier["pinned_bytes"] for tier in server.stats()["store"]["tiers"])


def test_a_day_in_the_tiers_outlives_what_others_store(tmp_path):
    tiers = ["memory://1MiB", f"file://{tmp_path}/tier?size={room(40 * BLOCK)}"]
    with serving(tiers, pin_share=0.25) as server:
        usage, kept = ask(server, 1, "24h")
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert kept == {"loaded_tokens": 0, "retained_tokens": 320, "unretained_tokens": 0}
        assert ask(server, 2, "in_memory")[1] == {"loaded_tokens": 0}
        file = server.store.stats().tiers[1]
        eventually(lambda: server.store.stats().tiers[1].pinned_bytes >= room(300))
        for number in range(3, 20):
            ask(server, number, salt="flood")
        assert server.flush(PATIENCE_S)
        assert server.store.stats().tiers[1].counters["evictions"] > file.counters["evictions"]
        server.engine.cache.clear()
        assert ask(server, 1)[1]["loaded_tokens"] >= 319 // 16 * 16
        assert ask(server, 2)[1]["loaded_tokens"] == 0
        told = server.http.get("/metrics").text
        assert 'kvkeep_store_retained_tokens_total{outcome="kept"} 320.0' in told
        assert 'kvkeep_store_retained_tokens_total{outcome="lost"} 0.0' in told
        assert "kvkeep_store_retained_blocks 5.0" in told
        server.assert_idle()


def test_beyond_the_budget_it_is_said_and_no_request_fails(tmp_path):
    tiers = ["memory://1MiB", f"file://{tmp_path}/tier?size={room(40 * BLOCK)}"]
    with serving(tiers, pin_share=0.1) as server:
        most = server.service.tier_retention._budget.most_each * BLOCK
        assert 128 <= most < 320
        kept = ask(server, 1, "24h")[1]
        assert kept["retained_tokens"] == most
        assert kept["unretained_tokens"] == 320 - most
        assert kept["unretained"] == "over_budget"
        assert ask(server, 2, "24h")[1]["retained_tokens"] == 0
        assert ask(server, 1, "24h")[1]["retained_tokens"] == most  # again: its own
        assert ask(server, 2, "24h", salt="b")[1]["retained_tokens"] == most
        with server.openai() as client:
            stream = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "Hi. " * 200}], max_tokens=2,
                stream=True, stream_options={"include_usage": True}, prompt_cache_retention="24h",
                extra_body={"kvkeep": {"store": False}},
            )  # fmt: skip
            said = list(stream)[-1].usage.model_extra["kvkeep"]
        assert said["unretained"] == "not_stored"
        assert said["unretained_tokens"] > 200


def test_a_server_without_tiers_says_so(server):
    prompts = {"prompt": [prompt(1), prompt(2)], "max_tokens": 1, "prompt_cache_retention": "24h"}
    said = server.http.post("/v1/completions", json=prompts).json()["usage"]["kvkeep"]
    assert said == {
        "loaded_tokens": 0, "retained_tokens": 0, "unretained_tokens": 640,
        "unretained": "no_tiers",
    }  # fmt: skip
    refused = server.http.post("/v1/completions", json={**prompts, "prompt_cache_retention": "1h"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_cache_retention"


def test_an_hour_of_cache_control_reaches_the_tiers_and_survives_the_server(tmp_path):
    """Shared memory keeps its pins when the process ends: another flood, by the next server."""
    tiers = [f"shm://{room(60 * BLOCK)}?dir={tmp_path}"]
    system = {"type": "text", "text": "Cleaning up docstrings is done by inspect. " * 12}

    def message(server, ttl):
        marked = {**system, "cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else system
        with anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            return client.messages.create(
                model=NAME, max_tokens=1, system=[marked],
                messages=[{"role": "user", "content": "Hi"}], extra_body={"cache_salt": "a"},
            ).usage  # fmt: skip

    with serving(tiers, pin_share=0.25) as server:
        assert "retained_tokens" not in message(server, "5m").kvkeep
        usage = message(server, "1h")
        kept = usage.kvkeep["retained_tokens"]
        assert 2 * BLOCK <= kept <= usage.cache_read_input_tokens
        eventually(lambda: pinned(server) > 0)
    with serving(tiers, pin_share=0.25) as server:
        for number in range(3, 25):
            ask(server, number, salt="flood")
        assert server.flush(PATIENCE_S)
        assert message(server, None).cache_read_input_tokens >= kept


# --- the thread, with a store whose pins are sets ------------------------------------------------


class _Store:
    """Notes which blocks are pinned; waits in each call while ``free`` is not set."""

    block_tokens = BLOCK
    geometry = SimpleNamespace(bytes_per_token=1)
    tiers = ("memory", "file")

    def __init__(self, blocks):
        self.free = threading.Event()
        self.free.set()
        self.blocks: dict[tuple[str, bytes], None] = {}
        self._stats = SimpleNamespace(tiers=[SimpleNamespace(capacity=blocks * BLOCK)])

    def stats(self):
        return self._stats

    def _ids(self, tokens, tenant, start=0):
        ends = [*range(BLOCK, len(tokens), BLOCK), len(tokens)]
        return [(tenant, tokens[:end].tobytes()) for end in ends if end > start]

    def pin(self, tokens, seconds, *, tenant):
        assert self.free.wait(10)
        self.blocks |= dict.fromkeys(self._ids(tokens, tenant))
        return len(tokens)

    def unpin(self, tokens, start=0, *, tenant):
        assert self.free.wait(10)
        for one in self._ids(tokens, tenant, start):
            self.blocks.pop(one, None)
        return 0


@pytest.mark.parametrize("seed", range(8))
def test_what_the_store_pins_is_what_the_budget_counts(seed):
    draw = random.Random(seed)
    store = _Store(60)
    engine = SimpleNamespace(store=store, store_tenant=lambda space: space.tenant)
    kept = TierRetention(engine, 0.3, weights={"a": 2.0}, after_s=(0.0, 0.002, 0.005))
    try:
        for _ in range(150):
            store.free.clear() if draw.random() < 0.3 else store.free.set()
            tokens = np.array([draw.randrange(2) if n % 100 == 0 else n for n in range(700)])
            tokens = tokens[: draw.randrange(30, 700)].astype(np.int32)
            ends = sorted({draw.randrange(1, len(tokens)), len(tokens)})
            keep = Keep([(at, draw.choice([100.0, 200.0])) for at in ends])
            kept.keep(tokens, Namespace(tenant=draw.choice("abcd")), keep)
            assert keep.pinned_tokens + keep.unpinned_tokens == len(tokens)
        store.free.set()
        eventually(lambda: not kept._pins._due)
        eventually(lambda: len(store.blocks) == kept.num_blocks, 10)
        counts = Counter(tenant for tenant, _ in store.blocks)
        assert {name: count * BLOCK for name, count in counts.items()} == kept.tokens_of()
        assert kept.num_blocks <= 30
        assert kept.given_tokens > 0
        assert kept.lost_tokens == 0
    finally:
        store.free.set()
        kept.close()


def test_pins_that_are_due_later_are_set_at_the_end():
    store = _Store(60)
    engine = SimpleNamespace(store=store, store_tenant=lambda space: space.tenant)
    kept = TierRetention(engine, 0.3, after_s=(3600.0,))
    keep = Keep([(300, 3600.0)])
    kept.keep(np.arange(300, dtype=np.int32), A, keep)
    kept.keep(np.arange(400, dtype=np.int32), B, Keep([(400, 3600.0)]))
    assert not store.blocks
    kept.close()
    assert len(store.blocks) == 5 + 7
    kept.keep(np.arange(500, dtype=np.int32), B, keep)  # too late: promised, and not set
    kept.close()
