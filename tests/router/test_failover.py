"""Four real servers behind two real routers: servers are killed and stopped, a router is killed.

What had not begun to stream is answered, with the same greedy text; a stream that had begun ends
with an error that its client sees.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from processes import Instance, Process, route
from standing_in import eventually

from kvkeep.serve.models import bundled_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]


def blocks(url: str) -> list[int]:
    """The blocks that a router knows of each instance, in its order."""
    text = httpx.get(f"{url}/metrics", timeout=20).text
    found = re.findall(r'^kvkeep_router_instance_blocks{.*what="known"} (\S+)$', text, re.M)
    return [int(float(one)) for one in found]


# Texts that a router tokenizes are compared with what events say, so routers know the same of them.
MODEL = ("--model", str(bundled_model()))
SYSTEM = "You are a helper of few words, and you answer what you are asked. "


@dataclass
class Fleet:
    servers: list[Instance]
    routers: list[Process]
    urls: list[str]

    def states(self, router: int) -> dict[str, str]:
        return httpx.get(f"{self.urls[router]}/health", timeout=20).json()["each"]

    def all_up(self, router: int) -> bool:
        try:
            return set(self.states(router).values()) == {"up"}
        except httpx.TransportError:
            return False

    def blocks(self, router: int) -> list[int]:
        return blocks(self.urls[router])

    def served(self) -> list[int]:
        return [one.requests() for one in self.servers]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    servers = [Instance() for _ in range(4)]
    made = [route(some, *MODEL, "--idle-timeout", "4") for some in (servers, servers[::-1])]
    found = Fleet(servers, [one for one, _ in made], [url for _, url in made])
    try:
        for one in servers:
            eventually(one.ready, 180)
        for number in range(2):
            eventually(lambda number=number: found.all_up(number), 60)
        yield found
    finally:
        for one in (*servers, *found.routers):
            process = one.process.process if isinstance(one, Instance) else one.process
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
            (one.process if isinstance(one, Instance) else one).end()


def ask(urls: Sequence[str], prompt: str, **more: Any) -> str:
    """The answer of the first router that gives one, as a client with two addresses asks."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    for number, url in enumerate(urls):
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=180)
        except httpx.TransportError:
            if number == len(urls) - 1:
                raise
            continue
        return answer.raise_for_status().json()["choices"][0]["text"]
    raise AssertionError("no address")


@dataclass
class Stream:
    """A stream that is read in a thread, and how it ended."""

    url: str
    prompt: str
    begun: threading.Event = field(default_factory=threading.Event)
    received: bytes = b""
    error: Exception | None = None

    def read(self) -> Stream:
        body = {"prompt": self.prompt, "max_tokens": 300, "temperature": 0, "ignore_eos": True,
                "stream": True}  # fmt: skip
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=180) as got:
                got.raise_for_status()
                for piece in got.iter_bytes():
                    self.received += piece
                    self.begun.set()
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            self.error = error
        finally:
            self.begun.set()
        return self

    @property
    def whole(self) -> bool:
        return self.received.endswith(b"data: [DONE]\n\n")


def test_two_routers_place_alike(fleet):
    """Prompts that go through either router find what the other one's were computed for."""
    draw = random.Random(1)
    prompts = [f"{SYSTEM}Question {number}: {draw.random()} " * 4 for number in range(8)]
    for prompt in prompts:
        ask([draw.choice(fleet.urls)], prompt)
    pages = [
        httpx.get(f"{one.url}/kv/stats").json()["cache"]["pages_cached"] for one in fleet.servers
    ]
    eventually(lambda: fleet.blocks(0) == pages and fleet.blocks(1) == pages[::-1])
    for prompt in prompts:
        before = fleet.served()
        for url in fleet.urls:
            ask([url], prompt)
        counts = [now - had for now, had in zip(fleet.served(), before, strict=True)]
        assert sorted(counts) == [0, 0, 0, 2], "the routers do not agree"


