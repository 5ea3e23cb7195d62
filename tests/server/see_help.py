"""What the tests of explanations share: asking, and accounts that have to come out even."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from real_server import NAME, Running, eventually

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.backends import Backend

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PAGE = 16
BLOCK = 64


def ask(server: Running, prompt: Any, salt: str | None = None, **more: Any) -> dict[str, Any]:
    """The answer to a prompt, of one token unless told otherwise."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt, **more}
    answer: dict[str, Any] = server.http.post(COMPLETIONS, json=body).raise_for_status().json()
    return answer


def explained(server: Running, answer: dict[str, Any]) -> dict[str, Any]:
    """The explanation of an answer to one prompt, which must agree with its usage."""
    told: dict[str, Any] = server.http.get(f"/kv/explain/{answer['id']}").raise_for_status().json()
    accounts(told)
    usage = answer["usage"]
    assert told["prompt_tokens"] == usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert sum(told["reused"].values()) == cached
    assert sum(told["computed"].values()) == usage["prompt_tokens"] - cached
    loaded = usage["kvkeep"]["loaded_tokens"]
    assert sum(n for source, n in told["reused"].items() if source != "pool") == loaded
    assert told["outcome"] == "done"
    return told


def accounts(told: dict[str, Any]) -> None:
    """Spans cover the prompt, in order, without gaps; sums are those of the spans."""
    at = 0
    sums: dict[str, dict[str, int]] = {"reused": {}, "computed": {}}
    for span in told["spans"]:
        assert span["start"] == at < span["stop"]
        assert (span["source"] is None) != (span["reason"] is None)
        name = span["source"] or span["reason"]
        kind = sums["reused" if span["source"] else "computed"]
        kind[name] = kind.get(name, 0) + span["stop"] - at
        at = span["stop"]
    assert at == told["prompt_tokens"]
    assert sums == {"reused": told["reused"], "computed": told["computed"]}


def only(told: dict[str, Any], reason: str) -> dict[str, Any]:
    """The one span of a reason."""
    (span,) = [span for span in told["spans"] if span["reason"] == reason]
    return span


def tokens_of(seed: int, count: int) -> list[int]:
    """Token ids like no other seed's."""
    chance = random.Random(seed)
    return [chance.randrange(5, 4000) for _ in range(count)]


@contextmanager
def storing(
    *tiers: str | Backend,
    num_pages: int = 256,
    what_if: float | None = None,
    load_timeout: float = 2.0,
    flush_timeout_s: float = 1.0,
    token_s: float = 0.0,
    **settings: Any,
) -> Iterator[Running]:
    """A server over a store of these tiers, in blocks of 64 tokens.

    Computing takes ``token_s`` longer a token: so much that loading is faster on any machine.
    """
    runner = Runner.load(bundled_model(), num_pages=num_pages, page_size=PAGE, device="cpu")
    revision = runner.identity
    with KVStore(
        runner.geometry, model=NAME, revision=revision, tiers=tiers, block_tokens=BLOCK
    ) as store:
        engine = Engine(
            runner,
            PagedCache(num_pages, PAGE, what_if=what_if),
            Tokenizer.load(bundled_model()),
            limits=Limits(max_running=8),
            store=store,
            load_timeout=load_timeout,
        )
        if token_s:
            forward = runner.forward

            def slowly(pieces: Any) -> Any:
                time.sleep(token_s * sum(len(piece.tokens) for piece in pieces))
                return forward(pieces)

            runner.forward = slowly  # type: ignore[method-assign]
        server = Running(
            engine, ServerSettings(name=NAME, flush_timeout_s=flush_timeout_s, **settings)
        )
        try:
            yield server
        finally:
            server.stop()


def forget_pool(server: Running, *prompts: list[int]) -> None:
    """Let the pool forget everything, once the store has all blocks of ``prompts``."""
    written(server, *prompts)
    eventually(lambda: not server.engine.has_work)
    server.engine.cache.clear()


def written(server: Running, *prompts: list[int]) -> None:
    """Wait until all tiers have what they take of ``prompts``."""
    store = server.engine.store
    assert store is not None
    eventually(
        lambda: all(store.lookup(one).tokens >= len(one) // BLOCK * BLOCK for one in prompts)
    )
    server.flush(5.0)  # in vain where a tier is away
