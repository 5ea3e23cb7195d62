"""Two real `kvkeep serve` behind a real `kvkeep route`: hits, and the death of one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from standing_in import eventually

from kvkeep.cli import main
from kvkeep.cli.route import _tokenizer
from kvkeep.errors import InvalidValue
from kvkeep.feed import EventReader, Source
from kvkeep.models import bundled_model
from kvkeep.router import PrefixRouter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]

PAGE = 16
KVKEEP = [sys.executable, "-m", "kvkeep"]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]


class Process:
    """One of our commands, and what it prints."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*KVKEEP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def end(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._thread.join()
            self.process.stdout.close()  # type: ignore[union-attr]


class Instance:
    """A server of ours that publishes its events; it can be killed and started again."""

    def __init__(self) -> None:
        self.port, events, replay = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{events}"
        self.replay = f"tcp://127.0.0.1:{replay}"
        self.start()

    def start(self) -> None:
        self.process = Process(
            "serve", "--port", str(self.port), "--memory", "16MiB", "--no-store",
            "--events", self.events, "--events-replay", self.replay,
        )  # fmt: skip

    def ready(self) -> bool:
        assert self.process.process.poll() is None, self.process.text
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False

    def requests(self) -> int:
        return httpx.get(f"{self.url}/kv/stats").json()["cache"]["opened"]


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[list[Instance], Process, str]]:
    """Two instances, the proxy, and its address."""
    made = [Instance(), Instance()]
    (port,) = free_ports(1)
    route = Process(
        "route", "--port", str(port), "--instances", ",".join(one.url for one in made),
        "--events", ",".join(one.events for one in made),
        "--replay", ",".join(one.replay for one in made),
    )  # fmt: skip
    try:
        for one in made:
            eventually(one.ready, 180)
        eventually(lambda: "kvkeep routes at" in route.text, 60)
        yield made, route, f"http://127.0.0.1:{port}"
    finally:
        for one in made:
            one.process.end()
        route.end()


def ask(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status().json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def blocks(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(re.findall(r'^kvkeep_router_blocks{kind="blocks"} (\S+)$', text, re.M)[0])


def figure(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def test_the_index_is_what_the_server_says_it_holds(two):
    """The library alone, with one server: no proxy."""
    one = two[0][0]
    ask(one.url, "Something that was said before anybody listened. " * 8)
    router = PrefixRouter(["one"])
    reader = EventReader([Source("one", one.events, one.replay)], router)
    try:
        for number in range(3):
            ask(one.url, f"{number}: something else that is said now. " * 8)

        def agrees() -> bool:
            cache = httpx.get(f"{one.url}/kv/stats").json()["cache"]
            return router.stats().blocks == cache["pages_cached"] > 0

        eventually(agrees)
        httpx.post(f"{one.url}/kv/clear", json={})
        eventually(lambda: router.stats().blocks == 0)
    finally:
        reader.close()


def test_tokens_of_its_own_are_the_instances(two):
    """What `--model` tokenizes here is what an instance would say."""
    tokenize = _tokenizer(bundled_model())
    chat = [{"role": "user", "content": "Grüße, 東京"}, {"role": "assistant", "content": "Hi."}]
    for asked in ({"prompt": "One, two.\n  three"}, {"prompt": ""}, {"messages": chat}):
        said = httpx.post(f"{two[0][1].url}/tokenize", json=asked, timeout=60).json()["tokens"]
        assert tokenize(asked).tolist() == said
    with pytest.raises(InvalidValue, match="only text"):
        tokenize({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def test_prompts_find_their_cache_and_survive_the_death_of_an_instance(two):
    made, route, url = two
    prompts = [f"{number} is the number of this conversation. " * 12 for number in range(8)]
    before = [one.requests() for one in made]
    first = [ask(url, prompt) for prompt in prompts]
    assert max(map(cached, first)) < PAGE
    counts = [one.requests() - had for one, had in zip(made, before, strict=True)]
    assert sum(counts) == 8
    assert min(counts) >= 2, "nothing was known, and yet all went to one"
    pages = [httpx.get(f"{one.url}/kv/stats").json()["cache"]["pages_cached"] for one in made]
    eventually(lambda: blocks(url) >= sum(pages))

    again = [ask(url, prompt) for prompt in prompts]
    assert min(map(cached, again)) > PAGE
    texts = [[answer["choices"][0]["text"] for answer in some] for some in (first, again)]
    assert texts[0] == texts[1]
    matched = figure(url, "kvkeep_router_matched_tokens_total")
    assert matched >= 0.8 * sum(map(cached, again))

    # A stream, a conversation, and what only the instances know.
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat, timeout=60) as stream:
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "kvkeep-tiny"

    # Salts share nothing, and are found again.
    assert cached(ask(url, prompts[0], cache_salt="s")) == 0
    eventually(lambda: cached(ask(url, prompts[0], cache_salt="s")) > PAGE)

    made[0].process.end(signal.SIGKILL)
    for prompt, text in zip(prompts, texts[0], strict=True):
        assert ask(url, prompt)["choices"][0]["text"] == text
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "instances": 1}

    made[0].start()
    eventually(made[0].ready, 180)
    # What it held before is known to be gone: all is cached by the other one.
    eventually(lambda: 'what="restarts"} 1.0' in httpx.get(f"{url}/metrics").text, 30)
    had = made[1].requests()
    assert min(cached(ask(url, prompt)) for prompt in prompts) > PAGE
    assert made[1].requests() == had + 8
    assert "Traceback" not in route.text
    assert "number of this conversation" not in route.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--instances", "nonsense"], "an instance is http://HOST:PORT, got 'nonsense'"),
        (["--instances", "http://a,http://b", "--events", "tcp://x:1"], "--events names one"),
        (["--instances", "http://a", "--events", "x"], "an endpoint is tcp://HOST:PORT"),
        (["--instances", "http://a", "--prefill-speed", "0"], "--prefill-speed is above 0"),
        (["--instances", "http://a", "--ranks", "0"], "--ranks is 0"),
        (["--instances", "http://a", "--host", "nowhere.invalid"], "there is no 'nowhere.invalid'"),
    ],
)
def test_wrong_input_is_one_line(arguments, said, capsys):
    assert main(["route", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvkeep: error: {said}")
    assert error.count("\n") == 1


def test_serve_needs_events_for_a_replay(capsys):
    asked = ["serve", "--port", "0", "--memory", "16MiB", "--events-replay", "tcp://127.0.0.1:*"]
    assert main(asked) == 2
    assert "nothing to replay without --events" in capsys.readouterr().err
