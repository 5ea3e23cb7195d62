"""What is read of a request's body, and what it costs to read a hostile one."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.serve.router.chats import MOST_BYTES
from kvkeep.serve.router.health import Timeouts
from kvkeep.serve.router.prompts import MOST_TOKENS, Prompt, PromptParser, TokenizeOutcome
from kvkeep.serve.router.upstreams import Upstreams

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


NOBODY = Upstreams(["http://127.0.0.1:1"])  # it is never asked


def read(body: bytes, path: str = "/v1/completions") -> tuple[Prompt, list[Any]]:
    """What is made of this body, and what was to be tokenized."""
    seen: list[Any] = []

    def tokenize(asked: dict[str, Any]) -> Any:
        seen.append(asked)
        return np.array([7, 7, 7], np.int32)

    prompts = PromptParser(NOBODY, Timeouts(tokenize_s=20.0), tokenize)
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
        named = {"model": asked["model"]} if "model" in asked else {}
        assert seen == [{"prompt": first, **named}]
        first = [7, 7, 7]
    else:
        assert seen == []
    assert prompt.tokens.tolist() == first
    assert (prompt.model, prompt.salt) == (asked.get("model", ""), asked.get("cache_salt", ""))


def test_of_a_conversation_the_tokenizer_gets_what_it_needs():
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": [1], "temperature": 0.5}
    prompt, seen = read(json.dumps(asked, indent=4).encode())
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
    assert (None if prompt.tokens is None else prompt.tokens.tolist()) == tokens
    assert prompt.model == ""


# --- the beginning of what is long -----------------------------------------------------------

LONG = 3 << 20


@pytest.mark.parametrize(
    ("sign", "escaped"),
    [
        ("a", False),
        ("東", False),
        ("東", True),
        ("\N{GRINNING FACE}", True),
        ('"', True),
        ("\\", True),
    ],
)
@pytest.mark.parametrize("shift", range(7))
def test_of_a_long_text_the_beginning_is_read(sign, escaped, shift):
    """It is cut at no place where a character or its escape would be cut in two."""
    text = "x" * shift + sign * (LONG // len(json.dumps(sign)))
    for body in ({"prompt": text}, {"prompt": [text, "b"]}):
        _, (asked,) = read(json.dumps(body, ensure_ascii=escaped).encode())
        assert text.startswith(asked["prompt"])
        encoded = len(json.dumps(asked["prompt"], ensure_ascii=escaped).encode())
        assert MOST_BYTES - 16 < encoded <= MOST_BYTES + 2


@given(st.data())
@settings(max_examples=25)
def test_of_a_long_conversation_the_first_turns_are_read(data):
    """The order of fields, and the turn in which it is cut, are any."""
    size = data.draw(st.integers(1, 1000)) * 1000
    turns = [
        {"role": role, "content": f"{number} " + role[0] * size}
        for number, role in enumerate(["system", *["user", "assistant"] * (LONG // size)])
    ]
    if data.draw(st.booleans()):
        turns = [dict(reversed(turn.items())) for turn in turns]
    body = {"messages": turns, "model": "m"}
    prompt, seen = read(json.dumps(body).encode(), "/v1/chat/completions")
    assert prompt.model == "m"
    kept = seen[0]["messages"] if seen else []
    whole = len(kept) - 1
    assert kept[: max(whole, 0)] == turns[: max(whole, 0)]
    if kept:
        assert kept[-1]["role"] == turns[whole]["role"]
        assert turns[whole]["content"].startswith(kept[-1]["content"])
    assert MOST_BYTES - size - 100 < len(json.dumps(kept)) < MOST_BYTES + 100


def test_of_many_tokens_the_first_ones_count():
    for ids in (f"[{'7,' * (LONG // 2)}7]", f"[[{'1234567, ' * (LONG // 9)}1], [2]]"):
        prompt, seen = read(f'{{"prompt": {ids}}}'.encode())
        assert len(prompt.tokens) == MOST_TOKENS
        assert set(prompt.tokens.tolist()) <= {7, 1234567}
        assert not seen


@pytest.mark.parametrize(
    ("path", "body", "messages"),
    [
        (
            "/v1/messages",
            {
                "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
                "messages": [
                    {"role": "user", "content": "One"},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "t", "name": "R", "input": {"a": 1}},
                    ]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": "found"},
                        {"type": "text", "text": "Go on"},
                    ]},
                    {"role": "user", "content": [{"type": "image", "source": {}}]},
                    {"role": "user", "content": "behind the image"},
                ],
            },
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "I look.", "tool_calls": [
                    {"id": "t", "type": "function",
                     "function": {"name": "R", "arguments": '{"a":1}'}},
                ]},
                {"role": "tool", "tool_call_id": "t", "content": "found"},
                {"role": "user", "content": "Go on"},
            ],
        ),
        (
            "/v1/responses",
            {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
                    {"type": "function_call", "call_id": "c", "name": "R", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "found"},
                    {"type": "reasoning", "summary": []},
                    {"role": "user", "content": "behind what is not known"},
                ],
            },
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function",
                     "function": {"name": "R", "arguments": "{}"}},
                ]},
                {"role": "tool", "tool_call_id": "c", "content": "found"},
            ],
        ),
        ("/v1/responses", {"input": "One"}, [{"role": "user", "content": "One"}]),
        ("/v1/responses", {"input": "One", "previous_response_id": "r"}, None),
        (
            "/v1/chat/completions",
            {"messages": [
                {"role": "user", "content": [{"type": "text", "text": "One"}]},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
                {"role": "user", "content": "behind the image"},
            ]},
            [{"role": "user", "content": [{"type": "text", "text": "One"}]}],
        ),
        ("/v1/messages", {"messages": "no list"}, None),
        ("/v1/messages", {"messages": [[], 1]}, None),
        ("/v1/chat/completions", {"messages": [7]}, None),
    ],
)  # fmt: skip
def test_each_api_begins_with_a_chat(path, body, messages):
    prompt, seen = read(json.dumps(body).encode(), path)
    more = {"add_special_tokens": True} if path == "/v1/responses" else {}
    assert seen == ([] if messages is None else [{"messages": messages, **more}])
    assert (prompt.tokens is None) == (messages is None)


def test_tools_of_other_apis_are_those_of_a_chat():
    schema = {"type": "object"}
    function = {"name": "R", "description": "reads", "parameters": schema}
    for path, tool, field in (
        ("/v1/messages", {"name": "R", "description": "reads", "input_schema": schema}, "messages"),
        ("/v1/responses", {"type": "function", **function}, "input"),
    ):
        body = {field: [{"role": "user", "content": "x"}], "tools": [tool]}
        _, (asked,) = read(json.dumps(body).encode(), path)
        assert asked["tools"] == [{"type": "function", "function": function}]
    assert read(b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
                "/v1/messages")[1] == []  # fmt: skip


def test_texts_wait_for_a_tokenizer_no_longer_than_they_may():
    """A thread that hangs costs its callers the time that they have, and no request."""
    outcomes: list[TokenizeOutcome] = []
    hangs = threading.Event()

    def tokenize(asked: dict[str, Any]) -> Any:
        hangs.wait(20)
        return np.array([7], np.int32)

    parser = PromptParser(NOBODY, Timeouts(tokenize_s=0.2), tokenize, on_outcome=outcomes.append)

    async def many() -> list[Prompt]:
        reading = [parser.read("/v1/completions", b'{"prompt": "a"}', []) for _ in range(9)]
        return await asyncio.gather(*reading)

    try:
        found = asyncio.run(many())
        assert [prompt.tokens for prompt in found] == [None] * 9
        assert outcomes == [TokenizeOutcome.LATE] * 9
    finally:
        hangs.set()
        parser.close()
