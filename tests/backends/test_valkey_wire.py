"""The wire protocol by itself, in pieces of any size."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.store.backends.valkey.memory import ServerMemory, read_memory
from kvkeep.store.backends.valkey.wire import (
    Garbled,
    Lost,
    ServerError,
    TimedOut,
    Wire,
    around_value,
    command,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Wire]]:
    server, client = socket.socketpair()
    wire = Wire(client, time.monotonic() + 10.0)
    with server:
        yield server, wire
    wire.close()


def written(answer: Any) -> bytes:
    """Encode an answer as a server does."""
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, bytes):
        return b"$%d\r\n%s\r\n" % (len(answer), answer)
    return b"*%d\r\n" % len(answer) + b"".join(map(written, answer))


ANSWERS = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


def depth(answer: Any) -> int:
    return 1 + max(map(depth, answer), default=0) if isinstance(answer, list) else 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(ANSWERS.filter(lambda answer: depth(answer) <= 4), max_size=6),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_answers_are_read_in_pieces_of_any_size(answers: Any, pieces: list[int]) -> None:
    server, client = socket.socketpair()
    wire = Wire(client, time.monotonic() + 10.0)
    stream = b"".join(map(written, answers))

    def send() -> None:
        rest, turn = stream, 0
        while rest:
            length = pieces[turn % len(pieces)]
            server.sendall(rest[:length])
            rest, turn = rest[length:], turn + 1

    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert [wire.answer() for _ in answers] == answers
        sender.join()
        assert wire.usable(), "nothing was left over"
    finally:
        sender.join()
        server.close()
        wire.close()


@pytest.mark.parametrize("size", [0, 1, 10, 16_370, 16_384, 16_400, 300_000])
@pytest.mark.parametrize("buffered", [0, 1, 5, 20])
def test_a_value_is_received_into_its_buffer(
    ends: tuple[socket.socket, Wire], size: int, buffered: int
) -> None:
    """From the receive buffer, and from the socket."""
    server, wire = ends
    value = bytes(range(251)) * (size // 251 + 1)
    text = b"$%d\r\n%s\r\n:7\r\n" % (size, value[:size])
    server.sendall(text[:buffered])
    sender = threading.Thread(target=server.sendall, args=(text[buffered:],))
    sender.start()
    assert wire.value_size() == size
    out = memoryview(bytearray(size))
    wire.fill(out)
    sender.join()
    assert out == value[:size]
    assert wire.answer() == 7


@pytest.mark.parametrize(
    "text",
    [
        b"$3\r\nabcd\r\n", b"$3\r\nab\r\n\r\n", b"$ 3\r\nabc\r\n", b"$+3\r\nabc\r\n", b"$1_0\r\n",
        b"$" + b"9" * 30 + b"\r\n", b"$-2\r\n", b"$1048577\r\n", b"*1048577\r\n", b"*-2\r\n",
        b":9223372036854775809\r\n", b":\r\n", b"\r\n", b"hello\r\n", b"_\r\n", b"+" + b"x" * 5000,
        b"*1\r\n" * 6 + b":1\r\n",
    ],
)  # fmt: skip
def test_invalid_answers(ends: tuple[socket.socket, Wire], text: bytes) -> None:
    server, wire = ends
    server.sendall(text)
    with pytest.raises(Garbled):
        wire.answer()


def test_errors_are_answers(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    server.sendall(b"-OOM too much\r\n-ERR no\r\n-WRONG \xff\r\n*2\r\n-E x\r\n:1\r\n+OK\r\n+NO\r\n")
    answer = wire.answer()
    assert isinstance(answer, ServerError)
    assert (answer.code, str(answer)) == ("OOM", "OOM too much")
    with pytest.raises(ServerError, match="ERR no"):
        wire.expect_ok()
    with pytest.raises(ServerError, match="WRONG"):
        wire.value_size()
    inner = wire.answer()
    assert isinstance(inner, list)
    assert isinstance(inner[0], ServerError)
    wire.expect_ok()
    with pytest.raises(Garbled, match="NO"):
        wire.expect_ok()


def test_the_end_of_the_stream_and_of_the_time(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    assert wire.usable()
    wire.deadline = time.monotonic() + 0.02
    server.sendall(b"$5\r\nab")
    assert not wire.usable()
    assert wire.value_size() == 5
    assert not wire.usable()
    with pytest.raises(TimedOut):
        wire.fill(memoryview(bytearray(5)))
    with pytest.raises(TimedOut):
        wire.send(b"too late")
    wire.deadline = time.monotonic() + 10
    server.close()
    with pytest.raises(Lost, match="hung up"):
        wire.answer()


def test_commands_as_they_are_written() -> None:
    assert command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    assert command(b"PEXPIRE", b"k", 1200) == b"*3\r\n$7\r\nPEXPIRE\r\n$1\r\nk\r\n$4\r\n1200\r\n"
    head, end = around_value([b"SET", b"k"], 5, [b"PX", 9])
    assert head + b"value" + end == command(b"SET", b"k", b"value", b"PX", 9)
    head, end = around_value([b"SET", b"k"], 0, [])
    assert head + end == command(b"SET", b"k", b"")


@pytest.mark.parametrize(("host", "port"), [("a..b", 1), ("x" * 300, 1), ("127.0.0.1", 99999)])
def test_an_impossible_address(host: str, port: int) -> None:
    """As a redirection may name it."""
    with pytest.raises(Lost, match="cannot be found"):
        connect((host, port), time.monotonic() + 5.0, None)


def test_what_a_server_says_of_its_memory() -> None:
    said = b"# Memory\r\nused_memory:1024\r\nmaxmemory:4096\r\nmaxmemory_policy:allkeys-lru\r\n"
    assert read_memory(said, "h:1") == ServerMemory("h:1", 1024, 4096, "allkeys-lru")
    for wrong in (b"", b"used_memory:1", said.replace(b"4096", b"much"), None, 5, [said]):
        with pytest.raises(Garbled):
            read_memory(wrong, "h:1")  # type: ignore[arg-type]