def test_a_server_is_found_by_its_name(fleet):
    """Its events are where the pattern says."""
    one = fleet.servers[3]
    ask([one.url], SYSTEM * 4)
    process, url = route(
        [], "--discover", f"dns://localhost:{one.port}",
        "--events", one.events.replace("127.0.0.1", "{host}"),
        "--replay", one.replay.replace("127.0.0.1", "{host}"),
    )  # fmt: skip
    try:
        eventually(lambda: f"found at dns://localhost:{one.port}" in process.text, 60)

        def each() -> dict[str, str]:
            return httpx.get(f"{url}/health", timeout=20).json()["each"]

        eventually(lambda: each() == {one.url: "up"})
        pages = httpx.get(f"{one.url}/kv/stats").json()["cache"]["pages_cached"]
        eventually(lambda: blocks(url) == [pages] and pages > 0)
        assert ask([url], SYSTEM)
        assert "Traceback" not in process.text
    finally:
        process.end()


def test_servers_that_die_and_hang_lose_nothing_that_had_not_begun(fleet):
    prompts = [f"{SYSTEM}Story {number}, told at some length. " * 3 for number in range(6)]
    expected = [ask(fleet.urls, prompt) for prompt in prompts]
    killed, stopped = fleet.servers[0], fleet.servers[1]
    draw = random.Random(2)
    # One router puts equal work on all: each server has one of four streams.
    streams = [Stream(fleet.urls[0], f"{number}: a stream of its own. " * 4) for number in range(4)]
    with ThreadPoolExecutor(32) as pool:
        reading = []
        for one in streams:
            reading.append(pool.submit(one.read))
            assert one.begun.wait(60)
        asked = [pool.submit(ask, [draw.choice(fleet.urls)], prompt) for prompt in prompts]
        killed.process.end(signal.SIGKILL)
        texts = [one.result() for one in asked]  # a request may lose one server, not two
        stopped.process.process.send_signal(signal.SIGSTOP)
        asked = [pool.submit(ask, [draw.choice(fleet.urls)], prompt) for prompt in prompts]
        try:
            texts += [one.result() for one in asked]
            for one in reading:
                one.result()
        finally:
            stopped.process.process.send_signal(signal.SIGCONT)
    assert texts == expected * 2
    # Streams that had begun on one of the two ended with an error; the others are whole.
    for one in streams:
        assert one.received, "a stream had not begun"
        assert one.whole == (one.error is None), "it ended as if it were whole"
    assert sum(one.whole for one in streams) in {2, 3}

    killed.start()
    eventually(killed.ready, 180)
    for number in range(2):
        eventually(lambda number=number: fleet.all_up(number), 60)
    for prompt, text in zip(prompts, expected, strict=True):
        assert [ask([url], prompt) for url in fleet.urls] == [text, text]
    for router in fleet.routers:
        assert "Traceback" not in router.text


def test_a_router_that_dies_loses_nothing(fleet):
    prompts = [f"{SYSTEM}Poem {number}, of a few lines. " * 3 for number in range(6)]
    expected = [ask(fleet.urls[::-1], prompt) for prompt in prompts]
    dying, other = fleet.urls
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, [dying, other], prompt, max_tokens=30) for prompt in prompts]
        eventually(lambda: sum(one.done() for one in answers) >= 1)
        fleet.routers[0].end(signal.SIGKILL)
        answers += [pool.submit(ask, [dying, other], prompt, max_tokens=30) for prompt in prompts]
        texts = [one.result() for one in answers]
    assert texts[:6] == texts[6:]
    assert all(text.startswith(one) for text, one in zip(texts, expected * 2, strict=True))
    # It comes back knowing nothing, and learns from snapshots what all servers hold.
    fleet.routers[0], fleet.urls[0] = route(fleet.servers, *MODEL)
    eventually(lambda: fleet.all_up(0), 60)
    eventually(lambda: fleet.blocks(0) == fleet.blocks(1)[::-1])
    assert fleet.routers[0].process.poll() is None
