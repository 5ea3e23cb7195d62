"""A swarm of clients: what they ask, how they leave, and what they were told."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WORDS = [
    "return",
    "a",
    "copy",
    "of",
    "the",
    "string",
    "with",
    "all",
    "characters",
    "removed",
    "from",
    "list",
    "dict",
    "sorted",
    "by",
    "keys",
    "and",
    "values",
    "if",
    "path",
    "is",
    "an",
    "open",
    "file",
    "then",
    "close",
    "read",
    "write",
    "it",
    "to",
    "standard",
    "output",
    "or",
    "raise",
    "an",
    "error",
]  # what the bundled model has read, each about one token
TENANTS = (None, "red", "blue")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Ask:
    """One request. It is given up after ``seconds``, or after ``events`` of its stream."""

    path: str
    body: dict[str, Any]
    stream: bool = True
    seconds: float | None = None
    events: int | None = None

    @property
    def tenant(self) -> str | None:
        """Whose pages it may use."""
        return self.body.get("cache_salt")

    @property
    def stores(self) -> bool:
        """Whether others may use its pages."""
        return self.body.get("kvkeep", {}).get("store", True)

    @property
    def leaves(self) -> bool:
        """Whether it may go before the end."""
        return self.seconds is not None or self.events is not None

    def plain(self) -> dict[str, Any]:
        """The body without what changes the speed, or whose pages are used: never the answer."""
        plain = {**self.body, "kvkeep": {**self.body.get("kvkeep", {})}}
        plain.pop("cache_salt", None)
        for name in ("store", "draft_tokens"):
            plain["kvkeep"].pop(name, None)
        return plain


@dataclass
class Told:
    """What came of a request: by choice, its text and why it ended; ``whole`` at the very end."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    on_event: Callable[[], None] = lambda: None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt tokens."""
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    def add(self, event: dict[str, Any]) -> None:
        """An event of a stream, or a whole answer."""
        assert "error" not in event, event
        self.on_event()
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in self.reasons, "something came after the end"
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.texts[index] = self.texts.get(index, "") + (said.get("content") or "")
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]


async def swarm(url: str, asks: Sequence[Ask], rng: random.Random) -> list[Told]:
    """Ask all of it at once, each over a connection of its own, beginning within a moment."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    begins = [rng.uniform(0, 0.5) for _ in asks]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        return await asyncio.gather(*map(ask, [client] * len(asks), asks, begins))


async def ask(
    client: httpx.AsyncClient,
    asked: Ask,
    begin: float = 0.0,
    *,
    on_event: Callable[[], None] = lambda: None,
) -> Told:
    """Ask after ``begin`` seconds; returns what came until it was given up."""
    told = Told(on_event=on_event)
    await asyncio.sleep(begin)
    with suppress(TimeoutError):
        async with asyncio.timeout(asked.seconds):
            await (_streamed if asked.stream else _at_once)(client, asked, told)
    return told


async def _at_once(client: httpx.AsyncClient, asked: Ask, told: Told) -> None:
    response = await client.post(asked.path, json=asked.body)
    assert response.status_code == 200, response.text
    told.add(response.json())
    told.whole = True


async def _streamed(client: httpx.AsyncClient, asked: Ask, told: Told) -> None:
    body = {**asked.body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", asked.path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = 0
        async for line in response.aiter_lines():
            assert not (told.whole and line), "something came after [DONE]"
            if line == "data: [DONE]":
                told.whole = True
            elif line:
                told.add(json.loads(line.removeprefix("data: ")))
                events += 1
            if events == asked.events:
                return  # closing the stream closes the connection


def told_alone(http: httpx.Client, asked: Ask) -> Told:
    """The answer to the same request with nothing else around it."""
    response = http.post(asked.path, json=asked.plain())
    assert response.status_code == 200, response.text
    told = Told()
    told.add(response.json())
    return told


def assert_told_the_same(asked: Ask, got: Told, alone: Told) -> None:
    """All of it, or the beginning of it where the client left."""
    if not got.whole:
        assert asked.leaves, "the answer broke off"
        for index, text in got.texts.items():
            assert alone.texts[index].startswith(text), asked
        return
    assert got.texts == alone.texts, asked
    assert got.reasons == alone.reasons, asked
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.usage[name] == alone.usage[name], asked


def reusable(asks: Sequence[Ask], prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each prompt any other request can have left to it, at most."""
    return [
        max(
            (
                common(prompts[i], prompts[j])
                for j, other in enumerate(asks)
                if j != i and other.stores and other.tenant == mine.tenant
            ),
            default=0,
        )
        for i, mine in enumerate(asks)
    ]


def common(a: Iterable[int], b: Iterable[int]) -> int:
    """With how many tokens both begin."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def text(rng: random.Random, words: int) -> str:
    """Something to read, of about as many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def prompt(rng: random.Random, document: str) -> tuple[str, dict[str, Any]]:
    """Where to ask, and how, about ``document``."""
    question = text(rng, rng.randrange(3, 20))
    if rng.random() < 0.5:
        return COMPLETIONS, {"prompt": f"{document}\n{question}"}
    messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    return CHAT, {"messages": messages}


def leaving(rng: random.Random) -> dict[str, Any]:
    """How a client behaves: most stay, others go before the first byte or in between."""
    kind = rng.random()
    if kind < 0.12:
        return {"seconds": rng.uniform(0, 0.3)}
    if kind < 0.2:
        return {"seconds": rng.uniform(0.3, 3)}
    if kind < 0.35:
        return {"events": rng.randrange(1, 12)}
    return {"stream": rng.random() < 0.8}
