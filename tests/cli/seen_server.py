"""A real server of the tiny model with a store, to be looked at; and a few requests for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import Listener, ServerSettings, bind, create_app, url_of
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYSTEM = (
    "You are a helpful assistant. It is {time}. Answer in one sentence, and be polite about it."
)


@contextmanager
def seen(*, num_pages: int = 256, tiers: Sequence[str] = (), **settings: Any) -> Iterator[str]:
    """Serve, over tiers if there are any; gives the URL."""
    runner = Runner.load(bundled_model(), num_pages=num_pages, page_size=16, device="cpu")
    cache = PagedCache(num_pages, 16)
    store = None
    if tiers:
        store = KVStore(
            runner.geometry, model="kvkeep-tiny", revision=runner.identity, tiers=tiers,
            block_tokens=64,
        )  # fmt: skip
    engine = Engine(runner, cache, Tokenizer.load(bundled_model()), store=store)
    app = create_app(engine, ServerSettings(name="kvkeep-tiny", drain_timeout_s=0, **settings))
    listening: Future[None] = Future()
    with bind("127.0.0.1", 0) as bound, ThreadPoolExecutor(1, "server under test") as thread:
        listener = Listener(app, ready=partial(listening.set_result, None))
        served = thread.submit(lambda: asyncio.run(listener.serve([bound])))
        try:
            listening.result(30)
            yield url_of(bound)
        finally:
            listener.stop()
            served.result(30)
            if store is not None:
                store.close()


def chat(url: str, time: str, question: str, key: str | None = None, **fields: Any) -> str:
    """Ask under a system prompt with the time in it; the id of the answer."""
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM.format(time=time)},
            {"role": "user", "content": question},
        ],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    name: str = answer.raise_for_status().json()["id"]
    return name
