"""``/livez`` and ``/ready``: what an orchestrator sees of a server."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from real_server import eventually, standing
from test_ends import COMPLETIONS, ENDLESS, SHORT, raw

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import Limits
from kvkeep.serve.server import ServerSettings

pytestmark = pytest.mark.model


def codes(server):
    """Status and error code of /livez and of /ready."""
    answers = [server.http.get(path) for path in ("/livez", "/ready")]
    return [(one.status_code, one.json().get("error", {}).get("code")) for one in answers]


FINE = [(200, None), (200, None)]


def test_they_need_no_key_and_no_known_host_name(start_server):
    with start_server(api_key="sk-secret") as server:
        assert codes(server) == FINE
        for path in ("/livez", "/ready"):
            answer = server.http.get(path, headers={"host": "10.1.2.3:8000"})
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert server.http.get("/livez/").status_code == 401


def test_a_full_queue_is_no_reason_to_send_all_requests_elsewhere(start_server):
    with start_server(limits=Limits(max_running=1, max_waiting=1)) as server:
        with raw(server, ENDLESS):
            eventually(lambda: server.engine.num_running == 1)
            with raw(server, ENDLESS):
                eventually(lambda: server.engine.num_waiting == 1)
                assert server.http.post(COMPLETIONS, json=SHORT).status_code == 429
                assert codes(server) == FINE
        server.assert_idle()


def test_a_server_that_drains_is_alive_and_not_ready(start_server):
    asked = {**ENDLESS, "max_tokens": 300}
    with start_server() as server, ExitStack() as stack:
        with standing(server):
            connection = stack.enter_context(raw(server, asked))
            eventually(lambda: server.engine.num_running == 1)
            server.listener.stop()
            eventually(lambda: codes(server) == [(200, None), (503, "shutting_down")])
        data = b"".join(iter(lambda: connection.recv(65536), b""))
        assert data.startswith(b"HTTP/1.1 200")
        assert b'"completion_tokens":300' in data


def test_an_engine_that_has_ended_is_neither(start_server, monkeypatch):
    with start_server() as server:

        def broken(*_):
            raise RuntimeError("beyond repair")

        monkeypatch.setattr(server.engine, "step", broken)
        monkeypatch.setattr(server.engine, "abort", broken)
        assert server.http.post(COMPLETIONS, json=SHORT).status_code == 500
        eventually(lambda: codes(server) == [(503, "engine_stopped")] * 2)
        monkeypatch.undo()


def test_an_engine_that_is_stuck_is_neither_until_it_goes_on(start_server, monkeypatch):
    with start_server(step_limit_s=0.2) as server:
        goes_on = threading.Event()
        step = server.engine.step

        def stuck():
            goes_on.wait(30)
            return step()

        monkeypatch.setattr(server.engine, "step", stuck)
        asking = threading.Thread(
            target=server.http.post, args=(COMPLETIONS,), kwargs={"json": SHORT}
        )
        asking.start()
        try:
            eventually(lambda: codes(server) == [(503, "engine_stuck")] * 2)
            assert "longer than 0.2 s" in server.http.get("/livez").json()["error"]["message"]
            assert server.http.get("/health").status_code == 200
        finally:
            goes_on.set()
            asking.join()
        eventually(lambda: codes(server) == FINE)
        server.assert_idle()


def test_a_step_has_some_time():
    with pytest.raises(InvalidValue, match="step_limit_s must be a number of seconds above 0"):
        ServerSettings(name="x", step_limit_s=0.0)
