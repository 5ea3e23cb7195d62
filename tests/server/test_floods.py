"""A real server under connections that send half of a request, and one in front of it."""

from __future__ import annotations

import socket

import pytest
from real_server import Running, eventually

from kvkeep.serve.http import ConnectionLimits
from kvkeep.serve.http.connections import Phase

pytestmark = pytest.mark.model

HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(start_server):
    limits = ConnectionLimits(most=50, head_s=60)
    with start_server(connections=limits, body_budget_bytes=8 << 20, api_key="key") as one:
        one.http.headers["authorization"] = "Bearer key"
        yield one


def connected(server: Running, *sent: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), 20)
    for data in sent:
        one.sendall(data)
    return one


def test_health_and_requests_get_in_through_half_open_connections(server):
    """Without a key, and many more than there may be."""
    flood = [connected(server, HALF) for _ in range(150)]
    health = connected(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert health.recv(1000).startswith(b"HTTP/1.1 200 ")
    body = {"prompt": "a", "max_tokens": 2}
    for _ in range(3):
        flood += [connected(server, HALF) for _ in range(60)]
        assert server.http.post(COMPLETIONS, json=body).status_code == 200
    assert len(server.listener.connections) <= 50
    told = server.http.get("/metrics").text
    displaced = next(one for one in told.splitlines() if 'closed_total{reason="displaced"}' in one)
    assert float(displaced.split()[-1]) >= 250
    for one in [*flood, health]:
        one.close()
    eventually(lambda: server.listener.connections.waiting(Phase.HEAD) <= 5)


def test_bodies_that_are_never_whole_leave_room_for_small_ones(server):
    size = 6 << 20
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer key\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size
    )
    first = connected(server, head, b" " * (size - 10))
    eventually(lambda: server.service.bodies.held > 5 << 20)
    second = connected(server, head, b" " * (size // 2))
    eventually(lambda: server.service.bodies.refused["budget"] == 1)
    assert server.http.post(COMPLETIONS, json={"prompt": "a" * 1000}).status_code == 200
    first.close()
    second.close()
    eventually(lambda: server.service.bodies.held == 0)
    large = server.http.post(COMPLETIONS, json={"prompt": "a", "user": "x" * (6 << 20)})
    assert large.status_code == 200
    eventually(lambda: server.service.bodies.held == 0)  # the client has the answer a moment before


def test_a_full_budget_says_when_to_come_again(server):
    bodies = server.service.bodies
    assert bodies.take(8 << 20)
    try:
        answer = server.http.post(COMPLETIONS, json={"prompt": "a", "user": "x" * 100_000})
    finally:
        bodies.give(8 << 20)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "bodies_full"
    assert answer.headers["retry-after"] == "1"


def test_bodies_without_a_key_are_not_held(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 6000000\r\n\r\n"
    one = connected(server, head, b"x" * 3_000_000)
    assert one.recv(1000).startswith(b"HTTP/1.1 401 ")
    assert server.service.bodies.held == 0
    one.close()
