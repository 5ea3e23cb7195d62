"""Ports of tests: no two processes get the same, and no connection does."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ports import free_port

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _ask(channel: Connection) -> None:
    channel.send([free_port() for _ in range(200)])
    channel.recv()  # they are its own as long as it lives


def test_processes_have_ports_of_their_own():
    """Forks begin with the same ports left, in the same order."""
    forks = multiprocessing.get_context("fork")
    mine = [free_port() for _ in range(200)]
    pipes = [forks.Pipe() for _ in range(4)]
    processes = [forks.Process(target=_ask, args=(theirs,)) for _, theirs in pipes]
    for process in processes:
        process.start()
    got = [*mine, *(port for ours, _ in pipes for port in ours.recv())]
    for ours, _ in pipes:
        ours.send(None)
    for process in processes:
        process.join()
    assert len(set(got)) == len(got) == 1000


def test_a_port_with_a_listener_is_not_given(monkeypatch):
    taken, free = free_port(), free_port()
    monkeypatch.setattr("ports._left", [free, taken])
    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() == free


@pytest.mark.skipif(not RANGE.exists(), reason="the range of this system is not in /proc")
def test_they_are_none_that_the_system_gives_to_connections():
    assert free_port() < int(RANGE.read_text().split()[0])
