"""Requests that cost far more than they look: refused by size, or out of the way of others."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_server import eventually

from kvkeep.serve.engine import Tokenizer
from kvkeep.serve.messages import read_call
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import jobs
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.routes import base
from kvkeep.serve.server.service import LARGE

pytestmark = pytest.mark.model

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
MILLION = 10**6


def post(server, path, body):
    content = json.dumps(body, separators=(",", ":")).encode()
    answer = server.http.post(path, content=content, headers=JSON)
    return answer.status_code, answer.json()


def refused(server, path, body) -> dict[str, str]:
    status, told = post(server, path, body)
    assert status == 400, told
    return told["error"]


def texts(text):
    """That text, at each place that is tokenized."""
    messages = [{"role": "user", "content": text}]
    return [
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["a", text]}),
        (CHAT, {"messages": messages}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": messages}),
        ("/kv/explain", {"prompt": text}),
        ("/kv/explain", {"messages": messages}),
    ]


@pytest.fixture
def encoded(monkeypatch):
    """The lengths of what is tokenized."""
    lengths: list[int] = []
    before = Tokenizer._encoded

    def noted(self, text, *, special_tokens):
        lengths.append(len(text))
        return before(self, text, special_tokens=special_tokens)

    monkeypatch.setattr(Tokenizer, "_encoded", noted)
    return lengths


def test_texts_of_megabytes_are_refused_by_their_size(server, encoded):
    for path, body in texts(" " * 7 * MILLION):
        assert refused(server, path, body)["code"] == "context_length_exceeded"
    assert max(encoded, default=0) <= 1
    assert refused(server, COMPLETIONS, {"prompt": "é" * 400_000})["code"]  # 800,000 bytes


def in_messages(text):
    """That text, at each place of a request of Anthropic's API of which a template can show it."""
    hi = {"role": "user", "content": "hi"}
    used = {"type": "tool_use", "id": "1", "name": "f"}
    result = {"type": "tool_result", "tool_use_id": "1"}

    def turns(call, answer):
        return {"messages": [hi, {"role": "assistant", "content": [call]},
                             {"role": "user", "content": [answer]}]}  # fmt: skip

    tool = {"name": "f", "input_schema": {}}
    bodies = {
        "text": {"messages": [{"role": "user", "content": text}]},
        "blocks": {"messages": [{"role": "user", "content": [
            {"type": "text", "text": text[at : at + 1000]} for at in range(0, len(text), 1000)]}]},
        "system": {"system": text},
        "description": {"tools": [{**tool, "description": text}]},
        "schema": {"tools": [{**tool, "input_schema": {"enum": [text]}}]},
        "name in a schema": {"tools": [{**tool, "input_schema": {text: 1}}]},
        "arguments": turns({**used, "input": {"a": text}}, {**result, "content": "x"}),
        "name of an argument": turns({**used, "input": {text: 1}}, {**result, "content": "x"}),
        "result": turns({**used, "input": {}}, {**result, "content": text}),
    }  # fmt: skip
    head = {"model": "kvkeep-tiny", "max_tokens": 1, "messages": [hi]}
    return {name: {**head, **body} for name, body in bodies.items()}


@pytest.mark.parametrize("place", in_messages(""))
@pytest.mark.parametrize("text", [" " * 7 * MILLION, "return a copy " * 50_000], ids=len)
def test_every_text_of_a_message_counts(server, encoded, monkeypatch, place, text):
    """Its size or its beginning decides, and no template sees it."""
    monkeypatch.setattr(server.engine.tokenizer._tokenizer, "chat_template", TOOLS)
    error = refused(server, MESSAGES, in_messages(text)[place])
    assert "accepts at most" in error["message"]
    assert sum(encoded) <= 16 * server.service.longest_prompt + 1


def test_joining_blocks_takes_no_more_for_each_of_many():
    """Sixteen times the blocks; joined one by one, they took 250 times as long."""

    def seconds(count):
        blocks = [{"type": "text", "text": "a" * 1000}] * count
        turn = {"role": "user", "content": blocks}
        begun = time.perf_counter()
        read_call({"model": "m", "max_tokens": 1, "messages": [turn]})
        return time.perf_counter() - begun

    few, many = (min(seconds(count) for _ in range(5)) for count in (512, 8192))
    assert many < 64 * few


def test_texts_that_might_fit_are_refused_by_their_beginning(server, encoded):
    """No more than the pieces are tokenized that it takes to know."""
    longest = server.service.longest_prompt
    for path, body in texts("return a copy " * 50_000):
        encoded.clear()
        assert refused(server, path, body)["code"] == "context_length_exceeded"
        assert max(encoded) <= 1 << 16
        assert sum(encoded) <= 16 * longest + 1


def test_a_text_that_is_a_little_too_long_is_still_counted(server):
    status, told = post(server, "/tokenize", {"prompt": "return a copy " * 3_000})
    assert status == 200
    assert told["count"] > told["max_model_len"]


