"""Two real `kvkeep serve` behind a real `kvkeep route`: hits, and the death of one."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from processes import Instance, Process, route
from standing_in import eventually

from kvkeep.cli import main
from kvkeep.cli.route import _tokenize, _tokenizer
from kvkeep.core.errors import InvalidValue
from kvkeep.serve.kv_events import EventReader, Source
from kvkeep.serve.models import bundled_model
from kvkeep.serve.router import PrefixRouter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]

PAGE = 16


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[list[Instance], Process, str]]:
    """Two instances, a proxy that finds out soon what is wrong with them, and its address."""
    made = [Instance(), Instance()]
    proxy, url = route(made)
    try:
        for one in made:
            eventually(one.ready, 180)
        eventually(lambda: "kvkeep routes at" in proxy.text, 60)
        eventually(lambda: states(url) == ["up", "up"])
        yield made, proxy, url
    finally:
        for one in made:
            one.process.end()
        proxy.end()


def states(url: str) -> list[str]:
    """What the proxy thinks of the instances."""
    return list(httpx.get(f"{url}/health").json()["each"].values())


def ask(url: str, prompt: str | list[int], **more: Any) -> dict[str, Any]:
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
    tokenize = _tokenize(_tokenizer(bundled_model()))
    chat = [{"role": "user", "content": "Grüße, 東京"}, {"role": "assistant", "content": "Hi."}]
    for asked in ({"prompt": "One, two.\n  three"}, {"prompt": ""}, {"messages": chat}):
        said = httpx.post(f"{two[0][1].url}/tokenize", json=asked, timeout=60).json()["tokens"]
        assert tokenize(asked).tolist() == said
    with pytest.raises(InvalidValue, match="only text"):
        tokenize({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def goes_to(prompt: str | list[int], made: list[Instance], url: str) -> int:
    """Which instance gets this prompt."""
    before = [one.requests() for one in made]
    ask(url, prompt, max_tokens=1)
    (at,) = [at for at, one in enumerate(made) if one.requests() > before[at]]
    return at


def test_a_cache_key_stays_at_one_of_ours(two):
    """Prompts of a key with nothing in common; OpenAI's client sends the key."""
    made, _, url = two
    homes = set()
    for key in range(6):
        before = [one.requests() for one in made]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for number in range(3):
                client.chat.completions.create(
                    model="kvkeep-tiny", max_tokens=1, prompt_cache_key=f"key {key}",
                    messages=[{"role": "user", "content": f"{number * 7} of {key}: begin."}],
                )  # fmt: skip
        counts = [one.requests() - had for one, had in zip(made, before, strict=True)]
        assert sorted(counts) == [0, 3]
        homes.add(counts.index(3))
    assert homes == {0, 1}


def test_a_stopped_instance_loses_no_request_and_comes_back(two):
    """A process that is stopped accepts connections, and answers nothing."""
    made, proxy, url = two
    prompt = [7 + number % 400 for number in range(320)]
    ask(url, prompt)
    at = goes_to(prompt, made, url)
    eventually(lambda: goes_to(prompt, made, url) == at)
    stopped = made[at].process.process
    with ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(ask, url, [*prompt, number], max_tokens=300, ignore_eos=True)
            for number in range(4)
        ]
        eventually(lambda: figure(made[at].url, "kvkeep_requests_running") > 0)
        stopped.send_signal(signal.SIGSTOP)  # nothing of their answers was sent yet
        asked += [
            pool.submit(ask, url, f"A text of its own, number {number}.") for number in range(8)
        ]
        try:
            assert all(one.result()["choices"] for one in asked)
        except BaseException:
            stopped.send_signal(signal.SIGCONT)
            raise
    try:
        assert states(url)[at] == "suspect"
        retries = figure(url, "kvkeep_router_retries_total")
        assert retries >= 1
        assert 'outcome="silent, asked elsewhere"' in httpx.get(f"{url}/metrics").text
        for number in range(4):  # it is left out now
            ask(url, f"{number}: another text.")
            ask(url, [*prompt, number])
        assert figure(url, "kvkeep_router_retries_total") == retries
    finally:
        stopped.send_signal(signal.SIGCONT)
    eventually(lambda: states(url) == ["up", "up"], 60)
    assert goes_to(prompt, made, url) == at
    # What was taken elsewhere meanwhile is computed by nobody.
    eventually(lambda: figure(made[at].url, "kvkeep_requests_running") == 0)
    eventually(lambda: figure(made[at].url, "kvkeep_requests_waiting") == 0)
    assert "Traceback" not in proxy.text


