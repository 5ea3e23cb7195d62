"""What is read of a request's body, and what it costs to read a hostile one."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.router import Text
from kvkeep.serve.router.prompts import MOST_BYTES, MOST_TOKENS, Prompt, PromptParser

ROWS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
ASKED = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            ROWS,
            TEXTS,
            st.lists(ROWS, min_size=1, max_size=3),
            st.lists(TEXTS, min_size=1, max_size=3),
        )
    },
    optional={"model": TEXTS, "cache_salt": TEXTS, "user": st.lists(ROWS), "stream": st.booleans()},
)


def read(body: bytes, path: str = "/v1/completions") -> tuple[Prompt, list[Any]]:
    """What is made of this body, and what was to be tokenized."""
    seen: list[Any] = []

    def tokenize(asked: dict[str, Any]) -> Any:
        seen.append(asked)
        return np.array([7, 7, 7], np.int32)

    prompts = PromptParser(tokenize, tokenize_s=20.0)
    try:
        return asyncio.run(prompts.read(path, body, [])), seen
    finally:
        prompts.close()


@given(ASKED, st.sampled_from([None, 1, "\t"]))
def test_it_reads_what_json_says(asked, indent):
    prompt, seen = read(json.dumps(asked, indent=indent).encode())
    first = asked["prompt"]
    if isinstance(first, list) and isinstance(first[0], list | str):
        first = first[0]
    if isinstance(first, str):
        assert seen == [{"prompt": first}]
        first = [7, 7, 7]
    else:
        assert seen == []
    assert prompt.tokens.tolist() == first
    assert (prompt.model, prompt.salt) == (asked.get("model", ""), asked.get("cache_salt", ""))


def test_of_a_conversation_the_tokenizer_gets_what_it_needs():
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": [1], "temperature": 0.5}
    prompt, seen = read(json.dumps(asked, indent=4).encode(), "/v1/chat/completions")
    assert prompt.tokens.tolist() == [7, 7, 7]
    assert seen == [{"messages": asked["messages"], "tools": [1]}]
    assert read(json.dumps({**asked, "prompt": None}).encode())[1] == seen


MANY = 400_000


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": [' + b"[1]," * MANY + b"[1]]}", [1]),
        (b'{"prompt": [' + b"{}," * MANY + b"1]}", None),
        (b'{"prompt": [[' + b"[]," * MANY + b"1]]}", None),
        (b'{"prompt": [1], "user": [' + b"[]," * MANY + b"1]}", [1]),
        (b'{"prompt": [1], "model": [' + b"[]," * MANY + b"1]}", [1]),
        (b'{"prompt": [1], "model": "' + b"x" * MANY + b'"}', [1]),
        (b'{"prompt": [1]' + b" " * MANY + b"}", [1]),
        (b'{"prompt": ' + b"[" * MANY + b"1" + b"]" * MANY + b"}", None),
    ],
)
def test_what_is_not_needed_is_not_made_into_objects(body, tokens):
    """`json.loads` would take 24 MB and more for each of the first five."""
    read(b"{}")
    tracemalloc.start()
    try:
        prompt, seen = read(body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body) + 1_000_000
    finally:
        tracemalloc.stop()
    assert seen == []
    if tokens is None:
        assert prompt.tokens is None or isinstance(prompt.tokens, Text)
    else:
        assert prompt.tokens.tolist() == tokens
    assert prompt.model == ""


# --- texts ---------------------------------------------------------------------------------------

APIS = {
    "/v1/completions": lambda turns: {"prompt": "".join(turn["content"] for turn in turns)},
    "/v1/chat/completions": lambda turns: {"messages": turns},
    "/v1/messages": lambda turns: {"messages": turns, "system": [{"text": "Be brief."}]},
    "/v1/responses": lambda turns: {"input": turns, "instructions": "Be brief."},
}
TURNS = st.lists(TEXTS.filter(bool), min_size=3, max_size=7)


def text_of(body: dict[str, Any], path: str) -> Text:
    """What an untokenized prompt is."""
    parser = PromptParser()
    try:
        text = asyncio.run(parser.read(path, json.dumps(body).encode(), [])).tokens
    finally:
        parser.close()
    assert isinstance(text, Text)
    return text


@given(TURNS, st.sampled_from(sorted(APIS)), st.booleans())
def test_later_turns_of_a_text_have_more_behind_the_same(turns, path, system):
    roles = ["system"] * system + ["user", "assistant"] * 4
    whole = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    tools = [{"name": "R"}]
    short = text_of({**APIS[path](whole[:2]), "tools": tools, "temperature": 1}, path)
    long = text_of({"tools": tools, **APIS[path](whole), "max_tokens": 7}, path)
    assert long.raw.startswith(short.raw[:-1])  # without the end of a list or a string
    assert b'{"name": "R"}' in short.raw
    assert b"temperature" not in short.raw
    if path != "/v1/completions":
        assert long.opening == short.opening
        assert json.dumps(whole[system]).encode() in short.opening
        assert json.dumps(whole[system + 1])[1:].encode() not in short.opening
    other = [*whole[:system], {"role": "user", "content": "something else"}]
    assert text_of({**APIS[path](other), "tools": tools}, path).opening != short.opening


@pytest.mark.parametrize(
    "turns",
    [
        [7], [[]], [{}], [{"role": "assistant", "content": "no user"}], "a text", {"a": 1},
        [{"role": "system", "content": "x" * 100_000}, {"role": "user", "content": "y"}],
    ],
)  # fmt: skip
def test_any_conversation_is_a_text(turns):
    body = {"messages": turns}
    text = text_of(body, "/v1/chat/completions")
    assert text.raw == json.dumps(turns).encode()
    assert len(text) == len(text.raw) // 4


def test_an_image_ends_a_text():
    for part in (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 9999}"}},
        {"type": "image", "source": {"type": "base64", "data": "A" * 9999}},
    ):
        turns = [{"role": "user", "content": [{"type": "text", "text": "See: "}, part]}]
        text = text_of({"messages": turns}, "/v1/messages")
        assert b"See: " in text.raw
        assert b"AAAA" not in text.raw


def test_what_an_instance_keeps_is_another_beginning():
    for before in ({}, {"previous_response_id": "r"}):
        text = text_of({"input": "One", **before}, "/v1/responses")
        assert text.raw.startswith(b'"r"') == bool(before)


# --- the beginning of what is long -----------------------------------------------------------

LONG = 3 << 20


def test_of_a_long_text_the_beginning_counts_and_nothing_is_tokenized():
    for body, path in (
        ({"prompt": "x" * LONG}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "x" * LONG}]}, "/v1/chat/completions"),
        ({"messages": [{"role": "user", "content": "x"}] * 99_999}, "/v1/chat/completions"),
    ):
        prompt, seen = read(json.dumps(body).encode(), path)
        assert len(prompt.tokens.raw) == MOST_BYTES
        assert not seen


def test_of_many_tokens_the_first_ones_count():
    for ids in (f"[{'7,' * (LONG // 2)}7]", f"[[{'1234567, ' * (LONG // 9)}1], [2]]"):
        prompt, seen = read(f'{{"prompt": {ids}}}'.encode())
        assert len(prompt.tokens) == MOST_TOKENS
        assert set(prompt.tokens.tolist()) <= {7, 1234567}
        assert not seen


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_apis_are_placed_by_text(path):
    prompt, seen = read(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode(), path)
    assert isinstance(prompt.tokens, Text)
    assert not seen


def test_a_chat_is_tokenized_up_to_its_first_image():
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "One"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": "behind the image"},
    ]
    path = "/v1/chat/completions"
    _, seen = read(json.dumps({"messages": turns}).encode(), path)
    assert seen == [{"messages": turns[:1]}]
    prompt, seen = read(json.dumps({"messages": turns[1:]}).encode(), path)
    assert isinstance(prompt.tokens, Text)
    assert not seen


def test_a_tokenizer_that_refuses_or_hangs_costs_its_callers_no_more_than_their_time():
    hangs = threading.Event()

    def tokenize(asked: dict[str, Any]) -> Any:
        if asked["prompt"] == "bad":
            raise InvalidValue("no")
        hangs.wait(20)
        return np.array([7], np.int32)

    parser = PromptParser(tokenize, tokenize_s=0.2)

    async def many() -> list[Prompt]:
        bodies = [b'{"prompt": "bad"}', *[b'{"prompt": "a"}'] * 9]
        return await asyncio.gather(*[parser.read("/v1/completions", one, []) for one in bodies])

    try:
        assert [prompt.tokens.raw for prompt in asyncio.run(many())] == [b'"bad"', *[b'"a"'] * 9]
    finally:
        hangs.set()
        parser.close()
