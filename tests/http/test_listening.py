"""`bind`: a port belongs to one server, from before it listens until its connections are closed."""

from __future__ import annotations

import socket
import sys

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import bind


def reusable(host: str, port: int = 0) -> socket.socket:
    """A socket as servers bind it before they load a model; it does not listen."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


@pytest.mark.parametrize("theirs", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("listens", [False, True])
def test_a_port_that_another_has_bound_is_in_use(theirs: str, listens: bool) -> None:
    """Linux would bind both, and the first to listen would get the other's connections."""
    with reusable(theirs) as other:
        if listens:
            other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidValue, match=f"cannot listen on 127.0.0.1 port {port}: Address"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()


def test_of_two_at_once_one_gets_the_port() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InvalidValue, match="Address already in use"):
            bind("127.0.0.1", port)
        first.listen()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc/net/tcp")
@pytest.mark.parametrize("waits", [True, False], ids=["TIME_WAIT", "FIN_WAIT2"])
def test_a_server_that_starts_again_gets_its_port(waits: bool) -> None:
    """Though the connections that its predecessor closed first last another minute."""
    for _ in range(3):
        with bind("127.0.0.1", 0) as first:
            first.listen()
            port = first.getsockname()[1]
            client = socket.create_connection(("127.0.0.1", port))
            served, _ = first.accept()
        served.close()
        if waits:
            client.close()
        with bind("127.0.0.1", port) as second:
            second.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass
        client.close()
