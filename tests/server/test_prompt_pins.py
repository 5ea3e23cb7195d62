"""Prompts that clients ask to be kept: pins in the pool and in the tiers, and their caps."""

from __future__ import annotations

import random
import threading
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
from kvkeep.serve.server.pins import Keep, PoolPins, StorePins
from kvkeep.store import KVStore

PAGE, BLOCK = 16, 64
A, B = Namespace(tenant="a"), Namespace(tenant="b")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    return PagedCache(200, PAGE, clock=clock)


def prompt(number, length=320):
    return np.arange(number * 10_000, number * 10_000 + length, dtype=np.int32)


def publish(cache, tokens, namespace=A):
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()


def keep(cache, pins, tokens, *wanted, namespace=A):
    publish(cache, tokens, namespace)
    asked = Keep(wanted)
    pins.keep(tokens, namespace, asked)
    cache.check()
    pins.check()
    return asked.pinned_tokens, asked.unpinned_tokens


def test_what_is_kept_outlives_what_is_not_and_ends(cache, clock):
    pins = PoolPins(cache, clock)
    assert keep(cache, pins, prompt(1), (170, 300.0)) == (160, 0)
    for number in range(2, 40):
        publish(cache, prompt(number))
    assert cache.match(prompt(1), A).num_tokens == 160
    clock.now += 301
    for number in range(40, 80):
        publish(cache, prompt(number))
    assert cache.match(prompt(1), A).num_tokens == 0
    assert pins.count == 0


def test_beyond_the_cap_the_beginning_is_kept(cache, clock):
    pins = PoolPins(cache, clock)  # 20 pages each
    assert keep(cache, pins, prompt(1, 400), (400, 300.0)) == (320, 80)
    assert keep(cache, pins, prompt(2), (320, 300.0)) == (0, 320)
    assert keep(cache, pins, prompt(2), (320, 300.0), namespace=B) == (320, 0)
    assert (pins.pinned_tokens, pins.unpinned_tokens) == (640, 400)
    clock.now += 300
    assert keep(cache, pins, prompt(3), (100, 300.0)) == (96, 0)


def test_a_page_under_several_pins_counts_once(cache, clock):
    pins = PoolPins(cache, clock)
    for _ in range(50):
        assert keep(cache, pins, prompt(1), (160, 3600.0), (320, 300.0)) == (320, 0)
    assert pins.count == 20
    assert cache.stats().pinned_pages == 20
    clock.now += 301
    assert pins.count == 10
    publish(cache, prompt(9, 16))  # the cache ends pins when it is used
    assert cache.stats().pinned_pages == 10


def test_a_shorter_time_does_not_end_a_longer_one_early(cache, clock):
    pins = PoolPins(cache, clock)
    keep(cache, pins, prompt(1), (160, 3600.0))
    keep(cache, pins, prompt(1), (160, 300.0))
    clock.now += 3000
    assert pins.count == 10
    assert cache.stats().pinned_pages == 10


def test_all_together_have_half_and_the_largest_gives_way(cache, clock):
    pins = PoolPins(cache, clock)
    for tenant in range(5):
        for number in range(2):
            tokens = prompt(2 * tenant + number, 160)
            name = Namespace(tenant=str(tenant))
            assert keep(cache, pins, tokens, (160, 300.0), namespace=name) == (160, 0)
    assert pins.count == 100
    assert keep(cache, pins, prompt(90, 160), (160, 300.0), namespace=A) == (160, 0)
    assert pins.given_tokens == 160
    assert pins.count == 100
    for tenant in range(50):  # names that somebody makes up displace nobody with as little
        name = Namespace(tenant=f"made up {tenant}")
        keep(cache, pins, prompt(100 + tenant, 320), (320, 300.0), namespace=name)
    assert cache.match(prompt(90, 160), A).num_tokens == 160
    assert cache.stats().pinned_pages == pins.count == 100


def test_what_is_not_cached_is_not_pinned(cache, clock):
    pins = PoolPins(cache, clock)
    asked = Keep([(160, 300.0)])
    pins.keep(prompt(1), A, asked)
    assert (asked.pinned_tokens, asked.unpinned_tokens) == (0, 160)
    assert keep(cache, pins, prompt(2), (15, 300.0)) == (0, 0)  # less than a page


