"""Connections that never send a head, never read, or are too many; on real sockets."""

from __future__ import annotations

import logging
import resource
import socket
import time

import pytest
from guarded import HEALTH, LARGE, answer, eventually, everything, guarded, is_closed

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import ConnectionLimits, connections_for, raise_file_limit
from kvkeep.serve.http.connections import Phase, RateLimitedLog

HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "


def test_half_open_connections_do_not_shut_others_out():
    """Each takes the place of the one that has waited longest; whole requests are answered."""
    with guarded(most=20, head_s=60) as server:
        half = [server.connect(HALF) for _ in range(100)]
        assert server.status() == 200
        assert len(server.connections) <= 20
        eventually(lambda: sum(map(is_closed, half)) >= 80)
        assert not is_closed(half[-1])
        assert server.connections.closed["displaced"] >= 81
        assert server.connections.closed["refused"] == 0


def test_half_open_connections_go_before_idle_ones():
    with guarded(most=10, head_s=60) as server:
        idle = [server.connect(HEALTH) for _ in range(5)]
        assert all(answer(one) == b"200 ok" for one in idle)
        for _ in range(40):
            server.connect(HALF)
        eventually(lambda: server.connections.closed["displaced"] == 35)
        for one in idle:
            one.sendall(HEALTH)
            assert answer(one) == b"200 ok"


def test_requests_at_hand_are_not_closed_for_others():
    with guarded(most=3, head_s=60) as server:
        wait = [server.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(3)]
        eventually(lambda: server.connections.waiting(Phase.ANSWER) == 3)
        told = everything(server.connect(HEALTH))
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b'"code": "no_connection"' in told
        assert b"Retry-After: 1" in told
        assert server.connections.closed["refused"] == 1
        server.release.set()
        for one in wait:
            assert answer(one) == b"200 ok"
        assert server.status() == 200  # one that is idle now made room


def test_a_request_that_is_there_is_read_before_others_take_its_place():
    """All but one connection are busy, and many come at once behind the request."""
    with guarded(most=4, head_s=60) as server:
        for _ in range(3):
            server.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: server.connections.waiting(Phase.ANSWER) == 3)
        for _ in range(5):
            server.pause(0.2)
            health = server.connect(HEALTH)
            half = [server.connect(HALF) for _ in range(10)]
            assert answer(health) == b"200 ok"
            eventually(lambda half=half: sum(map(is_closed, half)) >= 9)


def test_a_body_that_is_not_whole_goes_before_a_request_is_refused():
    with guarded(most=2) as server:
        slow = server.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        server.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: server.connections.waiting(Phase.BODY) == 1)
        eventually(lambda: server.connections.waiting(Phase.ANSWER) == 1)
        assert server.status() == 200
        assert everything(slow) == b""


def test_a_head_has_a_deadline_however_it_trickles():
    with guarded(head_s=0.3, keep_alive_s=60) as server:
        silent, slow = server.connect(), server.connect(HALF)
        used = server.connect(HEALTH)
        assert answer(used) == b"200 ok"
        used.sendall(HALF)
        for one in (silent, slow, used):
            assert everything(one) == b""
        assert server.connections.closed["head_timeout"] == 3
        idle = server.connect(HEALTH)
        assert answer(idle) == b"200 ok"
        time.sleep(0.6)  # that may be idle for longer
        assert not is_closed(idle)
        idle.sendall(HEALTH)
        assert answer(idle) == b"200 ok"


def test_an_idle_connection_ends_without_being_counted():
    with guarded(head_s=60, keep_alive_s=0.2) as server:
        one = server.connect(HEALTH)
        assert everything(one).count(b"HTTP/1.1 200 ") == 1
        assert sum(server.connections.closed.values()) == 0


def test_the_rest_of_a_body_that_nobody_wants_keeps_no_connection():
    """An answer is there before the body: what trickles then is no reason to stay."""
    with guarded(keep_alive_s=0.3) as server:
        one = server.connect(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
        assert answer(one) == b"200 ok"
        one.sendall(b"more")
        assert everything(one) == b""


def test_a_client_that_does_not_read_is_cut_off():
    with guarded(keep_alive_s=0.3) as server:
        one = server.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", window=4096)
        eventually(lambda: server.connections.closed["unread"] == 1)
        assert len(everything(one)) < LARGE


def test_a_client_that_reads_slowly_is_not():
    with guarded(keep_alive_s=0.3, stall_s=0.3) as server:
        one = server.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", window=1 << 16)
        read = 0
        while read < LARGE:
            data = one.recv(1 << 16)
            assert data
            read += len(data)
        assert server.connections.closed["unread"] == 0


def test_files_that_run_out_are_counted_logged_once_and_made_room_for(caplog):
    """Without a limit that holds: accepting fails, and goes on when there is a file again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with guarded(most=10_000, head_s=60) as server, caplog.at_level(logging.WARNING):
        clients = [socket.socket() for _ in range(60)]
        used = max(one.fileno() for one in clients)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
        try:
            for one in clients:
                one.settimeout(20)
                one.connect(server.address)
                one.sendall(HALF)
            eventually(lambda: server.connections.accept_errors > 3)
            last = clients[-1]
            last.sendall(b"x\r\n\r\n")
            assert answer(last) == b"200 ok"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in clients:
                one.close()
        said = [one for one in caplog.records if "cannot accept a connection" in one.message]
        assert len(said) == 1


def test_lines_that_clients_cause_are_few(caplog):
    now = [0.0]
    limited = RateLimitedLog(logging.getLogger("kvkeep.test"), seconds=10, clock=lambda: now[0])
    for _ in range(1000):
        limited.warning("failed: %s", "x")
    now[0] = 11.0
    limited.warning("failed: %s", "y")
    assert [one.message for one in caplog.records] == [
        "failed: x",
        "failed: y (999 more like it since the last line)",
    ]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"BAD\r\n\r\n", "Invalid HTTP request received."),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n"
            b"Upgrade: websocket\r\n\r\n",
            "Unsupported upgrade request.",
        ),
    ],
)
def test_requests_that_are_none_are_logged_once(caplog, sent, said):
    with guarded() as server:
        for _ in range(20):
            everything(server.connect(sent))
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert said in warnings
    assert len(warnings) == len(set(warnings)) <= 2


def test_connections_fit_the_limit_on_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert connections_for() == 768
        assert connections_for(files_each=2) == 384
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert connections_for() == 300
        assert raise_file_limit() == min(hard, 65_536)
        assert connections_for() == min(1024, min(hard, 65_536) - 256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("wrong", [{"most": 0}, {"head_s": 0.0}, {"stall_s": float("inf")}])
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(InvalidValue):
        ConnectionLimits(**wrong)
