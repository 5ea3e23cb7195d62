"""Anthropic's API on the proxy: before a plain OpenAI-compatible server, and before ours."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import anthropic
import httpx
import openai
import pytest
from processes import Instance, route
from standing_in import eventually, routing

NAME = "m"
ASK = {"model": NAME, "max_tokens": 12, "messages": [{"role": "user", "content": "Hi"}]}
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 3,
    "total_tokens": 23,
    "prompt_tokens_details": {"cached_tokens": 16},
}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def client_of(url, **options):
    options = {"api_key": "key", "max_retries": 0, "timeout": 20, **options}
    return anthropic.Anthropic(base_url=url, **options)


def chunk(delta=None, finish=None, **more):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "c", "object": "chat.completion.chunk", "model": NAME, "choices": choices, **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def tool_delta(index, arguments, **more):
    call = {"index": index, "function": {"arguments": arguments, **more.pop("function", {})}}
    return {"tool_calls": [{**call, **more}]}


def whole(message, finish="stop", **more):
    choice = {"index": 0, "message": message, "finish_reason": finish, **more}
    return [json.dumps({"model": NAME, "choices": [choice], "usage": USAGE}).encode()]


STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Hel"}),
    chunk({"content": "lo."}),
    chunk({}, "stop"),
    chunk(usage=USAGE),
    b"data: [DONE]\n\n",
]


@contextmanager
def plain(chunks, **options):
    """A proxy before a plain server that answers so, and Anthropic's client of it."""
    with routing("well", **options) as (proxy, (one,)):
        one.tokens = b'{"tokens": [1, 2, 3], "count": 3}'
        one.chunks = chunks
        with client_of(proxy.url) as client:
            yield client, one, proxy


def sent(one):
    """The chat request that the server got last, and its headers."""
    path, headers, body = next(asked for asked in reversed(one.asked) if asked[0] != "/tokenize")
    assert path == "/v1/chat/completions"
    return json.loads(body), headers


def test_a_whole_answer():
    with plain(whole({"role": "assistant", "content": "Hello."})) as (client, one, _):
        message = client.messages.create(
            **ASK,
            system=[{"type": "text", "text": "Be brief."}],
            stop_sequences=["x"],
            extra_body={"temperature": 0, "top_k": 3, "cache_salt": "s"},
        )
        body, headers = sent(one)
    assert (message.content[0].text, message.stop_reason) == ("Hello.", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (4, 16)
    assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 3)
    assert body == {
        "model": NAME, "max_tokens": 12, "stream": False, "stop": ["x"], "temperature": 0.0,
        "top_k": 3, "cache_salt": "s",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    }  # fmt: skip
    assert headers["authorization"] == "Bearer key"
    assert "x-api-key" not in headers


def test_a_stream_in_any_pieces():
    data = b"".join(STREAM)
    for size in (1, 7, 100, len(data)):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        with plain(pieces) as (client, one, _), client.messages.stream(**ASK) as stream:
            assert list(stream.text_stream) == ["Hel", "lo."]
            message = stream.get_final_message()
            assert sent(one)[0]["stream_options"] == {"include_usage": True}
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (4, 16)


