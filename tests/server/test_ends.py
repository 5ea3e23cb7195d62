"""How requests end besides by themselves: clients that go, time, a full queue, faults, drain."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx
import openai
import pytest
from real_server import COMPLETIONS, NAME, eventually, raw, standing

from kvkeep.core.errors import OutOfPages
from kvkeep.serve.engine import Limits

pytestmark = pytest.mark.model

ENDLESS = {"prompt": "Return a copy", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "Return a copy", "max_tokens": 2, "temperature": 0}


def outcomes(server, outcome):
    """How many requests ended so, as /metrics says."""
    text = server.http.get("/metrics").text
    lines = [line for line in text.splitlines() if f'outcome="{outcome}"' in line]
    return sum(float(line.split()[-1]) for line in lines if "requests_total" in line)


# --- clients that go -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_pages_at_once(server, stream):
    gone = outcomes(server, "gone")
    with raw(server, {**ENDLESS, "stream": stream, "n": 3}) as connection:
        eventually(lambda: server.stats()["cache"]["sequences"] == 3)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    eventually(lambda: server.stats()["cache"]["sequences"] == 0, 5)
    server.assert_idle()
    eventually(lambda: outcomes(server, "gone") == gone + 1, 5)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/messages"])
def test_a_stream_read_to_its_end_counts_as_answered(server, path):
    told = {"prompt": "Hi"} if path == COMPLETIONS else {
        "messages": [{"role": "user", "content": "Hi"}], "model": NAME
    }  # fmt: skip
    before = outcomes(server, "length"), outcomes(server, "gone")
    answer = server.http.post(path, json={**told, "max_tokens": 1, "stream": True})
    assert answer.status_code == 200
    after = (before[0] + 1, before[1])
    eventually(lambda: (outcomes(server, "length"), outcomes(server, "gone")) == after, 5)


def test_it_frees_them_before_the_next_step(server):
    """The steps between the moment the server learns of it and the last page."""
    steps, turn = [], threading.Lock()  # none is made between counting them and telling the engine
    worker, step = server.service.worker, server.engine.step
    abort = worker.abort

    def noted(generation):
        with turn:
            steps.append(server.engine.stats().steps)
            abort(generation)

    def stepping():
        with turn:
            return step()

    worker.abort, server.engine.step = noted, stepping
    try:
        with raw(server, {**ENDLESS, "stream": True}):
            eventually(lambda: server.engine.num_running == 1)
        eventually(lambda: not server.engine.has_work)
    finally:
        worker.abort, server.engine.step = abort, step
    assert server.engine.stats().steps - steps[0] <= 1


def test_one_that_waits_in_the_queue_goes_as_well(start_server):
    with start_server(limits=Limits(max_running=1, max_waiting=4)) as server:
        with raw(server, ENDLESS):
            eventually(lambda: server.engine.num_running == 1)
            with raw(server, ENDLESS):
                eventually(lambda: server.engine.num_waiting == 1)
            eventually(lambda: server.engine.num_waiting == 0, 5)
            assert server.engine.num_running == 1
        server.assert_idle()


def test_openais_client_closes_a_stream(server):
    stream = server.openai().completions.create(model="kvkeep-tiny", **{
        key: value for key, value in ENDLESS.items() if key != "ignore_eos"
    }, extra_body={"ignore_eos": True}, stream=True)  # fmt: skip
    assert next(iter(stream)).choices
    stream.close()
    eventually(lambda: not server.engine.has_work, 5)
    server.assert_idle()


@contextmanager
def standing_still(server, body):
    """A reader that does not read, and the server's end of its connection, which is full."""
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with raw(server, {**body, "stream": True, "logprobs": 5}, buffer=4096) as reader:
        eventually(lambda: server.engine.num_running)  # soon one for each of its answers
        (connection,) = server.listener.server_state.connections
        eventually(lambda: connection.flow.write_paused)
        yield reader, connection


def test_a_reader_that_stands_still_holds_nobody_up(start_server):
    """The kernel's buffers and the server's fill up, and the engine goes on to the end."""
    with start_server() as server:
        with standing_still(server, {**ENDLESS, "max_tokens": 300}) as (reader, connection):
            assert server.http.post(COMPLETIONS, json=SHORT).status_code == 200
            eventually(lambda: not server.engine.has_work)
            assert server.engine.stats().aborted == 0
            assert connection.flow.write_paused
            got = b""  # and what it has not read has waited for it
            while b"[DONE]" not in got:
                got += reader.recv(65536)
            assert got.count(b"\ndata: {") >= 299
        server.assert_idle()


def test_a_reader_that_stands_still_has_no_more_time_than_others(start_server, monkeypatch):
    four = {**ENDLESS, "n": 4, "max_tokens": 2000}  # soon more than anybody holds for a reader
    with start_server(request_timeout_s=10) as server, standing_still(server, four):
        step = server.engine.step
        # Its time passes all the same, and takes no processor's.
        monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.05), step())[1])
        eventually(lambda: outcomes(server, "timeout") == 1)
        server.assert_idle()


# --- time ------------------------------------------------------------------------------------


