"""Plain completions over HTTP: the forms of a prompt, echo, log probabilities."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.model

GREEDY = {"model": "kvkeep-tiny", "temperature": 0, "max_tokens": 6}


@pytest.fixture
def complete(server):
    return server.openai().completions.create


def tokens_of(server, text):
    return server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_all_forms_of_a_prompt_say_the_same(server, complete):
    text, other = "Return a copy of", "Write the"
    tokens = tokens_of(server, text)
    alone, next_to_it = (
        complete(**GREEDY, prompt=prompt).choices[0].text for prompt in (text, other)
    )
    assert alone != next_to_it
    assert complete(**GREEDY, prompt=tokens).choices[0].text == alone
    for pair in ([text, other], [tokens, tokens_of(server, other)]):
        answer = complete(**GREEDY, prompt=pair)
        assert [choice.text for choice in answer.choices] == [alone, next_to_it]
        assert [choice.index for choice in answer.choices] == [0, 1]


def test_usage_is_of_all_prompts_and_answers(server, complete):
    server.http.post("/kv/clear", json={})
    text = "Return a copy of the string " * 10
    answer = complete(**GREEDY, prompt=[text, text], n=2, extra_body={"ignore_eos": True})
    assert answer.usage.prompt_tokens == 2 * len(tokens_of(server, text))
    assert answer.usage.completion_tokens == 2 * 2 * 6
    # The second waits for the first, which computes what both begin with.
    assert answer.usage.prompt_tokens_details.cached_tokens >= len(tokens_of(server, text)) // 16


def test_choices_of_several_prompts_are_numbered_through(complete):
    asked = {**GREEDY, "temperature": 1, "prompt": ["Return a copy", "The list"], "n": 3}
    whole = complete(**asked, seed=3)
    assert [choice.index for choice in whole.choices] == list(range(6))
    streamed = {}
    for chunk in complete(**asked, seed=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {choice.index: choice.text for choice in whole.choices}


@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_puts_the_prompt_before_the_answer(server, complete, as_tokens):
    text = "Return a copy"
    prompt = tokens_of(server, text) if as_tokens else text
    plain = complete(**GREEDY, prompt=prompt).choices[0].text
    assert complete(**GREEDY, prompt=prompt, echo=True).choices[0].text == text + plain
    stream = complete(**GREEDY, prompt=prompt, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text + plain


def test_log_probabilities_have_their_places_in_the_text(complete):
    (choice,) = complete(**GREEDY, prompt="Return a copy", logprobs=2).choices
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text
    assert len(scores.token_logprobs) == len(scores.top_logprobs) == 6
    for token, place, top in zip(
        scores.tokens, scores.text_offset, scores.top_logprobs, strict=True
    ):
        assert choice.text[place:].startswith(token)
        assert len(top) == 2
        assert max(top, key=top.get) == token
    stream = complete(**GREEDY, prompt="Return a copy", logprobs=2, stream=True)
    places = [
        place
        for chunk in stream
        if chunk.choices[0].logprobs
        for place in chunk.choices[0].logprobs.text_offset
    ]
    assert places == scores.text_offset


def test_tokens_that_are_parts_of_characters_are_named_by_their_bytes(server, complete):
    byte = tokens_of(server, "é")[1]  # the first of its two bytes
    (choice,) = complete(
        **{**GREEDY, "max_tokens": 2}, prompt="x", logprobs=0, logit_bias={str(byte): 100}
    ).choices
    assert choice.logprobs.tokens == ["bytes:\\xc3"] * 2
    assert choice.logprobs.text_offset[0] == 0


def test_sixteen_tokens_are_the_default(complete):
    answer = complete(
        model="kvkeep-tiny", prompt="Return", temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16


def test_the_answer_ends_where_the_model_does(start_server):
    """64 tokens of pool: what is asked for beyond is cut, not refused."""
    with start_server(num_pages=4) as server:
        asked = {**GREEDY, "prompt": "Return a copy", "max_tokens": 1000}
        answer = server.openai().completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens in {64, 65}  # the last token needs no room
        server.assert_idle()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("stream", [False, True])
def test_curl(server, stream):
    body = json.dumps({**GREEDY, "prompt": "Return a copy", "stream": stream})
    headers = ["-H", "Content-Type: application/json"]
    done = subprocess.run(
        ["curl", "-sN", f"{server.url}/v1/completions", *headers, "-d", body],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    if stream:
        assert done.stdout.startswith('data: {"id":"cmpl-')
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "length"


def test_nothing_is_left_behind(server):
    server.assert_idle()
