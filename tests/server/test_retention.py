"""Pins for clients: what they protect, their budgets, and their end; over HTTP, and the ledger."""

from __future__ import annotations

import anthropic
import numpy as np
import pytest
from real_server import NAME, PATIENCE_S

from kvkeep.core.cache import PagedCache
from kvkeep.core.keys import Namespace
from kvkeep.serve.server.retention import Keep, Retention

PAGE = 16
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
    return PagedCache(100, PAGE, clock=clock)


def prompt(number, length=320):
    return np.arange(number * 10_000, number * 10_000 + length, dtype=np.int32)


def publish(cache, tokens, namespace=A):
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()


def keep(cache, retention, tokens, *wanted, namespace=A):
    publish(cache, tokens, namespace)
    asked = Keep(wanted)
    retention.keep(tokens, namespace, asked)
    cache.check()
    return asked.pinned_tokens, asked.unpinned_tokens


def test_what_is_kept_outlives_what_is_not_and_ends(cache, clock):
    retention = Retention(cache, 0.25, clock)
    assert keep(cache, retention, prompt(1), (170, 300.0)) == (160, 0)
    for number in range(2, 40):
        publish(cache, prompt(number))
    assert cache.match(prompt(1), A).num_tokens == 160
    clock.now += 301
    for number in range(40, 80):
        publish(cache, prompt(number))
    assert cache.match(prompt(1), A).num_tokens == 0
    assert retention.num_pages == 0


def test_beyond_the_budget_the_beginning_is_kept(cache, clock):
    retention = Retention(cache, 0.15, clock)
    assert keep(cache, retention, prompt(1), (320, 300.0)) == (240, 80)
    assert keep(cache, retention, prompt(2), (320, 300.0)) == (0, 320)
    assert keep(cache, retention, prompt(2), (320, 300.0), namespace=B) == (240, 80)
    assert (retention.pinned_tokens, retention.unpinned_tokens) == (480, 480)
    clock.now += 300
    assert keep(cache, retention, prompt(3), (100, 300.0)) == (96, 0)


def test_a_page_under_several_pins_counts_once(cache, clock):
    retention = Retention(cache, 0.2, clock)
    for _ in range(50):
        assert keep(cache, retention, prompt(1), (160, 3600.0), (320, 300.0)) == (320, 0)
    assert retention.num_pages == 20
    assert cache.stats().pinned_pages == 20
    assert len(cache._core.pins.pins) == 2
    clock.now += 301
    assert retention.num_pages == 10
    publish(cache, prompt(9, 16))  # the cache ends pins when it is used
    assert cache.stats().pinned_pages == 10


def test_a_shorter_time_does_not_end_a_longer_one_early(cache, clock):
    retention = Retention(cache, 0.2, clock)
    keep(cache, retention, prompt(1), (160, 3600.0))
    keep(cache, retention, prompt(1), (160, 300.0))
    clock.now += 3000
    assert retention.num_pages == 10
    assert cache.stats().pinned_pages == 10


def test_all_together_have_half_of_the_pool(cache, clock):
    retention = Retention(cache, 0.2, clock)
    for one in range(10):
        pinned, _ = keep(
            cache, retention, prompt(1, 160), (160, 300.0), namespace=Namespace(tenant=str(one))
        )
        assert pinned >= 80, "less than a fair share of the half"
        assert retention.num_pages == min(50, 10 * (one + 1))
    assert cache.stats().pinned_pages == 50
    tokens = retention.tokens_of()
    assert len(tokens) == 10
    assert max(tokens.values()) - min(tokens.values()) <= 96
    assert retention.given_tokens > 0


def test_made_up_tenants_cannot_use_up_the_shares_of_named_ones(cache, clock):
    retention = Retention(cache, 0.2, clock, weights={"a": 3.0})
    for one in range(50):
        spaces = Namespace(tenant=f"made up {one}")
        keep(cache, retention, prompt(one + 5, 320), (320, 3600.0), namespace=spaces)
    assert retention.num_pages == 50
    assert keep(cache, retention, prompt(1), (320, 300.0)) == (320, 0)
    for one in range(50, 100):
        spaces = Namespace(tenant=f"made up {one}")
        keep(cache, retention, prompt(one + 5, 320), (320, 3600.0), namespace=spaces)
    assert retention.tokens_of()["a"] == 320
    assert cache.match(prompt(1), A).num_tokens == 320


def test_what_is_not_cached_is_not_pinned(cache, clock):
    retention = Retention(cache, 0.2, clock)
    asked = Keep([(160, 300.0)])
    retention.keep(prompt(1), A, asked)
    assert (asked.pinned_tokens, asked.unpinned_tokens) == (0, 160)
    assert keep(cache, retention, prompt(2), (15, 300.0)) == (0, 0)  # less than a page


# --- over HTTP ---------------------------------------------------------------------------------

LONG = "Cleaning up docstrings is done by inspect. " * 12
POINT = {"type": "ephemeral"}


def ask(client, text, salt, *, marked=True):
    system = {"type": "text", "text": text, **({"cache_control": POINT} if marked else {})}
    return client.messages.create(
        model=NAME, max_tokens=1, system=[system], messages=[{"role": "user", "content": "Hi"}],
        extra_body={"cache_salt": salt},
    ).usage  # fmt: skip


@pytest.mark.model
def test_a_breakpoint_survives_a_flood_and_no_request_fails(start_server):
    with (
        start_server(num_pages=64, pin_share=0.25) as server,
        anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        first = ask(client, LONG, "a")
        written = first.cache_creation_input_tokens
        assert first.kvkeep == {
            "loaded_tokens": 0, "pinned_tokens": written // PAGE * PAGE, "unpinned_tokens": 0,
        }  # fmt: skip
        ask(client, f"Another one. {LONG}", "b", marked=False)
        for number in range(12):
            ask(client, f"{number} is the number. {LONG}", "flood", marked=False)
        assert ask(client, LONG, "a").cache_read_input_tokens >= written // PAGE * PAGE
        assert ask(client, f"Another one. {LONG}", "b").cache_read_input_tokens == 0
        usages = [ask(client, f"Number {number}. {LONG}", "greedy") for number in range(12)]
        assert usages[-1].kvkeep["pinned_tokens"] == 0
        assert usages[-1].kvkeep["unpinned_tokens"] > 0
        text = server.http.get("/metrics").text
        assert 'kvkeep_retained_tokens_total{outcome="beyond the budget"} 0.0' not in text
        server.assert_idle()


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
    (live,) = [
        one for one in server.http.get("/kv/live").json()["sessions"] if one["session"] == "team"
    ]
    assert live["requests"] >= 2