def test_a_request_has_its_time_and_no_more(start_server):
    with start_server(request_timeout_s=0.3) as server:
        answer = server.http.post(COMPLETIONS, json=ENDLESS)
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "timeout"
        server.assert_idle()
        tried = 0
        for seconds in (0.3, 3.0, 15.0):  # a busy machine needs more for some of it
            tried += 1
            server.service.settings = replace(server.settings, request_timeout_s=seconds)
            *events, nothing = server.http.post(
                COMPLETIONS, json={**ENDLESS, "stream": True}
            ).text.split("\n\n")
            assert nothing == ""
            if len(events) > 2:
                break
        assert len(events) > 2
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("timeout", "timeout_error")
        server.assert_idle()
        assert outcomes(server, "timeout") == 1 + tried
        stream = server.openai().completions.create(
            model="kvkeep-tiny", prompt="x", max_tokens=8000, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        with pytest.raises(openai.APIError, match="time limit"):
            list(stream)


def test_a_body_that_does_not_come_has_no_longer(start_server):
    with (
        start_server(request_timeout_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
    ):
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert connection.recv(12) == b"HTTP/1.1 408"


# --- a full queue ----------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_again(start_server):
    with start_server(limits=Limits(max_running=1, max_waiting=1)) as server:
        with raw(server, ENDLESS):
            eventually(lambda: server.engine.num_running == 1)
            with raw(server, ENDLESS):
                eventually(lambda: server.engine.num_waiting == 1)
                answer = server.http.post(COMPLETIONS, json=SHORT)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
                with pytest.raises(openai.RateLimitError):
                    server.openai().completions.create(model="kvkeep-tiny", prompt="x")
                assert server.http.get("/health").status_code == 200
        server.assert_idle()
        assert server.http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_prompts_of_one_request_are_taken_all_or_none(start_server):
    with start_server(limits=Limits(max_running=1, max_waiting=3)) as server:
        with raw(server, ENDLESS), raw(server, ENDLESS):
            eventually(lambda: (server.engine.num_running, server.engine.num_waiting) == (1, 1))
            three = {**SHORT, "prompt": ["one", "two", "three"]}
            assert server.http.post(COMPLETIONS, json=three).status_code == 429
            assert server.engine.num_waiting == 1
        server.assert_idle()
        assert len(server.http.post(COMPLETIONS, json=three).json()["choices"]) == 3


# --- faults ----------------------------------------------------------------------------------


def failing(server, monkeypatch, error):
    """The next forward pass fails with ``error``, and only that."""
    forward = type(server.engine.runner).forward
    left = [1]

    def once(self, *args, **kwargs):
        if left and left.pop():
            raise error
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(server.engine.runner), "forward", once)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("secret of another prompt"), (500, "engine_error")),
        (OutOfPages(2, 1, 4), (503, "out_of_pages")),
    ],
)
def test_a_fault_fails_its_requests_and_not_the_service(server, monkeypatch, error, told):
    failing(server, monkeypatch, error)
    answer = server.http.post(COMPLETIONS, json=SHORT)
    assert (answer.status_code, answer.json()["error"]["code"]) == told
    assert "secret" not in answer.text
    assert server.http.get("/health").status_code == 200
    assert server.http.post(COMPLETIONS, json=SHORT).status_code == 200
    server.assert_idle()


def test_a_stream_ends_with_what_went_wrong(server, monkeypatch, caplog):
    with server.http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        failing(server, monkeypatch, RuntimeError("broken"))
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert server.http.post(COMPLETIONS, json=SHORT).status_code == 200
    server.assert_idle()


def test_an_exception_out_of_a_step_fails_what_runs_and_nothing_later(server, monkeypatch, caplog):
    """The engine is not meant to raise; should it, the service lives."""
    step, left = server.engine.step, [1]

    def once():
        if left and left.pop():
            raise RuntimeError("not meant to")
        return step()

    monkeypatch.setattr(server.engine, "step", once)
    assert server.http.post(COMPLETIONS, json=SHORT).status_code == 500
    assert "an engine step failed" in caplog.text
    assert server.http.post(COMPLETIONS, json=SHORT).status_code == 200
    server.assert_idle()


def test_an_engine_that_cannot_give_up_ends_the_worker_and_says_so(
    start_server, monkeypatch, caplog
):
    with start_server() as server:

        def broken(*_):
            raise RuntimeError("beyond repair")

        monkeypatch.setattr(server.engine, "step", broken)
        monkeypatch.setattr(server.engine, "abort", broken)
        assert server.http.post(COMPLETIONS, json=SHORT).status_code == 500
        eventually(lambda: server.http.get("/health").status_code == 503)
        for answer in (
            server.http.get("/health"),
            server.http.post(COMPLETIONS, json=SHORT),
            server.http.get("/kv/stats"),
            server.http.get("/metrics"),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_stopped"
        monkeypatch.undo()


# --- the drain -------------------------------------------------------------------------------


def test_a_drain_lets_those_finish_that_run_and_takes_no_more(start_server):
    with start_server() as server:
        length = {**ENDLESS, "max_tokens": 300}
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}{COMPLETIONS}", json=length, timeout=30)
            )
        )
        with standing(server):
            asking.start()
            eventually(lambda: server.engine.num_running == 1)
            server.listener.stop()
            eventually(lambda: server.http.get("/health").status_code == 503)
            refused = server.http.post(COMPLETIONS, json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
        asking.join(30)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 300


def test_a_server_that_has_ended_can_be_stopped(start_server):
    with start_server() as server:
        server.listener.stop()
        eventually(server.listener._loop.is_closed)
        server.listener.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_does_not_wait_for_ever(start_server, stream):
    with start_server(drain_timeout_s=0.3) as server:
        begun = time.monotonic()
        with raw(server, {**ENDLESS, "stream": stream}) as connection:
            eventually(lambda: server.engine.num_running == 1)
            server.listener.stop()
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"shutting_down" in data
        assert data.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
        eventually(lambda: not server.engine.has_work)
        assert time.monotonic() - begun < 10
        eventually(lambda: not server.listener.started or server.listener.should_exit)
        server.engine.cache.check()
