"""Two real vLLM servers behind a real router: events are read, and prompts find their cache."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serving import Served

from kvkeep.core.cost import PrefillCost
from kvkeep.serve.http import bind
from kvkeep.serve.kv_events import EventReader, Source
from kvkeep.serve.models import bundled_model
from kvkeep.serve.router import PrefixRouter, RoutingCost
from kvkeep.serve.router.listening import Server
from kvkeep.serve.router.proxy import create_proxy
from kvkeep.serve.router.upstreams import Upstreams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

BLOCK = 32


def eventually(holds: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.05)


class Instance(Served):
    """A `vllm serve` of the tiny model, with KV events on."""

    def __init__(self, directory: Path, number: int, blocks: int) -> None:
        self.events = f"ipc://{directory}/events{number}"
        self.replay = f"ipc://{directory}/replay{number}"
        config = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
            "endpoint": self.events, "replay_endpoint": self.replay,
        }  # fmt: skip
        arguments = [
            "--max-model-len", "1024", "--block-size", str(BLOCK),
            "--num-gpu-blocks-override", str(blocks), "--kv-events-config", json.dumps(config),
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        ]  # fmt: skip
        super().__init__(str(bundled_model()), arguments, directory / f"vllm{number}.log")


class Recording(Upstreams):
    """Keeps what instances answered, byte by byte."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.answers: list[tuple[str, str, bytearray]] = []

    @asynccontextmanager
    async def request(self, name: str, method: str, path: str, *rest: Any) -> AsyncIterator[Any]:
        async with super().request(name, method, path, *rest) as response:
            if path.startswith("/v1/"):
                kept = bytearray()
                self.answers.append((name, path, kept))
                raw = response.aiter_raw

                async def recorded() -> AsyncIterator[bytes]:
                    async for piece in raw():
                        kept.extend(piece)
                        yield piece

                response.aiter_raw = recorded  # type: ignore[method-assign]
            yield response


class Routing:
    """The router, the reader of events and the proxy, in this process."""

    def __init__(self, instances: list[Instance], *, events: bool = True) -> None:
        self.names = [one.url for one in instances]
        # Without slack the one with less work gets what nobody knows, and not the one of a hash.
        cost = RoutingCost(prefill=PrefillCost(seconds_per_token=1e-3), slack=0.0)
        self.router = PrefixRouter(self.names, cost=cost)
        sources = [Source(one.url, one.events, one.replay) for one in instances if events]
        self.reader = EventReader(sources, self.router, check_s=1.0)
        self.upstreams = Recording(self.names)
        self._socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        proxy = create_proxy(self.router, self.upstreams, self.reader)
        self._server = Server(proxy)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self._socket]))
        )
        self._thread.start()
        eventually(lambda: self._server.started)

    def ask(self, prompt: str, **more: Any) -> dict[str, Any]:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
        answer = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=60)
        assert answer.is_success, answer.text
        return answer.json()

    def held(self) -> list[int]:
        """Blocks that each is known to hold."""
        return [self.router.blocks(name)[0] for name in self.names]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        self.reader.close()


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Instance]]:
    directory = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        made = []
        for number in range(2):
            made.append(Instance(directory, number, blocks=40))
            stack.callback(made[-1].kill)
        for one in made:
            one.wait()
        yield made


@pytest.fixture
def routing(instances: list[Instance]) -> Iterator[Routing]:
    made = Routing(instances)
    yield made
    made.stop()


@pytest.fixture
def unannounced(instances: list[Instance]) -> Iterator[Routing]:
    """The router in front of the same servers, without their events."""
    made = Routing(instances, events=False)
    yield made
    made.stop()


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0


def hits(one: Instance) -> float:
    """Tokens that vLLM itself says it had cached."""
    text = httpx.get(f"{one.url}/metrics").text
    return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.M)))


def text(number: int, length: int = 30) -> str:
    return f"The {number}. conversation is about something. " * length


