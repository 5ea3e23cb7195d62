"""Usage by tenant on the proxy: whatever instances answer, and before one of ours."""

from __future__ import annotations

import json
import random

import httpx
import pytest
from standing_in import routing
from test_route_messages import ASK, NAME, STREAM, USAGE, chunk, client_of, whole

from kvkeep.serve.router.usage import AnswerUsage, UsageReader, tenant_name

COMPLETIONS = "/v1/completions"


def read(body, size=7):
    reader = UsageReader()
    reader.see({"type": "http.response.start", "status": 200})
    for at in range(0, len(body), size):
        reader.see({"type": "http.response.body", "body": body[at : at + size]})
    return reader.usage


def rows(proxy):
    answer = httpx.get(f"{proxy.url}/kv/usage").raise_for_status().json()
    return answer, {row.pop("cache_salt"): row for row in answer["tenants"]}


def test_the_usage_of_answers_of_both_kinds():
    ours = {**USAGE, "kvkeep": {"loaded_tokens": 0}}
    theirs = {
        "input_tokens": 3, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 5,
        "output_tokens": 2,
    }  # fmt: skip
    assert read(json.dumps({"choices": [], "usage": ours}).encode()) == AnswerUsage(20, 16, 3)
    assert read(json.dumps({"usage": USAGE, "choices": ["x" * 900]}).encode()) == (20, 16, 3)
    assert read(b"".join(STREAM)) == AnswerUsage(20, 16, 3)
    assert read(b"".join([*STREAM[:-1], chunk(usage=None), STREAM[-1]])) == (20, 16, 3)
    event = {"type": "message_delta", "delta": {}, "usage": theirs}
    assert read(b"data: " + json.dumps(event).encode()) == AnswerUsage(28, 20, 2)
    assert read(b"x" * 100_000 + b"".join(STREAM), 1000) == AnswerUsage(20, 16, 3)


def test_what_an_answer_says_is_no_usage():
    """The text of an answer may be a usage; its quotes are escaped there."""
    lie = json.dumps({"usage": {"prompt_tokens": 10**9}})
    body = json.dumps({"usage": USAGE, "choices": [{"text": lie}]}).encode()
    assert read(body) == AnswerUsage(20, 16, 3)
    for bad in (
        b"", b'"usage"', b'"usage":{', b'"usage":null', b'"usage": {"prompt_tokens": "9"',
        b'"usage":{"prompt_tokens"', b'"usage":' + b'{"a":' * 3000, b"\xff" * 40_000,
        b'"usage":{"total_tokens":3}',
    ):  # fmt: skip
        assert read(bad, 1000) is None
    odd = b'"usage":{"prompt_tokens":-5,"prompt_tokens_details":7,"completion_tokens":1e99}'
    assert read(odd) == AnswerUsage(0, 0, 0)
    draw = random.Random(1)
    good = b"".join(STREAM)
    for _ in range(300):
        mixed = bytearray(good)
        for _ in range(draw.randrange(1, 9)):
            mixed[draw.randrange(len(mixed))] = draw.randrange(256)
        found = read(bytes(mixed), draw.randrange(1, 400))
        assert found is None or min(found) >= 0


def test_tenants_are_counted_by_a_digest(tmp_path):
    with routing("well", usage=True) as (proxy, (one,)):
        one.chunks = whole({"role": "assistant", "content": "Hello."})
        for salt in ("secret", "secret", None):
            body = {"model": NAME, "prompt": [1, 2, 3], "cache_salt": salt}
            answer = httpx.post(f"{proxy.url}{COMPLETIONS}", json=body)
            assert answer.content == one.chunks[0], "a byte was changed"
        with client_of(proxy.url) as client:
            client.messages.create(**ASK, extra_body={"cache_salt": "other"})
            one.chunks = STREAM
            with client.messages.stream(**ASK, extra_body={"cache_salt": "other"}) as stream:
                stream.get_final_message()
        one.chunks = [b"data: [DONE]\n\n"]
        httpx.post(f"{proxy.url}{COMPLETIONS}", json={"prompt": [1], "cache_salt": "secret"})
        one.mood = "500"
        httpx.post(f"{proxy.url}{COMPLETIONS}", json={"prompt": [1], "cache_salt": "secret"})
        answer, found = rows(proxy)
    counted = {
        "requests": 2, "prompt_tokens": 40, "read_tokens": 32, "computed_tokens": 8,
        "generated_tokens": 6,
    }  # fmt: skip
    assert found[tenant_name("secret")] == found[tenant_name("other")] == counted
    assert found[""]["requests"] == 1
    assert answer["unread"] == 1
    assert "secret" not in json.dumps(answer)


def test_it_is_there_only_if_it_was_asked_for():
    with routing("well") as (proxy, _):
        assert httpx.get(f"{proxy.url}/kv/usage").status_code == 404


@pytest.mark.parametrize("mood", ["half", "head only", "503", "garbage"])
def test_answers_that_break_off_are_passed_on_as_before(mood):
    with routing(mood, usage=True) as (proxy, _):
        try:
            httpx.post(f"{proxy.url}{COMPLETIONS}", json={"prompt": [1]}, timeout=20)
        except httpx.RemoteProtocolError:
            assert mood in {"half", "head only"}
        assert rows(proxy)[1][None]["requests"] == 0