# --- the tiers, with a store whose pins are sets ---------------------------------------------


class _Store:
    """Notes which blocks are pinned; waits in each call while ``free`` is not set."""

    block_tokens = BLOCK
    geometry = SimpleNamespace(bytes_per_token=1)

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


def engine_on(store):
    return SimpleNamespace(store=store, store_tenant=lambda space: space.tenant)


@pytest.mark.parametrize("seed", range(8))
def test_what_the_store_pins_is_what_the_table_counts(seed):
    draw = random.Random(seed)
    store = _Store(120)
    pins = StorePins(engine_on(store), after_s=(0.0, 0.002, 0.005))
    try:
        for _ in range(150):
            store.free.clear() if draw.random() < 0.3 else store.free.set()
            tokens = np.array([draw.randrange(2) if n % 100 == 0 else n for n in range(700)])
            tokens = tokens[: draw.randrange(30, 700)].astype(np.int32)
            ends = sorted({draw.randrange(1, len(tokens)), len(tokens)})
            asked = Keep([(at, draw.choice([100.0, 200.0])) for at in ends])
            pins.keep(tokens, Namespace(tenant=draw.choice("abcdefgh")), asked)
            assert asked.pinned_tokens + asked.unpinned_tokens == len(tokens)
            pins.check()
        store.free.set()
        eventually(lambda: len(store.blocks) == pins.count, 10)
        assert pins.count <= 60
        assert pins.given_tokens > 0
        assert pins.lost_tokens == 0
    finally:
        store.free.set()
        pins.close()


def test_pins_that_are_due_later_are_set_at_the_end():
    store = _Store(100)
    pins = StorePins(engine_on(store), after_s=(3600.0,))
    asked = Keep([(300, 3600.0)])
    pins.keep(np.arange(300, dtype=np.int32), A, asked)
    pins.keep(np.arange(400, dtype=np.int32), B, Keep([(400, 3600.0)]))
    assert not store.blocks
    pins.close()
    assert len(store.blocks) == 5 + 7
    pins.keep(np.arange(500, dtype=np.int32), B, asked)  # too late: promised, and not set
    pins.close()


# --- over HTTP ---------------------------------------------------------------------------------

LONG = "Cleaning up docstrings is done by inspect. " * 12
POINT = {"type": "ephemeral"}


def message(server, text, salt, ttl="5m"):
    point = {"cache_control": {**POINT, "ttl": ttl}} if ttl else {}
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        return client.messages.create(
            model=NAME, max_tokens=1, system=[{"type": "text", "text": text, **point}],
            messages=[{"role": "user", "content": "Hi"}], extra_body={"cache_salt": salt},
        ).usage  # fmt: skip


@pytest.mark.model
def test_a_breakpoint_survives_a_flood_and_no_request_fails(start_server):
    with start_server(num_pages=200) as server:
        first = message(server, LONG, "a")
        written = first.cache_creation_input_tokens
        assert first.kvkeep == {
            "loaded_tokens": 0, "pinned_tokens": written // PAGE * PAGE, "unpinned_tokens": 0,
        }  # fmt: skip
        message(server, f"Another one. {LONG}", "b", None)
        for number in range(30):
            message(server, f"{number} is the number. {LONG}", "flood", None)
        assert message(server, LONG, "a").cache_read_input_tokens >= written // PAGE * PAGE
        assert message(server, f"Another one. {LONG}", "b", None).cache_read_input_tokens == 0
        usages = [message(server, f"Number {number}. {LONG}", "greedy") for number in range(12)]
        assert usages[-1].kvkeep["pinned_tokens"] == 0
        assert usages[-1].kvkeep["unpinned_tokens"] > 0
        text = server.http.get("/metrics").text
        assert 'kvkeep_retained_tokens_total{outcome="beyond the budget"} 0.0' not in text
        server.assert_idle()


@contextmanager
def serving(tiers, **settings):
    runner = Runner.load(bundled_model(), num_pages=256, page_size=PAGE, device="cpu")
    with KVStore(
        runner.geometry, model=NAME, revision=runner.identity, tiers=tiers, block_tokens=BLOCK
    ) as store:
        engine = Engine(
            runner,
            PagedCache(256, PAGE),
            Tokenizer.load(bundled_model()),
            limits=Limits(max_running=8),
            store=store,
        )
        server = Running(engine, ServerSettings(name=NAME, **settings))
        server.store = store
        try:
            yield server
        finally:
            server.stop()