def test_vllm_behind_the_router(instances: list[Instance], routing: Routing) -> None:
    prompts = [text(number) for number in range(4)]
    first = [routing.ask(prompt) for prompt in prompts]
    tokens = [answer["usage"]["prompt_tokens"] for answer in first]
    assert min(tokens) > 6 * BLOCK
    eventually(lambda: sum(routing.held()) >= sum(one // BLOCK for one in tokens))
    assert min(routing.held()) > 0, "nothing was known, and yet all went to one"

    # Every prompt finds all its full blocks again, by what vLLM says itself.
    before = sum(map(hits, instances))
    again = [routing.ask(prompt) for prompt in prompts]
    for answer, length in zip(again, tokens, strict=True):
        assert cached(answer) >= (length - 1) // BLOCK * BLOCK
    assert sum(map(hits, instances)) - before == sum(map(cached, again))
    assert [one["choices"][0]["text"] for one in first] == [
        one["choices"][0]["text"] for one in again
    ]

    # A salt is another prompt, known by the salt itself.
    assert cached(routing.ask(prompts[0], cache_salt="pepper")) == 0
    asked = httpx.post(f"{routing.url}/tokenize", json={"model": "tiny", "prompt": prompts[0]})
    row = asked.json()["tokens"]
    full = len(row) // BLOCK * BLOCK
    eventually(lambda: routing.router.score(row, salt="pepper")[0].tokens == full)
    assert routing.router.score(row, salt="salt")[0].tokens == 0

    # Evicted blocks are forgotten: each has room for 40, and 39 at most are held.
    for number in range(10, 18):
        routing.ask(text(number))
    eventually(lambda: 0 < max(routing.held()) <= 40)
    for name in routing.names:
        scores = routing.router.score(row, among=[name])
        assert scores[0].tokens <= full
    assert routing.router.stats().refused == 0
    for stats in routing.reader.stats().values():
        assert stats.malformed == stats.unread == 0


def test_who_comes_late_learns_what_was_before(instances: list[Instance], routing: Routing) -> None:
    """vLLM has no snapshot: its replay from the first batch on is the whole truth here."""
    routing.ask(text(50))
    with_all = PrefixRouter(routing.names)
    sources = [Source(one.url, one.events, one.replay) for one in instances]
    reader = EventReader(sources, with_all, check_s=1.0)
    try:
        eventually(lambda: with_all.stats().blocks == sum(routing.held()) > 0)
        assert not any(stats.partial for stats in reader.stats().values())
        assert with_all.stats().orphans == 0
    finally:
        reader.close()


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look"}}
END = 4  # the end token of the bundled model


class Agent:
    """A conversation that calls tools and then ends its turn; odd ones stream."""

    def __init__(self, routing: Routing, number: int) -> None:
        self.routing = routing
        self.streams = bool(number % 2)
        content = f"The {number}. agent looks at something. " * 20
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        self.homes: set[str] = set()

    def ask(self, **more: Any) -> None:
        body = {
            "model": "tiny", "messages": self.messages, "temperature": 0, "tools": [TOOL],
            "max_tokens": 300, "stream": self.streams, **more,
        }  # fmt: skip
        answer = httpx.post(f"{self.routing.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.is_success, answer.text
        name, path, sent = self.routing.upstreams.answers[-1]
        assert path == "/v1/chat/completions"
        assert answer.content == sent, "the router changed the answer"
        self.homes.add(name)
        self.messages.append({"role": "assistant", "content": ""})

    def call(self) -> None:
        """Be made to call the tool; its result is the next message."""
        self.ask(tool_choice=CALL)
        self.messages.append({"role": "tool", "content": "It is as it was. " * 3})

    def end(self) -> None:
        """Be made to say nothing but the end."""
        self.ask(tool_choice="none", logit_bias={END: 100})
        self.messages.append({"role": "user", "content": "And then? " * 3})


def test_agents_stay_where_they_began(unannounced: Routing) -> None:
    """No client names anything, and the servers say nothing of what they hold."""
    agents = [Agent(unannounced, number) for number in range(4)]
    for _ in range(3):
        for agent in agents:
            agent.call()
    for agent in agents:
        agent.end()
    assert [len(agent.homes) for agent in agents] == [1] * 4
    assert len(set.union(*(agent.homes for agent in agents))) == 2


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        (
            "/v1/messages",
            "messages",
            {
                "max_tokens": 2,
                "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
                "output_config": {"effort": "high"},
            },
        ),
        ("/v1/responses", "input", {"max_output_tokens": 2, "instructions": "Be brief."}),
    ],
)
def test_other_apis_of_vllm_are_its_own(
    routing: Routing, path: str, field: str, more: dict[str, Any]
) -> None:
    """vLLM answers them itself, byte for byte, where their prompt is cached."""
    story = f"{path}. {text(1)}"
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": story}]
    chat = {"model": "tiny", "messages": said, "add_special_tokens": path == "/v1/responses"}
    asked = httpx.post(f"{routing.url}/tokenize", json=chat)
    row = asked.json()["tokens"][: 4 * BLOCK]
    kind = "text" if field == "messages" else "input_text"
    homes = set()
    for turn in range(3):
        turns = [
            {"role": "user", "content": [{"type": kind, "text": story}]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Go on. " * (turn + 1)},
        ]
        body = {"model": "tiny", field: turns, "temperature": 0, **more}
        answer = httpx.post(f"{routing.url}{path}", json=body, timeout=60)
        assert answer.is_success, answer.text
        name, sent_path, sent = routing.upstreams.answers[-1]
        assert (sent_path, answer.content) == (path, sent)
        homes.add(name)
        eventually(lambda: routing.router.score(row)[0].tokens == 4 * BLOCK)
    assert len(homes) == 1
