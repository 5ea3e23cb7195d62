"""Chat over HTTP with OpenAI's own client."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai.types.chat import ChatCompletionContentPartTextParam, completion_create_params

from kvkeep.serve.server.schemas.chat import ChatRequest, TextPart

pytestmark = pytest.mark.model

ASK = [{"role": "user", "content": "What does textwrap.dedent do?"}]
GREEDY = {"model": "kvkeep-tiny", "messages": ASK, "temperature": 0, "max_tokens": 12}
ANSWER = "Remove any common leading whitespace from every line in `text`."


@pytest.fixture
def chat(server):
    return server.openai().chat.completions.create


def collected(stream):
    """Text by choice, roles, finish reasons, and the usage of a stream."""
    texts, roles, reasons, usage = {}, {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "something came after the end"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.delta.role:
                roles[choice.index] = choice.delta.role
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, roles, reasons, usage


def test_an_answer(chat):
    answer = chat(**GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.object, answer.model) == ("chat.completion", "kvkeep-tiny")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.completion_tokens == 12


def test_a_stream_is_the_same_answer(chat):
    texts, roles, reasons, usage = collected(chat(**GREEDY, stream=True))
    assert (texts, roles, reasons) == ({0: ANSWER}, {0: "assistant"}, {0: "length"})
    assert usage is None


def test_a_stream_says_its_usage_where_it_is_asked(chat):
    whole = chat(**GREEDY).usage  # and the prompt is cached now
    *_, usage = collected(chat(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.prompt_tokens, 12)
    assert usage.prompt_tokens_details.cached_tokens == whole.prompt_tokens - 1


def test_the_async_client(server):
    async def both():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.chat.completions.create(**GREEDY)
            stream = await client.chat.completions.create(**GREEDY, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces), len(pieces)

    whole, streamed, pieces = asyncio.run(both())
    assert whole == streamed == ANSWER
    assert pieces > 5  # it comes in pieces, not at the end


def test_the_stream_on_the_wire(server):
    """What a client that is not OpenAI's reads."""
    with server.http.stream("POST", "/v1/chat/completions", json={**GREEDY, "stream": True}) as got:
        assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert got.headers["cache-control"] == "no-cache"
        text = got.read().decode()
    *events, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    assert all(event.startswith('data: {"id":"chatcmpl-') for event in events)
    assert '"delta":{"role":"assistant","content":""}' in events[0]
    assert '"delta":{}' in events[-1]  # the end has no content that a client would add


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(chat, stream):
    asked = {**GREEDY, "n": 3, "temperature": 1.5, "seed": 7}
    if stream:
        texts, roles, reasons, _ = collected(chat(**asked, stream=True))
        assert roles.keys() == reasons.keys() == {0, 1, 2}
    else:
        answer = chat(**asked)
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage.completion_tokens > 3
    assert texts.keys() == {0, 1, 2}
    assert len(set(texts.values())) > 1


def test_a_seed_reproduces_whatever_else_runs(server, chat):
    asked = {**GREEDY, "temperature": 1.5, "seed": 11}
    alone = chat(**asked).choices[0].message.content
    noise = server.openai().chat.completions.create(**{**asked, "seed": 5}, n=8, stream=True)
    among = chat(**asked).choices[0].message.content
    noise.close()
    other = chat(**{**asked, "seed": 12}).choices[0].message.content
    assert alone == among != other


