"""What is read of a request's body, and what it costs to read a hostile one."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.serve.router.health import Timeouts
from kvkeep.serve.router.prompts import Prompt, PromptParser, credentials_of
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


def read(body: bytes) -> tuple[Prompt, list[Any]]:
    """What is made of this body, and what was to be tokenized."""
    seen: list[Any] = []

    def tokenize(asked: dict[str, Any]) -> Any:
        seen.append(asked)
        return np.array([7, 7, 7], np.int32)

    prompts = PromptParser(NOBODY, Timeouts(), tokenize)
    return asyncio.run(prompts.read(body, [])), seen


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


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], b""),
        ([(b"authorization", b"Bearer one")], b"one"),
        ([(b"authorization", b"bearer one")], b"one"),
        ([(b"x-api-key", b"one"), (b"accept", b"*/*")], b"one"),
        ([(b"x-api-key", b"two"), (b"authorization", b"Bearer one")], b"one"),
        ([(b"authorization", b"Basic b25l")], b"Basic b25l"),
        ([(b"authorization", b"one")], b"one"),
    ],
)
def test_the_key_of_a_request(headers, expected):
    assert credentials_of(headers) == expected
