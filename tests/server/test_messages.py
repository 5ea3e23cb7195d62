"""Anthropic's API over HTTP with Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
import time

import anthropic
import pytest
from real_server import NAME, PATIENCE_S

pytestmark = pytest.mark.model

ASK = [{"role": "user", "content": "What does textwrap.dedent do?"}]
PLAIN = {"model": NAME, "messages": ASK, "max_tokens": 12}


def own(**fields):
    """Fields that the client does not know, in a greedy request."""
    return {"extra_body": {"temperature": 0, **fields}}


GREEDY = {**PLAIN, **own()}
ANSWER = "Remove any common leading whitespace from every line in `text`."
PAGE = 16
LONG = "Cleaning up docstrings is done by inspect. " * 12


def client_of(url, **options):
    options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **options}
    return anthropic.Anthropic(base_url=url, **options)


@pytest.fixture
def create(server):
    with client_of(server.url) as client:
        yield client.messages.create


def tokens_of(server, messages) -> int:
    body = {"messages": messages}
    return server.http.post("/tokenize", json=body).raise_for_status().json()["count"]


def in_pages(tokens) -> int:
    """Of a prompt's tokens, those that the next request finds: whole pages."""
    return tokens // PAGE * PAGE


def total(usage) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_an_answer(create, server):
    message = create(**GREEDY)
    (block,) = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert (message.type, message.role, message.model) == ("message", "assistant", NAME)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == 12
    assert total(message.usage) == tokens_of(server, ASK)


def test_the_same_prompt_again_is_read_from_the_cache(create, server):
    asked = {**PLAIN, "system": "Be brief.", **own(cache_salt="again")}
    first, second = create(**asked).usage, create(**asked).usage
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, 0)
    assert (second.input_tokens, second.cache_creation_input_tokens) == (1, 0)
    assert (
        total(first)
        == total(second)
        == tokens_of(server, [{"role": "system", "content": "Be brief."}, *ASK])
    )


def test_a_system_prompt_and_blocks_are_the_prompt_of_the_chat(create, server):
    """So both APIs share their KV, whatever they are called with."""
    chat = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "One.\nTwo."},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "Four."},
    ]
    server.http.post(
        "/v1/chat/completions", json={"messages": chat, "max_tokens": 1, "cache_salt": "both"}
    ).raise_for_status()
    text = "text"
    usage = create(
        model=NAME,
        max_tokens=1,
        system=[{"type": text, "text": "Be brief."}, {"type": text, "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": text, "text": "One."}]},
            {"role": "user", "content": "Two."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": text, "text": "Three."},
                ],
            },
            {"role": "user", "content": "Four."},
        ],
        extra_body={"cache_salt": "both"},
    ).usage
    assert usage.cache_read_input_tokens == in_pages(tokens_of(server, chat))


def test_a_stream_is_the_same_answer(server):
    with client_of(server.url) as client, client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == ANSWER == message.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
    assert total(message.usage) == tokens_of(server, ASK)


def test_the_events_of_a_stream(server):
    with server.http.stream(
        "POST", "/v1/messages", json={**PLAIN, "temperature": 0, "stream": True}
    ) as got:
        assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = got.read().decode()
    names, events = [], []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    assert names == [event["type"] for event in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert len(names) > 10, "it comes in pieces, not at the end"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == ANSWER
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_a_long_prefill_is_not_silent(start_server):
    """Pings come before the first token; Anthropic's client passes them over."""
    with start_server(ping_s=0.05) as server:
        step, slow = server.engine.step, [0.4]

        def slowly():
            time.sleep(slow.pop() if slow else 0)
            return step()

        server.engine.step = slowly
        body = {**PLAIN, "temperature": 0, "stream": True}
        with server.http.stream("POST", "/v1/messages", json=body) as got:
            names = [line for line in got.iter_lines() if line.startswith("event: ")]
        begun = names.index("event: message_start")
        assert begun >= 2
        assert set(names[:begun]) == {"event: ping"}
        assert names[-1] == "event: message_stop"
        slow.append(0.3)
        with client_of(server.url) as client, client.messages.stream(**GREEDY) as stream:
            assert "".join(stream.text_stream) == ANSWER
        slow.append(0.3)
        chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2}
        with server.http.stream("POST", "/v1/chat/completions", json=chat) as got:
            assert "ping" not in got.read().decode()
        server.assert_idle()


def test_the_async_client(server):
    async def ask():
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", max_retries=0
        ) as client:
            return (await client.messages.create(**GREEDY)).content[0].text

    assert asyncio.run(ask()) == ANSWER


