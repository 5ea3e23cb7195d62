"""What no client sends by mistake: each field with each wrong value, bytes that are no request.

Every answer is an error object or an honest 200, and the next client notices nothing of it.
``KVKEEP_FUZZ=long`` sends twenty times as many random bodies.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import time

import httpx
import pytest

from kvkeep.serve.engine import Limits

pytestmark = pytest.mark.model

BODIES = 300 * (20 if os.environ.get("KVKEEP_FUZZ") == "long" else 1)
JSON = {"content-type": "application/json"}
COMPLETIONS = "/v1/completions"
SAMPLING = {
    "model": "kvkeep-tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "n": 2, "stop": ["x"], "seed": 1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logit_bias": {"7": 1.0}, "ignore_eos": True, "stream": False,
    "stream_options": None, "cache_salt": "salt", "user": "u", "metadata": {"a": "b"},
    "safety_identifier": "s", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "kvkeep": {"store": True, "draft_tokens": 2},
}  # fmt: skip
FULL = {
    COMPLETIONS: {**SAMPLING, "prompt": ["Return", "a copy"], "n": 1, "echo": False,
                  "logprobs": 1},
    "/v1/chat/completions": {
        **SAMPLING, "logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"},
        "messages": [{"role": "system", "content": "Be brief.", "name": "me"},
                     {"role": "user", "content": [{"type": "text", "text": "What?"}]}],
    },
    "/v1/messages": {
        "model": "kvkeep-tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "stop_sequences": ["x"], "stream": False, "cache_salt": "salt",
        "metadata": {"user_id": "u"}, "kvkeep": {"store": True},
        "cache_control": {"type": "ephemeral", "ttl": "5m"},
        "system": [{"type": "text", "text": "Be brief.",
                    "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]},
                     {"role": "assistant",
                      "content": [{"type": "thinking", "thinking": "a", "signature": "b"},
                                  {"type": "text", "text": "That."}]},
                     {"role": "user", "content": "And?"}],
    },
    "/tokenize": {"model": "kvkeep-tiny", "messages": [{"role": "user", "content": "What?"}]},
    "/detokenize": {"model": "kvkeep-tiny", "tokens": [5, 6]},
    "/kv/clear": {"cache_salt": "salt"},
    "/kv/remove": {"prompt": "Return", "cache_salt": "salt"},
}  # fmt: skip
DEEP = 3.0
for _ in range(150):
    DEEP = [DEEP]
WRONG = {
    "null": None, "true": True, "zero": 0, "minus one": -1, "a half": 0.5, "-0.0": -0.0,
    "huge": 10**40, "-huge": -(10**40), "int64": 2**63 - 1, "uint64": 2**64 - 1, "int32": 2**31,
    "1e308": 1e308, "5e-324": 5e-324, "empty": "", "x": "x", "a number as text": "1",
    "NUL": "\x00", "half a pair": "\ud800", "beyond": "\U0010ffff", "lines": "data: x\n\nx\r\n",
    "a template": "{{ 7 * 7 }}<|im_end|>", "long": "ab " * 100_000, "list": [], "object": {},
    "list of list": [[]], "list of null": [None], "list of NUL": ["\x00"], "deeper": {"a": {}},
    "a list of all": [1, "x", None, {}, []], "many": [1] * 20_000, "deep": DEEP,
    "prototype": {"__proto__": 1, "__class__": 2}, "NUL as a key": {"\x00": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(start_server, small_model):
    """A server whose answers are short whatever is asked: its pool has 256 tokens."""
    limits = Limits(max_running=8, max_waiting=64)
    pool = {"num_pages": 32, "page_size": 8, "model": small_model}
    with start_server(**pool, limits=limits, request_timeout_s=20) as one:
        yield one


ORDINARY = {"prompt": "Return a copy of", "temperature": 0, "max_tokens": 4, "cache_salt": "me"}


def told(server):
    """What a client of its own is told, quickly."""
    with httpx.Client(base_url=server.url, timeout=5) as client:
        return client.post(COMPLETIONS, json=ORDINARY).raise_for_status().json()["choices"]


@pytest.fixture(scope="module")
def told_before(server):
    """What it is told before anything hostile was sent."""
    return told(server)


@pytest.fixture(autouse=True)
def _others_notice_nothing(server, told_before):
    """Afterwards: the same answer to the same question, quickly, and no page is held."""
    yield
    assert told(server) == told_before
    server.assert_idle()
    assert server.engine.stats().failed == 0


def assert_refused_or_right(answer):
    if answer.status_code == 200:
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        ends = ("data: [DONE]\n\n", 'data: {"type":"message_stop"}\n\n')
        assert answer.text.endswith(ends) if is_stream else answer.json()
        return
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    body = answer.json()
    anthropic = body.get("type") == "error"
    fields = {"message", "type"} if anthropic else {"message", "type", "param", "code"}
    assert body["error"].keys() == fields
    assert len(answer.content) < 2000


def places(value, path=()):
    """All paths into ``value``, its own (the empty one) first."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(value, path, wrong):
    """``value`` with ``wrong`` at ``path``."""
    if not path:
        return wrong
    value = copy.copy(value)
    value[path[0]] = changed(value[path[0]], path[1:], wrong)
    return value