def many(value, count):
    """The JSON of a list of so many."""
    return f"[{','.join([value] * count)}]"


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (lambda: many("[1]", MILLION), "objects and lists"),
        (lambda: many("{}", MILLION), "objects and lists"),
        (lambda: many('""', MILLION), "strings"),
        (lambda: "{" + ",".join(f'"{at}":0' for at in range(500_000)) + "}", "strings"),
        (lambda: many("1", 2 * MILLION), "values"),
        (lambda: f'[["[{{,","[{{,",{many("[]", 40_000)[1:-1]}]]', "objects and lists"),
    ],
    ids=["lists", "objects", "strings", "keys", "numbers", "lists after brackets in texts"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/detokenize"])
def test_bodies_of_many_values_are_refused_before_they_are_parsed(
    server, monkeypatch, path, prompt, what
):
    def never(*args, **more):
        raise AssertionError("it was parsed")

    monkeypatch.setattr("kvkeep.serve.server.routes.base.from_json", never)
    content = b'{"prompt":%b}' % prompt().encode()
    answer = server.http.post(path, content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f" {what}; a request has at most " in error["message"]


@pytest.mark.parametrize("text", ['"' * 300_000, "[" * 700_000, '\\"[,{' * 100_000, ",\\" * 60_000])
def test_signs_in_a_text_are_not_counted(server, text):
    """It is refused for being long, not for its brackets."""
    assert "most" in refused(server, COMPLETIONS, {"prompt": text})["message"]
    status, told = post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": text})
    assert status == 200, told


def test_many_small_parts_are_refused(server):
    turn = {"role": "user", "content": [{"type": "text", "text": ""}] * 5000}
    error = refused(server, CHAT, {"messages": [turn] * 2})
    assert "8,192" in error["message"]


def test_more_tokens_than_anybody_can_use_are_not_turned_into_text(server):
    error = refused(server, "/detokenize", {"tokens": [5] * 20_000})
    assert error["code"] == "context_length_exceeded"


def large_text(path):
    """A body with two times `LARGE` of text that fits."""
    text = " " * 2 * LARGE
    if path != MESSAGES:
        return {"prompt": text}
    tool = {"name": "f", "description": text, "input_schema": {}}
    return {"model": "kvkeep-tiny", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", MESSAGES])
def test_small_texts_are_never_behind_large_ones(server, monkeypatch, path):
    monkeypatch.setattr(server.engine.tokenizer._tokenizer, "chat_template", TOOLS)
    go = threading.Event()
    waiting = []
    before = Tokenizer._encoded

    def slow(self, text, *, special_tokens):
        if len(text) > LARGE:
            waiting.append(1)
            assert go.wait(60)
        return before(self, text, special_tokens=special_tokens)

    monkeypatch.setattr(Tokenizer, "_encoded", slow)
    short = {} if path == "/tokenize" else {"max_tokens": 1}
    small = COMPLETIONS if path == MESSAGES else path
    body = {**large_text(path), **short}
    with ThreadPoolExecutor(4) as clients:
        large = [clients.submit(post, server, path, body) for _ in range(4)]
        try:
            eventually(lambda: waiting)
            for text in ("a", " " * 1000):
                assert post(server, small, {"prompt": text, **short})[0] == 200
            assert (
                post(
                    server,
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
                )[0]
                == 200
            )
            assert server.http.get("/kv/requests").status_code == 200
            assert len(waiting) == 1, "large ones wait for each other"
        finally:
            go.set()
        assert {one.result()[0] for one in large} == {200}


def test_small_bodies_are_never_behind_large_ones(server, monkeypatch):
    """Large ones are parsed off the event loop, one after the other."""
    go = threading.Event()
    parsing = []
    before = base.parse_body

    def slow(body, model):
        if body.size > LARGE:
            parsing.append(1)
            assert go.wait(60)
        return before(body, model)

    monkeypatch.setattr(base, "parse_body", slow)
    asked = {"prompt": "a", "max_tokens": 1}
    with ThreadPoolExecutor(3) as clients:
        body = {**asked, "user": "x" * 2 * LARGE}
        large = [clients.submit(post, server, COMPLETIONS, body) for _ in range(2)]
        try:
            eventually(lambda: parsing)
            small = clients.submit(post, server, COMPLETIONS, asked)
            assert small.result(20)[0] == 200
            assert len(parsing) == 1, "large ones wait for each other"
        finally:
            go.set()
        assert [one.result()[0] for one in large] == [200, 200]


@given(
    pieces=st.lists(
        st.sampled_from([" ", "\n", "a", "é", "🙂", "return a copy", "    ", "0", "</s>", "\t"])
        | st.text(max_size=5),
        max_size=30,
    ),
    times=st.integers(1, 200),
)
def test_nothing_that_fits_is_refused(pieces, times):
    """The size and the pieces only refuse what has more tokens than fit."""
    tokenizer = _tokenizer()
    text = "".join(pieces) * times
    try:
        count = len(tokenizer.encode(text))
    except ValueError:  # half a surrogate pair
        return
    longest = max(1, count)
    service = SimpleNamespace(
        tokenizer=tokenizer,
        longest_prompt=longest,
        longest_text=longest * tokenizer.longest_token,
    )
    jobs.refuse_far_too_long(service, "prompt", text)
    if len(text.encode()) > 4 * 16 * longest:
        return
    service.longest_prompt = max(1, count // 50)
    service.longest_text = service.longest_prompt * tokenizer.longest_token
    try:
        jobs.refuse_far_too_long(service, "prompt", text)
    except ApiError:
        assert count > service.longest_prompt


_made: list[Tokenizer] = []


def _tokenizer() -> Tokenizer:
    if not _made:
        _made.append(Tokenizer.load(bundled_model()))
    return _made[0]