def test_log_probabilities(chat):
    answer = chat(**GREEDY, logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == ANSWER
    for token in tokens:
        assert token.logprob <= 0
        assert [other.logprob for other in token.top_logprobs] == sorted(
            (other.logprob for other in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy takes the likeliest
    plain = chat(**GREEDY, logprobs=True).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in plain)


def test_log_probabilities_of_a_stream_are_those_of_the_whole(chat):
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = [token.token for token in chat(**asked).choices[0].logprobs.content]
    parts = [
        token.token
        for chunk in chat(**asked, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert parts == whole


def test_cached_tokens_are_exact(server, chat):
    server.http.post("/kv/clear", json={}).raise_for_status()
    long = [{"role": "user", "content": "What does json.dumps do? " * 20}]
    first, second = (chat(**{**GREEDY, "messages": long}) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    # All but the last token, whose logits are wanted.
    expected = second.usage.prompt_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == expected
    assert first.choices[0].message.content == second.choices[0].message.content


def test_a_salt_shares_with_nobody_else(server, chat):
    long = [{"role": "user", "content": "What does heapq.merge do? " * 20}]

    def cached(salt):
        answer = chat(**{**GREEDY, "messages": long}, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one") > 0, cached("two") > 0, cached("one") > 0] == [False, False, True]


def test_a_prompt_that_is_not_to_be_stored_is_not(server, chat):
    long = [{"role": "user", "content": "What does shutil.copytree do? " * 20}]
    pages = server.stats()["cache"]["stored_pages"]
    for _ in range(2):
        answer = chat(**{**GREEDY, "messages": long}, extra_body={"kvkeep": {"store": False}})
        assert answer.usage.prompt_tokens_details.cached_tokens < 16
    assert server.stats()["cache"]["stored_pages"] == pages


def test_a_conversation_goes_on_from_what_the_client_was_given(chat):
    """Clients send back the very objects they got."""
    talk = [*ASK]
    talk.append(chat(**GREEDY).choices[0].message)
    talk.append({"role": "user", "content": "What does textwrap.wrap do?"})
    again = chat(**{**GREEDY, "messages": talk})
    assert again.usage.prompt_tokens > 30
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_parts_of_text_are_text(chat):
    parts = [{"type": "text", "text": "What does"}, {"type": "text", "text": "json.dumps do?"}]
    (given,) = (chat(**{**GREEDY, "messages": [{"role": "user", "content": parts}]}),)
    same = chat(
        **{**GREEDY, "messages": [{"role": "user", "content": "What does\njson.dumps do?"}]}
    )
    assert given.usage.prompt_tokens == same.usage.prompt_tokens
    assert given.choices[0].message.content == same.choices[0].message.content


def test_a_developer_is_a_system(server):
    def tokens(role):
        messages = [{"role": role, "content": "Be brief."}, *ASK]
        return server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]

    assert tokens("developer") == tokens("system") != tokens("user")


def test_stop_texts(chat):
    answer = chat(**GREEDY, stop=["leading", "nothing"])
    assert answer.choices[0].message.content == "Remove any common "
    assert answer.choices[0].finish_reason == "stop"
    assert chat(**GREEDY, stop=" any").choices[0].message.content == "Remove"


def test_a_bias_forbids_and_forces(server, chat):
    (token,) = server.http.post("/tokenize", json={"prompt": "Remove"}).json()["tokens"][1:]
    assert (
        not chat(**GREEDY, logit_bias={str(token): -100})
        .choices[0]
        .message.content.startswith("Remove")
    )
    forced = chat(**{**GREEDY, "max_tokens": 3}, logit_bias={str(token): 100})
    assert forced.choices[0].message.content == "Remove" * 3


def test_what_is_ours_is_honoured(chat):
    """Greedy again by other means."""
    for ours in ({"top_k": 1}, {"min_p": 1.0}, {"kvkeep": {"draft_tokens": 4}, "temperature": 0}):
        asked = {**GREEDY, "temperature": ours.pop("temperature", 1.0)}
        assert chat(**asked, extra_body=ours).choices[0].message.content == ANSWER, ours


def test_ignoring_the_end_goes_on(chat):
    asked = {**GREEDY, "max_tokens": 256}
    ended = chat(**asked)
    assert ended.choices[0].finish_reason == "stop"
    endless = chat(**asked, extra_body={"ignore_eos": True})
    assert endless.choices[0].finish_reason == "length"
    assert endless.usage.completion_tokens == 256 > ended.usage.completion_tokens


def test_values_that_ask_for_what_is_done_anyway_are_taken(chat):
    answer = chat(
        **GREEDY,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        modalities=["text"],
        response_format={"type": "text"},
        tool_choice="none",
        service_tier="auto",
        extra_body={"tools": None, "stop": None, "n": None, "logit_bias": None, "stream": False,
                    "moderation": None, "prompt_cache_options": {"mode": "implicit"}},
    )  # fmt: skip
    assert answer.choices[0].message.content == ANSWER


def test_marks_of_where_a_prompt_can_be_reused_change_nothing(chat):
    (*others, last) = ASK
    mark = {"mode": "explicit", "ttl": "30m"}
    part = {"type": "text", "text": last["content"], "prompt_cache_breakpoint": mark}
    answer = chat(**{**GREEDY, "messages": [*others, {**last, "content": [part]}]})
    assert answer.choices[0].message.content == ANSWER


def test_every_field_of_openais_client_is_known():
    """Taken, or refused with the reason: none as if it were a slip of the pen."""
    asked = completion_create_params.CompletionCreateParamsNonStreaming
    fields = asked.__required_keys__ | asked.__optional_keys__
    assert fields <= {*ChatRequest.model_fields, *ChatRequest.REFUSED}
    part = ChatCompletionContentPartTextParam
    assert part.__required_keys__ | part.__optional_keys__ <= {*TextPart.model_fields}


def test_the_default_goes_on_until_the_end(chat):
    asked = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    answer = chat(**asked)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 12
    assert chat(**asked, max_completion_tokens=3).usage.completion_tokens == 3


def test_nothing_is_left_behind(server):
    server.assert_idle()