def test_the_full_requests_are_right(server):
    """Else nothing was tried below but the first field."""
    for path, body in FULL.items():
        answer = server.http.post(path, json=body)
        needed = 403 if path == "/kv/remove" else 200  # that one needs a server with a key
        assert answer.status_code == needed, answer.text


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_each_field_with_a_wrong_value(server, wrong):
    for path, body in FULL.items():
        for place in places(body):
            content = json.dumps(changed(body, place, wrong)).encode()
            assert_refused_or_right(server.http.post(path, content=content, headers=JSON))


@pytest.mark.parametrize("path", FULL)
def test_random_bodies(server, path):
    """Bytes of any kind, and a right request that was cut, changed, or repeated in between."""
    rng = random.Random(path)
    fates = []
    right = json.dumps(FULL[path]).encode()
    for _ in range(BODIES):
        start, stop = sorted(rng.choices(range(len(right) + 1), k=2))
        body = rng.choice(
            (
                rng.randbytes(rng.randrange(200)),
                right[:stop],
                right[:start] + right[stop:],
                right[:start] + rng.randbytes(3) + right[start:],
                right[:start] + bytes([rng.choice(b'{}[]",:0-.eE\\u\x00')]) + right[start + 1 :],
                right[:stop] + right[start:],
            )
        )
        answer = server.http.post(path, content=body, headers=JSON)
        assert_refused_or_right(answer)
        fates.append(answer.status_code)
    assert fates.count(400) > BODIES / 2
    taken = 403 if path == "/kv/remove" else 200  # that one needs a server with a key
    assert taken in fates  # some changes leave it right


@pytest.mark.parametrize("field", ["prompt", "user", "cache_salt", "stop", "model", "nothing"])
def test_megabytes_in_a_field(server, field):
    for text in ("x" * 6_000_000, "\x00" * 1_000_000, "\u00e9" * 1_000_000, "x " * 2_000_000):
        began = time.monotonic()
        body = {"prompt": "x", "max_tokens": 1, field: text}
        assert_refused_or_right(server.http.post(COMPLETIONS, json=body))
        assert time.monotonic() - began < 15


QUERIES = ["depth=%00", "depth=-1", "depth=1&depth=2", "depth[]=1", "branches=1e3", "format=%ff",
           "namespace=%00", "namespace=%ed%a0%80", "namespace=" + "%f0%9f%98%80" * 256, "&&&==&",
           "depth=" + "9" * 4000, "%", "namespace"]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_queries(server, query):
    assert_refused_or_right(server.http.get(f"/kv/map?{query}"))


PATHS = ["/v1/models/%00", "/v1/models/%2e%2e/%2e%2e", "/v1/models/" + "x" * 8000, "//", "/%ff",
         "/v1//models", "/kv/map/", "/v1/models/kvkeep-tiny%0d%0aX: y", "/*"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "BREW", "OPTIONS", "HEAD"])
def test_addresses(server, method, path):
    answer = server.http.request(method, httpx.URL(server.url + path))
    assert 400 <= answer.status_code < 500 or path.endswith("tree/")
    if method != "HEAD":
        assert_refused_or_right(answer)


# --- below HTTP ------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Return a copy", "max_tokens": 100, "ignore_eos": true}'
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NO_REQUESTS = {
    "nothing": b"",
    "noise": random.Random(1).randbytes(5000),
    "zeros": b"\x00" * 5000,
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 500,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: \x00\r\n\r\n",
    "a header without end": b"GET /health HTTP/1.1\r\nX: " + b"x" * 200_000,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
    "a long address": b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "half a head": HEAD,
    "half a body": HEAD + b"Content-Length: 500\r\n\r\n" + BODY,
    "a length below zero": HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    "no length": HEAD + b"Content-Length: five\r\n\r\n" + BODY,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    "a huge length": HEAD + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n" + BODY,
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "half a chunk": CHUNKED + b"ff\r\n" + BODY,
    "chunks without end": CHUNKED + b"%x\r\n%s\r\n" % (len(BODY), BODY),
    "a chunk of no size": CHUNKED + b"xyz\r\n" + BODY,
    "a chunk below zero": CHUNKED + b"-1\r\n" + BODY,
    "a chunk of all": CHUNKED + b"f" * 30 + b"\r\n" + BODY,
    "no known coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a right request, and gone": HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "many at once": (HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)) * 50,
}


@pytest.mark.parametrize("leaves", ["writing", "at once"])
@pytest.mark.parametrize("sent", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_what_is_no_request(server, sent, leaves):
    """It ends with an answer that is no 5xx, or with none."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            connection.sendall(sent)
            if leaves == "at once":
                return
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        except TimeoutError:
            raise
        except OSError:
            return  # refused in the middle of it
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    for status in answer.split(b"HTTP/1.1 ")[1:]:
        assert status[:3] == b"200" or status.startswith(b"4"), status[:200]


def test_connections_that_say_nothing_stop_nobody(server):
    """Slowloris: two hundred that send a byte now and then; others are served as ever."""
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for number, connection in enumerate(slow):
            connection.sendall(HEAD[: number % len(HEAD)])
        for _ in range(5):
            for connection in slow[:: len(HEAD)]:
                connection.sendall(b"X")
            began = time.monotonic()
            answer = server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
            assert time.monotonic() - began < 5
    finally:
        for connection in slow:
            connection.close()