def test_tools_both_ways():
    """Calls and results of earlier turns go up, new calls come down, whole and in pieces."""
    call = {"id": "call_9", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = {
        **ASK,
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": "ü"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "done"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    }
    answer = whole({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls")
    with plain(answer) as (client, one, _):
        message = client.messages.create(**asked)
        body, _ = sent(one)
    (block,) = message.content
    assert (block.type, block.id, block.name, block.input) == ("tool_use", "call_9", "f", {"a": 1})
    assert message.stop_reason == "tool_use"
    function = {"name": "f", "parameters": {"type": "object"}, "description": "d"}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    earlier = {"name": "f", "arguments": '{"b": "ü"}'}
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": earlier}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "done"},
        {"role": "user", "content": "And?"},
    ]
    pieces = [
        chunk({"role": "assistant", "content": "Well. "}),
        chunk(tool_delta(0, "", id="a", function={"name": "f"})),
        chunk(tool_delta(0, '{"a":')),
        chunk(tool_delta(0, " 1}")),
        chunk(tool_delta(1, "{}", id="b", function={"name": "g"})),
        chunk({}, "tool_calls"),
        chunk(usage=USAGE),
    ]
    with plain(pieces) as (client, _, _), client.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in message.content[1:]] == [{"a": 1}, {}]
    assert [block.name for block in message.content[1:]] == ["f", "g"]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("finish", "matched", "reason"),
    [
        ("length", None, ("max_tokens", None)),
        ("stop", "x", ("stop_sequence", "x")),
        ("stop", 7, ("end_turn", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_why_it_ended(finish, matched, reason):
    answer = whole({"role": "assistant", "content": "a"}, finish, stop_reason=matched)
    with plain(answer) as (client, _, _):
        message = client.messages.create(**ASK, stop_sequences=["x"])
    assert (message.stop_reason, message.stop_sequence) == reason


def test_what_is_written_where_the_last_block_is_a_breakpoint():
    with plain(whole({"content": "a"})) as (client, _, _):
        usage = client.messages.create(**ASK, cache_control={"type": "ephemeral", "ttl": "1h"})
    usage = usage.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (0, 16)
    assert usage.cache_creation.ephemeral_1h_input_tokens == 4


def test_tokens_are_counted_by_the_instance():
    with plain([]) as (client, one, _):
        assert client.messages.count_tokens(model=NAME, messages=ASK["messages"]).input_tokens == 3
        assert json.loads(one.asked[-1][2]) == {"model": NAME, "messages": ASK["messages"]}


def test_requests_that_the_proxy_refuses():
    with plain([]) as (client, one, proxy):
        with pytest.raises(anthropic.BadRequestError, match="at least one message"):
            client.messages.create(model=NAME, max_tokens=1, messages=[])
        for body in (b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"messages": {}}',
                     b'{"max_tokens": "x", "model": 1, "messages": [[]]}'):  # fmt: skip
            refused = httpx.post(f"{proxy.url}/v1/messages", content=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["type"] == "invalid_request_error"
        large = httpx.post(f"{proxy.url}/v1/messages", content=b" " * (9 << 20))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        assert one.asked == []


@pytest.mark.parametrize(
    ("mood", "error", "kind"),
    [
        ("429", anthropic.RateLimitError, "rate_limit_error"),
        ("500", anthropic.InternalServerError, "api_error"),
        ("hangs up", anthropic.InternalServerError, "api_error"),
        ("garbage", anthropic.InternalServerError, "api_error"),
        ("waits", anthropic.InternalServerError, "timeout_error"),
    ],
)
def test_errors_of_the_instance(mood, error, kind):
    with plain([], timeouts={"first_byte_s": 0.5}) as (client, one, _):
        one.mood = mood
        with pytest.raises(error) as failed:
            client.messages.create(**ASK)
        assert failed.value.body["error"]["type"] == kind


def test_a_stream_that_breaks_off_ends_with_an_error():
    """Else a client would take the beginning of an answer for all of it."""
    error = b'data: {"error": {"message": "out of luck"}}\n\n'
    for pieces, says in (
        (STREAM[:3], "broke off"),
        ([*STREAM[:2], error], "out of luck"),
        (STREAM[:2] * 2 + [b"data: {"], "broke off"),
    ):
        with (
            plain(pieces) as (client, _, _),
            pytest.raises(anthropic.APIStatusError, match=says),
            client.messages.stream(**ASK) as stream,
        ):
            stream.get_final_message()
    with routing("half") as (proxy, (one,)):
        one.tokens = b'{"tokens": [1]}'
        body = {**ASK, "stream": True}
        answer = httpx.post(f"{proxy.url}/v1/messages", json=body)
        assert answer.text.startswith(":\n\nevent: error\n")
        assert "the instance broke off its answer" in answer.text


def test_answers_that_make_no_sense():
    for piece in (b"", b"x", b"[]", b"{}", b'{"choices": 1}', b"\xff" * 10):
        with (
            plain([piece or b" "]) as (client, _, _),
            pytest.raises(anthropic.InternalServerError, match="cannot be read"),
        ):
            client.messages.create(**ASK)
    odd = [
        chunk({"content": 7, "tool_calls": [1, {"function": 2}, {"function": {"name": ""}}]}),
        b'data: {"choices": [null, {"delta": [], "finish_reason": 3}], "usage": []}\n\n',
        b"data: 17\n\n: a comment\n\nevent: x\n\n",
        chunk({"content": "a"}, "stop", usage={"prompt_tokens": -1, "completion_tokens": True}),
    ]
    with plain(odd) as (client, _, _), client.messages.stream(**ASK) as stream:
        assert stream.get_final_text() == "a"


def test_a_client_that_leaves_is_told_to_the_instance():
    with plain([]) as (_, one, proxy):
        one.mood = "stops"
        with httpx.stream("POST", f"{proxy.url}/v1/messages", json={**ASK, "stream": True}):
            pass
        end = time.monotonic() + 20
        while not one.left:
            assert time.monotonic() < end
            time.sleep(0.01)


# --- before a server of ours -------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours():
    """A `kvkeep serve` behind a `kvkeep route`, and the proxy's address."""
    one = Instance()
    proxy, url = route([one], "--probe-interval", "0.1")
    try:
        eventually(one.ready, 180)
        eventually(lambda: "kvkeep routes at" in proxy.text, 60)
        eventually(lambda: list(httpx.get(f"{url}/health").json()["each"].values()) == ["up"])
        yield url
    finally:
        one.process.end()
        proxy.end()


@pytest.mark.model
def test_both_clients_through_the_proxy_of_ours(ours):
    model = httpx.get(f"{ours}/v1/models").json()["data"][0]["id"]
    long = "Cleaning up docstrings is done by inspect. " * 12
    asked = {
        "model": model,
        "max_tokens": 4,
        "system": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}],
        "messages": ASK["messages"],
    }
    with client_of(ours) as client:
        first = client.messages.create(**asked).usage
        with client.messages.stream(**asked) as stream:
            second = stream.get_final_message().usage
        counted = client.messages.count_tokens(
            model=model, system=long, messages=ASK["messages"]
        ).input_tokens
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "other"})
    assert first.kvkeep["pinned_tokens"] > 100, "the request was translated, the pin is lost"
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens >= first.kvkeep["pinned_tokens"]
    followed = httpx.get(f"{ours}/kv/conversations").json()
    assert sum(one["ended"] for one in followed["stops"].values()) == 2
    assert followed["stops"].keys() <= {"stop", "length"}
    assert followed["returned"]["prefix"] == 0, "the same prompt again is no return"
    for usage in (first, second):
        parts = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens
        assert sum(parts) == counted
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0) as client:
        chat = [{"role": "system", "content": long}, *ASK["messages"]]
        usage = client.chat.completions.create(
            model=model, messages=chat, max_tokens=4, prompt_cache_retention="24h"
        ).usage
    assert usage.model_extra["kvkeep"]["unretained"] == "no_tiers"
    assert usage.prompt_tokens == counted
    assert usage.prompt_tokens_details.cached_tokens >= first.kvkeep["pinned_tokens"]