def test_why_an_answer_ended(create, server):
    stopped = create(**GREEDY, stop_sequences=["every", " leading"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " leading")
    assert stopped.content[0].text == "Remove any common"
    ended = create(**{**GREEDY, "max_tokens": 400})
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert ended.usage.output_tokens < 400


def test_an_answer_continues_what_it_is_given(create):
    begun = "Remove any common"
    given = [*ASK, {"role": "assistant", "content": begun}]
    rest = create(**{**GREEDY, "messages": given}).content[0].text
    assert (begun + rest).startswith(ANSWER)


def test_no_tokens_only_fill_the_cache(create):
    asked = {**PLAIN, "system": LONG, **own(cache_salt="warm")}
    warmed = create(**{**asked, "max_tokens": 0})
    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
    assert warmed.usage.output_tokens == 0
    usage = create(**asked).usage
    assert usage.cache_read_input_tokens == in_pages(total(usage)) > 0


def test_tokens_are_counted_as_they_are_computed(server, create):
    asked = {"model": NAME, "system": "Be brief.", "messages": ASK}
    with client_of(server.url) as client:
        counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == total(create(**asked, max_tokens=1).usage)


def test_breakpoints_divide_the_computed_tokens(create, server):
    mark = {"type": "ephemeral"}
    system = [
        {"type": "text", "text": LONG, "cache_control": {**mark, "ttl": "1h"}},
        {"type": "text", "text": "Be kind."},
    ]
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "One.", "cache_control": mark}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three."},
    ]
    usage = create(
        model=NAME, max_tokens=1, system=system, messages=asked,
        extra_body={"cache_salt": "points"},
    ).usage  # fmt: skip
    first = tokens_of(server, [{"role": "system", "content": LONG}])
    second = tokens_of(
        server,
        [{"role": "system", "content": f"{LONG}\nBe kind."}, {"role": "user", "content": "One."}],
    )
    ends = 2  # <|end|> and the header of the answer, which `tokens_of` counts and no block has
    assert usage.cache_creation.ephemeral_1h_input_tokens == first - ends
    assert usage.cache_creation_input_tokens == second - ends
    assert usage.cache_creation_input_tokens == (
        usage.cache_creation.ephemeral_1h_input_tokens
        + usage.cache_creation.ephemeral_5m_input_tokens
    )
    assert usage.input_tokens > 0
    again = create(
        model=NAME, max_tokens=1, system=system, messages=asked,
        extra_body={"cache_salt": "points"},
    ).usage  # fmt: skip
    assert again.cache_read_input_tokens == in_pages(total(usage))
    assert total(again) == total(usage)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"messages": []}, "messages"),
        (own(temperature=1.5), "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "none of"),
        ({"messages": [{"role": "user", "content": ""}]}, "at least one character"),
        ({"stop_sequences": [" "]}, "non-whitespace"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "no tools"),
        (own(min_p=2), "min_p"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {
                "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            "must not come after",
        ),
    ],
)
def test_what_is_refused(create, wrong, says):
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(**{**GREEDY, **wrong})
    body = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert says in body["error"]["message"]
    assert refused.value.request_id == body["request_id"]


def test_another_model_is_not_found(create):
    with pytest.raises(anthropic.NotFoundError):
        create(**{**GREEDY, "model": "claude"})


def test_keys_of_both_kinds(start_server):
    with start_server(api_key="secret") as server:
        with client_of(server.url, api_key="secret") as client:
            assert client.messages.create(**GREEDY).content[0].text == ANSWER
        with (
            client_of(server.url, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            client.messages.create(**GREEDY)
        assert refused.value.body["error"]["type"] == "authentication_error"
        assert server.http.get("/kv/stats", headers={"x-api-key": "secret"}).is_success
        assert server.http.get("/kv/stats", headers={"x-api-key": "secre"}).status_code == 401


def test_an_error_in_the_middle_of_a_stream(start_server, monkeypatch):
    with start_server() as server, client_of(server.url) as client:
        step = server.engine.step
        steps = []

        def failing():
            steps.append(1)
            if len(steps) > 4:
                raise RuntimeError("planted")
            return step()

        monkeypatch.setattr(server.engine, "step", failing)
        with (
            pytest.raises(anthropic.APIStatusError, match="engine failed"),
            client.messages.stream(**{**GREEDY, "max_tokens": 50}) as stream,
        ):
            list(stream.text_stream)
        monkeypatch.undo()
        assert client.messages.create(**GREEDY).content[0].text == ANSWER