def room(tokens):
    """The bytes of so many tokens in a tier, about: records have heads."""
    geometry = Runner.load(bundled_model(), num_pages=8, page_size=PAGE, device="cpu").geometry
    return int(tokens * geometry.bytes_per_token * 1.05)


def ask(server, number, retention=None, salt="a", **more):
    tokens = [(number * 37 + at * at) % 450 + 20 for at in range(320)]
    usage = server.openai().completions.create(
        model=NAME, prompt=tokens, max_tokens=1, temperature=0,
        extra_body={"cache_salt": salt, "prompt_cache_retention": retention, **more},
    ).usage  # fmt: skip
    return usage.model_extra["kvkeep"]


@pytest.mark.model
@pytest.mark.usefixtures("load_first")
def test_a_day_in_the_tiers_outlives_what_others_store(tmp_path):
    tiers = ["memory://1MiB", f"file://{tmp_path}/tier?size={room(80 * BLOCK)}"]
    with serving(tiers) as server:
        told = ask(server, 1, "24h")
        assert told == {"loaded_tokens": 0, "retained_tokens": 320, "unretained_tokens": 0}
        assert ask(server, 2, "in_memory") == {"loaded_tokens": 0}
        kept = ask(server, 3, "24h")
        assert kept["unretained_tokens"] == 320 - kept["retained_tokens"] > 0
        assert kept["unretained"] == "over_budget"
        assert ask(server, 4, "24h", kvkeep={"store": False})["unretained"] == "not_stored"
        eventually(lambda: server.store.stats().tiers[1].pinned_bytes >= room(300))
        for number in range(5, 40):
            ask(server, number, salt="flood")
        assert server.flush(PATIENCE_S)
        assert server.store.stats().tiers[1].counters["evictions"] > 0
        server.engine.cache.clear()
        assert ask(server, 1)["loaded_tokens"] >= 319 // PAGE * PAGE
        assert ask(server, 2)["loaded_tokens"] == 0
        text = server.http.get("/metrics").text
        assert 'kvkeep_store_retained_tokens_total{outcome="lost"} 0.0' in text
        server.assert_idle()


@pytest.mark.model
def test_a_server_without_tiers_says_so(server):
    assert ask(server, 1, "24h") == {
        "loaded_tokens": 0, "retained_tokens": 0, "unretained_tokens": 320,
        "unretained": "no_tiers",
    }  # fmt: skip


@pytest.mark.model
@pytest.mark.usefixtures("load_first")
def test_an_hour_of_cache_control_reaches_the_tiers_and_survives_the_server(tmp_path):
    """Shared memory keeps its pins when the process ends: another flood, by the next server."""
    tiers = [f"shm://{room(60 * BLOCK)}?dir={tmp_path}"]
    with serving(tiers) as server:
        assert "retained_tokens" not in message(server, LONG, "a").kvkeep
        usage = message(server, LONG, "a", "1h")
        kept = usage.kvkeep["retained_tokens"]
        assert 2 * BLOCK <= kept <= usage.cache_read_input_tokens
        eventually(lambda: max(tier.pinned_bytes for tier in server.store.stats().tiers) > 0)
    with serving(tiers) as server:
        for number in range(3, 25):
            ask(server, number, salt="flood")
        assert server.flush(PATIENCE_S)
        assert message(server, LONG, "a", None).cache_read_input_tokens >= kept


@pytest.mark.model
def test_the_requests_of_a_cache_key_replace_none_of_each_other(server):
    client = server.openai()

    def complete(text):
        return client.completions.create(
            model=NAME, prompt=text, max_tokens=1,
            extra_body={"cache_salt": "key", "prompt_cache_key": "team"},
        ).usage.prompt_tokens_details.cached_tokens  # fmt: skip

    assert complete(LONG) == 0
    assert complete(f"Another. {LONG}") <= 1  # the beginning of all prompts
    assert server.engine.cache.stats().pages_dead == 0
    assert complete(LONG) > 100
    told = server.http.get("/kv/requests").json()["requests"]
    assert sum(one["session"] == "team" for one in told) >= 2
