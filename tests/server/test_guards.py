"""Who is let in: host names, the API key, bodies of a size; and what is written down of it."""

from __future__ import annotations

import logging
import socket

import httpx
import openai
import pytest
from real_server import eventually

pytestmark = pytest.mark.model

KEY = "a-long-secret"
COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Return a copy", "max_tokens": 1}


def as_chunks(data, size=1000):
    """``data`` as a body whose length nobody says."""
    return (data[start : start + size] for start in range(0, len(data), size))


def spoken(server, *lines, body=b""):
    """What the server answers to these lines, as they are."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


# --- host names ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "LOCALHOST:9", "[::1]", "[::1]:80"])
def test_its_own_names_are_answered(server, host):
    assert spoken(server, "GET /health HTTP/1.1", f"Host: {host}").startswith("HTTP/1.1 200")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "[::2]", "a:b:c"]
)
def test_other_names_are_not(server, host):
    """A page under a name that its owner points at this machine cannot read what is here."""
    answer = spoken(server, "GET /kv/map HTTP/1.1", f"Host: {host}")
    assert answer.startswith("HTTP/1.1 400")
    assert '"code":"unknown_host"' in answer


def test_names_can_be_allowed(start_server):
    with start_server(hosts=frozenset({"gpu.internal"})) as server:
        assert server.http.get("/health").status_code == 400
        allowed = spoken(server, "GET /health HTTP/1.1", "Host: gpu.internal:8000")
        assert allowed.startswith("HTTP/1.1 200")
    with start_server(hosts=None) as server:
        any_name = spoken(server, "GET /health HTTP/1.1", "Host: whatever.example")
        assert any_name.startswith("HTTP/1.1 200")


def test_no_web_page_may_read_it(server):
    """No CORS: neither a simple request nor a preflight is told that it may."""
    origin = {"origin": "https://evil.example"}
    simple = server.http.get("/v1/models", headers=origin)
    assert "access-control-allow-origin" not in simple.headers
    asked = {**origin, "access-control-request-method": "POST"}
    preflight = server.http.options(COMPLETIONS, headers=asked)
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)


@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/kv/clear", "/kv/remove"]
)
def test_no_web_page_may_write_without_asking(server, path):
    """What a page can send to another's server unasked is never JSON by its type."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = server.http.post(path, content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415
    assert server.http.post(path).status_code == 415


# --- the API key -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(start_server):
    with start_server(api_key=KEY, max_body_bytes=20_000) as server:
        yield server


@pytest.mark.parametrize(
    "header",
    [None, "", KEY, "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}",
     f"Bearer  {KEY}", f"Bearer {KEY.upper()}", "Bearer \xe9\xff", "Bearer " + "x" * 10_000],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("POST", COMPLETIONS), ("GET", "/kv/map"), ("POST", "/kv/clear"),
     ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("GET", "/health/")],
)  # fmt: skip
def test_without_the_key_nothing_is_answered(locked, method, path, header):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = locked.http.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text


def test_with_the_key_everything_is(locked):
    headers = {"authorization": f"bearer {KEY}"}
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    assert locked.http.post(COMPLETIONS, json=SHORT, headers=headers).status_code == 200
    assert locked.openai(api_key=KEY).models.list().data[0].id == "kvkeep-tiny"
    with pytest.raises(openai.AuthenticationError):
        locked.openai(api_key="other").models.list()


def test_health_needs_no_key(locked):
    assert locked.http.get("/health").status_code == 200


def test_the_key_is_in_the_document_and_nowhere_else(locked, caplog):
    headers = {"authorization": f"Bearer {KEY}"}
    with caplog.at_level(logging.DEBUG):
        document = locked.http.get("/openapi.json", headers=headers)
    assert "HTTPBearer" in document.json()["components"]["securitySchemes"]
    assert KEY not in document.text + caplog.text + repr(locked.settings)


# --- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [20_001, 2_000_000])
def test_a_body_beyond_the_limit_is_refused(locked, chunked, size):
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = b'{"prompt": "' + b"x" * (size - 14) + b'"}'
    answer = locked.http.post(
        COMPLETIONS, content=as_chunks(data) if chunked else data, headers=headers
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert "20,000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_within_it_is_read(locked, chunked):
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = b'{"max_tokens": 1, "prompt": "' + b"x " * 2_000 + b'"}'
    data += b" " * (20_000 - len(data))
    answer = locked.http.post(
        COMPLETIONS, content=as_chunks(data) if chunked else data, headers=headers
    )
    assert answer.status_code == 200


def test_a_body_without_an_end_is_refused_while_it_comes(locked):
    def endless():
        while True:
            yield b'{"prompt": "' + b"x" * 1000

    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    try:
        answer = locked.http.post(COMPLETIONS, content=endless(), headers=headers, timeout=20)
    except httpx.WriteError:
        return  # it hung up on us, which is as good
    assert answer.status_code == 413


def test_a_length_that_is_a_lie_is_no_reason_to_read(locked):
    answer = spoken(
        locked, f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}",
        "Content-Type: application/json", "Expect: 100-continue", "Content-Length: 99999999999999",
    )  # fmt: skip
    assert answer.startswith("HTTP/1.1 413")


# --- the log ---------------------------------------------------------------------------------


def test_the_log_has_one_short_line_a_request(server, caplog):
    with caplog.at_level(logging.INFO, "kvkeep.access"):
        server.http.post(COMPLETIONS, json={**SHORT, "prompt": "a private matter", "user": "Ann"})
        server.http.get("/v1/models?search=private")
        spoken(server, "GET /x%0aPOST%20/forged%1b[31m HTTP/1.1", "Host: localhost")
        eventually(lambda: "/forged" in caplog.text)  # each line follows its answer
    lines = [r.getMessage() for r in caplog.records if r.name == "kvkeep.access"]
    assert [line.rsplit(" ", 2)[0] for line in lines] == [
        f"POST {COMPLETIONS} 200",
        "GET /v1/models 200",
        "GET /x%0APOST%20/forged%1B%5B31m 404",
    ]
    assert "private" not in caplog.text
