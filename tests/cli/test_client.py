"""The demo's client, against sockets that say what a service should not."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager

import pytest

from kvkeep.cli.demo import ask
from kvkeep.core.errors import InvalidValue

STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 5},
}


@contextmanager
def saying(answer):
    """A server for one request, which says this whatever it is asked; gives its URL."""

    def serve():
        connection, _ = listening.accept()
        with connection:
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            connection.sendall(answer.encode())
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # what is not read would reset the connection
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(30)


def event(**fields):
    return f"data: {json.dumps(fields)}\n\n"


def chunk(content="", end=None):
    return event(choices=[{"index": 0, "delta": {"content": content}, "finish_reason": end}])


def failure(kind, message, code=None):
    return {"message": message, "type": kind, "param": None, "code": code}


def test_a_stream_is_put_together():
    whole = STREAM + chunk() + chunk("Gar") + ": a comment\n\n" + chunk("çon") + chunk(end="stop")
    with saying(whole + event(choices=[], usage=USAGE) + "data: [DONE]\n\n") as url:
        heard = ask(url, "/v1/chat/completions", {})
    assert heard.answer == ("Garçon", 3, "stop")
    assert (heard.prompt_tokens, heard.cached_tokens) == (7, 5)
    assert 0 < heard.ttft_s <= heard.seconds
    assert heard.tokens_per_s > 0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        STREAM,
        STREAM + chunk("Gar"),
        STREAM + chunk("Gar") + chunk(end="stop") + event(choices=[], usage=USAGE),
        STREAM + "data: [DONE]\n\n",
        STREAM + chunk("Gar") + event(error=failure("server_error", "it broke")),
    ],
    ids=["nothing", "head", "half", "no end", "end alone", "error"],
)
def test_an_answer_that_breaks_off_is_an_error(answer):
    with saying(answer) as url, pytest.raises(ConnectionError):
        ask(url, "/v1/chat/completions", {})


@pytest.mark.parametrize(
    ("error", "expected", "says"),
    [
        (failure("invalid_request_error", "max_tokens is 0"), InvalidValue, "^max_tokens is 0$"),
        (
            failure("invalid_request_error", "too long", "context_length_exceeded"),
            InvalidValue,
            "^too long; use a larger --memory$",
        ),
        (failure("server_error", "it broke"), ConnectionError, "^the server reports: it broke$"),
    ],
)
def test_a_refusal_is_in_the_services_own_words(error, expected, says):
    body = json.dumps({"error": error})
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\n\r\n"
    with saying(head + body) as url, pytest.raises(expected, match=says):
        ask(url, "/v1/chat/completions", {})