def test_prompts_find_their_cache_and_survive_the_death_of_an_instance(two):
    made, route, url = two
    prompts = [f"{number} is the number of this conversation. " * 12 for number in range(8)]
    before = [one.requests() for one in made]
    first = [ask(url, prompt) for prompt in prompts]
    assert max(map(cached, first)) < PAGE
    counts = [one.requests() - had for one, had in zip(made, before, strict=True)]
    assert sum(counts) == 8
    assert min(counts) >= 1, "nothing was known, and yet all went to one"
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

    # Killed while it has requests in hand: none is lost.
    with ThreadPoolExecutor(6) as pool:
        first_port = [prompt for prompt in prompts if goes_to(prompt, made, url) == 0][:2]
        asked = [pool.submit(ask, url, prompt, max_tokens=300) for prompt in first_port * 3]
        eventually(lambda: figure(made[0].url, "kvkeep_requests_running") > 0)
        made[0].process.end(signal.SIGKILL)
        assert all(one.result()["usage"]["completion_tokens"] for one in asked)
    for prompt, text in zip(prompts, texts[0], strict=True):
        assert ask(url, prompt)["choices"][0]["text"] == text
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["instances"]) == ("ok", 1)
    assert states(url) == ["suspect", "up"]

    made[0].start()
    eventually(made[0].ready, 180)
    # What it held before is known to be gone: all is cached by the other one.
    eventually(lambda: 'what="restarts"} 1.0' in httpx.get(f"{url}/metrics").text, 30)
    eventually(lambda: states(url) == ["up", "up"], 60)
    had = made[1].requests()
    assert min(cached(ask(url, prompt)) for prompt in prompts) > PAGE
    assert made[1].requests() == had + 8
    assert "Traceback" not in route.text
    assert "number of this conversation" not in route.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --instances, or --discover, or both"),
        (["--discover", "dns://x"], "instances are discovered at dns://NAME:PORT, got 'dns://x'"),
        (
            ["--discover", "dns://x:1", "--events", "tcp://y:1"],
            "--events needs an address for each of the 0 instances, got 1",
        ),
        (
            ["--instances", "http://a", "--discover", "dns://x:1", "--events", "tcp://y:1"],
            "instances that are discovered need a pattern",
        ),
        (["--instances", "http://a", "--replay", "tcp://y:1"], "--replay needs --events"),
        (["--instances", "http://a", "--events", "{host}"], "an endpoint is tcp://HOST:PORT"),
        (["--instances", "nonsense"], "an instance must be http://HOST:PORT, got 'nonsense'"),
        (
            ["--instances", "http://a,http://b", "--events", "tcp://x:1"],
            "--events needs an address for each",
        ),
        (["--instances", "http://a", "--events", "x"], "an endpoint is tcp://HOST:PORT"),
        (["--instances", "http://a", "--prefill-speed", "0"], "--prefill-speed is 0"),
        (["--instances", "http://a", "--ranks", "0"], "--ranks is 0"),
        *(
            (["--instances", "http://a", option, "nan"], f"{option} is nan; a number of seconds")
            for option in (
                "--first-byte-timeout",
                "--idle-timeout",
            )
        ),
        (
            ["--instances", "http://a", "--host", "nowhere.invalid"],
            "cannot resolve the host 'nowhere.invalid'",
        ),
    ],
)
def test_wrong_input_is_one_line(arguments, said, capsys):
    assert main(["route", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvkeep: error: {said}")
    assert error.count("\n") == 1
