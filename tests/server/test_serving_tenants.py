"""Tenants over the real server: one copy of a declared system message, and private rests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from real_server import NAME, Running, eventually

from kvkeep.core.cache import PagedCache
from kvkeep.core.eviction import LRU
from kvkeep.core.eviction.shares import Shares
from kvkeep.serve.engine import Engine, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM = {"role": "system", "content": "You are the assistant of Example Ltd. " * 8}


@pytest.fixture
def running() -> Iterator[Running]:
    tokenizer = Tokenizer.load(bundled_model())
    runner = Runner.load(bundled_model(), num_pages=300, page_size=16, device="cpu")
    cache = PagedCache(runner.num_pages, runner.page_size, eviction=Shares(LRU))
    row = tokenizer.chat([SYSTEM, {"role": "user", "content": "0"}])
    cache.public.declare(row[: len(row) // 16 * 16 - 16])
    server = Running(Engine(runner, cache, tokenizer), ServerSettings(name=NAME))
    yield server
    server.stop()


def cached(running: Running, salt: str, text: str) -> tuple[int, str]:
    answer = running.openai().chat.completions.create(
        model=NAME,
        messages=[SYSTEM, {"role": "user", "content": text}],
        max_tokens=2,
        extra_body={"cache_salt": salt},
    )
    return answer.usage.prompt_tokens_details.cached_tokens, answer.id


def test_the_system_message_is_shared_and_nothing_else(running: Running) -> None:
    secret = "My plan is a long one, with many steps that nobody else should ever learn of. " * 2
    assert cached(running, "a", secret)[0] == 0
    public = cached(running, "b", "Something else, of about the same length as that. " * 4)[0]
    assert public > 0
    assert cached(running, "a", secret)[0] > public + 16
    assert cached(running, "c", secret)[0] == public, "another tenant's prompt was found"
    eventually(lambda: not running.engine.has_work)
    spaces = running.engine.cache.namespaces()
    assert sorted(space.tenant for space in spaces if not space.scope) == ["a", "b", "c"]
    running.assert_idle()


def test_explanations_and_the_map_go_on(running: Running) -> None:
    for salt in "aab":
        name = cached(running, salt, "Tell me something.")[1]
        told = running.http.get(f"/kv/explain/{name}")
        assert told.status_code == 200, told.text
        spans = told.json()
    assert spans
    assert running.http.get("/kv/map").status_code == 200
    assert running.stats()["engine"]["observer_errors"] == 0
