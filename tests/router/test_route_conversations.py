"""Conversations through the proxy: answers as they are, stops in the figures, one instance each."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx
import pytest
from standing_in import Routing, StandIn, eventually, routing

from kvkeep.serve.kv_events import BlockStored
from kvkeep.serve.router import RoutingCost
from kvkeep.serve.router.conversations import ConversationTable

CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def frames(stop: str, *deltas: dict[str, Any]) -> list[bytes]:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": stop})
    made = [b"data: %s\n\n" % json.dumps({"choices": [one]}).encode() for one in choices]
    return [*made, b"data: [DONE]\n\n"]


TOOL = frames("tool_calls", {"tool_calls": [CALL]})
STOP = frames("stop", {"content": "Good bye."})


def ask(proxy: Routing, tokens: list[int], **options: Any) -> httpx.Response:
    body = {"model": "m", "prompt": tokens, "stream": True, **options.pop("body", {})}
    return httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=20, **options)


def figures(proxy: Routing) -> dict[str, Any]:
    return httpx.get(f"{proxy.url}/kv/conversations").raise_for_status().json()


def metric(proxy: Routing, name: str) -> float:
    text = httpx.get(f"{proxy.url}/metrics").text
    return sum(map(float, re.findall(rf"^{re.escape(name)} (\S+)$", text, re.M)))


def stops(proxy: Routing) -> dict[str, tuple[int, int]]:
    found = figures(proxy)["stops"]
    return {name: (one["ended"], one["returned"]) for name, one in found.items()}


def test_answers_arrive_unchanged_and_say_why_they_ended() -> None:
    with routing("well") as (proxy, (one,)):
        prompt = list(range(40))
        for number, chunks in enumerate([TOOL, TOOL, STOP]):
            one.chunks = chunks
            answer = ask(proxy, prompt + list(range(100, 100 + 10 * number)))
            assert answer.content == b"".join(chunks)
        assert stops(proxy) == {"tool_calls": (2, 2), "stop": (1, 0)}
        whole = json.dumps({"choices": [{"message": {}, "finish_reason": "length"}]}).encode()
        one.chunks = [whole[:30], whole[30:]]
        assert ask(proxy, list(range(50, 90))).content == whole
        one.chunks = [b"no JSON at all", b"\xff" * 5000]
        assert ask(proxy, list(range(60, 90))).content == b"".join(one.chunks)
        assert stops(proxy) == {
            "tool_calls": (2, 2), "stop": (1, 0), "length": (1, 0), "unknown": (1, 0),
        }  # fmt: skip
        found = figures(proxy)
        assert found["followed"] == found["waiting"] == 3
        assert found["returned"] == {"session": 0, "prefix": 2, "key": 0}
        assert found["instances"][one.url]["tokens"] == 60 + 40 + 30
        assert metric(proxy, 'kvkeep_router_returns_total{by="prefix"}') == 2
        assert metric(proxy, 'kvkeep_router_conversations{what="followed"}') == 3
        tools = 'kvkeep_router_answers_total{stop="tool_calls",what="%s"}'
        assert [metric(proxy, tools % what) for what in ("ended", "returned")] == [2, 2]


def test_anthropics_api_says_the_same() -> None:
    with routing("well") as (proxy, (one,)):
        one.chunks = TOOL
        said = "Call the tool, and then go on. " * 3
        for turn in range(2):
            messages = [{"role": "user", "content": said + "Go on. " * 3 * turn}]
            body = {"model": "m", "max_tokens": 5, "messages": messages, "stream": True}
            answer = httpx.post(f"{proxy.url}/v1/messages", json=body, timeout=20)
            assert b'"stop_reason": "tool_use"' in answer.content
            # The client may have the answer before the proxy has noted its end.
            eventually(lambda turn=turn: stops(proxy) == {"tool_calls": (turn + 1, turn)})


def test_a_compressed_answer_is_passed_on_unread() -> None:
    class Packed(StandIn):
        async def _answer(self, path, body, reader, writer) -> None:
            packed = gzip.compress(b"".join(STOP))
            head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}"
            writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + packed)

    one = Packed()
    proxy = Routing(one.url)
    try:
        assert ask(proxy, list(range(40))).content == b"".join(STOP)
        assert stops(proxy) == {"unknown": (1, 0)}
    finally:
        proxy.stop()
        one.stop()


@pytest.mark.parametrize("mood", ["429", "500", "503", "hangs up", "head only"])
def test_an_error_is_no_answer(mood: str) -> None:
    with routing(mood) as (proxy, (one,)):
        for _ in range(2):
            ask(proxy, list(range(40)), headers={"x-session-id": "s"})
        assert figures(proxy)["followed"] == 0
        one.mood = "well"
        one.chunks = STOP
        eventually(lambda: ask(proxy, list(range(40))).is_success)
        assert figures(proxy)["followed"] == 1


def test_an_answer_that_breaks_off_is_unfinished() -> None:
    with routing("half") as (proxy, (one,)):
        with pytest.raises(httpx.RemoteProtocolError):
            ask(proxy, list(range(40)))
        one.mood = "stops"
        url = f"{proxy.url}/v1/completions"
        body = {"prompt": list(range(45)), "model": "m"}
        with httpx.stream("POST", url, json=body, timeout=20) as answer:
            next(answer.iter_raw())
        eventually(lambda: one.left == 1)
        eventually(lambda: stops(proxy) == {"unfinished": (2, 1)})
        assert figures(proxy)["waiting"] == 1


def test_a_conversation_stays_at_its_instance() -> None:
    """Plain servers, which say nothing of their caches; and no client names anything."""
    with routing("well", "well", "well", cost=RoutingCost(slack=0.0)) as (proxy, made):
        for one in made:
            one.chunks = STOP
        prompts = [[number] * 40 for number in range(6)]
        homes: list[set[str]] = [set() for _ in prompts]
        for turn in range(5):
            for prompt, home in zip(prompts, homes, strict=True):
                before = [len(one.paths) for one in made]
                prompt += list(range(100, 110 + turn))
                assert ask(proxy, prompt).is_success
                home.update(
                    one.url for one, had in zip(made, before, strict=True) if len(one.paths) > had
                )
        assert [len(home) for home in homes] == [1] * 6
        assert len(set.union(*homes)) == 3, "and they are spread"
        assert figures(proxy)["returned"]["prefix"] == 24
        # One that is down is left, and what it had is answered by the others.
        (gone,) = [one for one in made if one.url in homes[0]]
        gone.mood = "stopped"
        assert ask(proxy, [*prompts[0], 1, 2, 3]).is_success
        gone.wake()


def test_where_blocks_are_announced_they_decide() -> None:
    with routing("well", "well") as (proxy, made):
        for one in made:
            one.chunks = STOP
        prompt = list(range(64))
        ask(proxy, prompt)
        (home,) = [one for one in made if one.paths]
        (other,) = [one for one in made if not one.paths]
        # The first one has evicted it, and the other one holds a part.
        for one, tokens in ((home, [7] * 16), (other, prompt[:32])):
            event = BlockStored([1], None, tokens, len(tokens), None, "GPU", None)
            proxy.router.apply(one.url, [event])
        ask(proxy, prompt)
        assert len(other.paths) == 1
    # Both hold nothing of it: it goes to the one that has done less, not back to the first.
    with routing("well", "well", cost=RoutingCost(balance=1.0)) as (proxy, made):
        ask(proxy, prompt)
        (home,) = [one for one in made if one.paths]
        proxy.router.apply(home.url, [BlockStored([1], None, [7] * 16, 16, None, "GPU", None)])
        ask(proxy, prompt)
        assert [len(one.paths) for one in made] == [1, 1]


def test_a_hostile_tenant_costs_itself_alone() -> None:
    """It names others' sessions, sends their prompts, and floods: theirs stay as they are."""
    with routing("well", "well", conversations=ConversationTable(20)) as (proxy, made):
        for one in made:
            one.chunks = TOOL
        mine = {"authorization": "Bearer mine", "x-session-id": "s"}
        other = {"authorization": "Bearer other", "x-session-id": "s"}
        prompts = [[number] * 40 for number in range(8)]
        for number, prompt in enumerate(prompts):
            ask(proxy, prompt, headers={**mine, "x-session-id": f"s{number}"})
        before = stops(proxy)["tool_calls"]
        for number in range(60):
            headers = {**other, "x-session-id": f"s{number}"}
            ask(proxy, prompts[number % 8], headers=headers, body={"prompt_cache_key": "k"})
        found = figures(proxy)
        assert found["followed"] == 20
        assert found["forgotten"] == 8 + 60 - 20
        assert stops(proxy)["tool_calls"] == (before[0] + 60, before[1])
        for number, prompt in enumerate(prompts):
            ask(proxy, prompt, headers={**mine, "x-session-id": f"s{number}"})
        assert figures(proxy)["returned"]["session"] == 8
        # The same key in the other header is the same tenant.
        ask(proxy, prompts[0], headers={"x-api-key": "mine", "x-session-id": "s0"})
        assert figures(proxy)["returned"]["session"] == 9


def test_figures_name_nobody() -> None:
    with routing("well") as (proxy, (one,)):
        one.chunks = STOP
        secret = {"authorization": "Bearer SECRET", "x-session-id": "SECRET"}
        body = {"prompt_cache_key": "SECRET", "cache_salt": "SECRET"}
        ask(proxy, list(range(40)), headers=secret, body=body)
        for path in ("/kv/conversations", "/metrics"):
            assert "SECRET" not in httpx.get(proxy.url + path).text
