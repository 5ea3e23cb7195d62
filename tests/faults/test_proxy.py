"""`FaultProxy`: each fault, seen by a plain socket on one side and a plain echo on the other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from faults import FaultProxy
from kvkeep.core.errors import InvalidValue
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0
BLINK_S = 0.05


class Echo:
    """Answers every byte with itself."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.answer, args=(client,)))
            self.threads[-1].start()

    @staticmethod
    def answer(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(65536):
                client.sendall(data)

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.stop()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    before = threading.active_count()
    with FaultProxy(echo.address) as one:
        yield one
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("proxy")]
    assert threading.active_count() <= before + len(echo.threads)


@contextlib.contextmanager
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout=PATIENCE_S) as one:
        yield one


def exactly(one: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length and (piece := one.recv(length - len(got))):
        got += piece
    return got


def everything(one: socket.socket) -> bytes:
    got = b""
    while piece := one.recv(65536):
        got += piece
    return got


def ask(one: socket.socket, text: bytes) -> bytes:
    one.sendall(text)
    return exactly(one, len(text))


def silent(one: socket.socket) -> bool:
    """Nothing comes for a while."""
    one.settimeout(BLINK_S)
    try:
        return one.recv(1) is None
    except TimeoutError:
        return True
    finally:
        one.settimeout(PATIENCE_S)


def test_it_passes_everything_on(proxy: FaultProxy) -> None:
    text = bytes(range(256)) * 8192  # more than a socket's buffer
    with client(proxy) as one:
        sender = threading.Thread(target=one.sendall, args=(text,))
        sender.start()
        assert exactly(one, len(text)) == text
        sender.join()
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b"", "an end of stream is passed on as well, both ways"
    assert proxy.passed == {"requests": len(text), "answers": len(text)}
    assert proxy.accepted == 1
    assert proxy.address in repr(proxy)
    assert proxy.mode == "pass"


def test_refused_and_back_on_the_same_port(proxy: FaultProxy) -> None:
    with client(proxy) as one:
        assert ask(one, b"before") == b"before"
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError), client(proxy):
            pass
    proxy.heal()
    with client(proxy) as one:
        assert ask(one, b"after") == b"after"


def test_hanging_holds_back_and_heals(proxy: FaultProxy) -> None:
    with client(proxy) as old:
        assert ask(old, b"x") == b"x"
        proxy.hang()
        old.sendall(b"held")
        with client(proxy) as new:
            new.sendall(b"new")
            assert silent(old)
            assert silent(new)
            proxy.heal()
            assert exactly(old, 4) == b"held"
            assert exactly(new, 3) == b"new"


def test_a_hanging_server_takes_no_more_than_buffers_hold(proxy: FaultProxy) -> None:
    proxy.hang()
    with client(proxy) as one:
        one.settimeout(BLINK_S)
        with pytest.raises(TimeoutError):
            one.sendall(bytes(64 << 20))


def test_closing_does_not_wait_for_a_hang(echo: Echo) -> None:
    proxy = FaultProxy(echo.address)
    with client(proxy) as one:
        assert ask(one, b"x") == b"x"
        proxy.hang()
        one.sendall(b"held")
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionError):
            one.recv(1)
    with pytest.raises(ConnectionRefusedError), client(proxy):
        pass


def test_closing_does_not_wait_for_a_client_that_does_not_read(echo: Echo) -> None:
    proxy = FaultProxy(echo.address)
    with client(proxy) as one:
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):  # every buffer on the way is full of answers
            one.sendall(bytes(64 << 20))
        proxy.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("proxy")]


@pytest.mark.parametrize("after", [0, 1, 5, 100_000])
def test_cut_within_an_answer(proxy: FaultProxy, after: int) -> None:
    proxy.cut(after)
    text = bytes(range(250)) * 1000
    with client(proxy) as one:
        one.sendall(text)
        with contextlib.suppress(ConnectionResetError):
            assert everything(one) == text[:after]
    assert proxy.passed["answers"] == after
    with client(proxy) as one:
        one.sendall(b"again")
        assert len(everything(one)) == min(after, 5) if after <= 5 else exactly(one, 5) == b"again"


def test_cut_in_a_request(proxy: FaultProxy) -> None:
    with client(proxy) as one:
        assert ask(one, b"whole") == b"whole"
        proxy.cut(3, side="requests")  # counted from here
        one.sendall(b"abcdef")
        assert everything(one) in {b"abc", b""}
    assert proxy.passed["requests"] == 5 + 3


def test_slow_keeps_its_rate(proxy: FaultProxy) -> None:
    with client(proxy) as one:
        proxy.slow(20_000, side="answers")
        start = time.monotonic()
        assert ask(one, bytes(4_000)) == bytes(4_000)
        assert time.monotonic() - start >= 4_000 / 20_000 * 0.9
        one.sendall(bytes(100_000))
        assert exactly(one, 1) == bytes(1)
        proxy.heal()  # what is under way is no longer slow
        assert exactly(one, 99_999) == bytes(99_999)


def test_a_delay_comes_before_each_answer_once(proxy: FaultProxy) -> None:
    proxy.delay(BLINK_S)
    with client(proxy) as one:
        start = time.monotonic()
        assert ask(one, b"one") == b"one"
        assert ask(one, b"two") == b"two"
        assert time.monotonic() - start >= 2 * BLINK_S
        proxy.delay(1000)
        one.sendall(b"three")
        assert silent(one)
        proxy.heal()
        assert exactly(one, 5) == b"three"


def test_answers_are_replaced(proxy: FaultProxy) -> None:
    proxy.replace(b"HTTP/1.1 200 OK\r\n")
    with client(proxy) as one:
        one.sendall(b"hello")
        assert exactly(one, 17) == b"HTTP/1.1 200 OK\r\n"


def test_bits_are_flipped_at_the_given_positions(proxy: FaultProxy) -> None:
    proxy.flip(every=100_000, first=7)
    length = 1_000_000  # in many pieces
    with client(proxy) as one:
        sender = threading.Thread(target=one.sendall, args=(bytes(length),))
        sender.start()
        got = exactly(one, length)
        sender.join()
    assert [place for place, byte in enumerate(got) if byte] == list(range(7, length, 100_000))
    assert set(got) == {0, 1}


def test_requests_are_flipped_too(proxy: FaultProxy) -> None:
    proxy.flip(every=2, side="requests")
    with client(proxy) as one:
        assert ask(one, bytes(4)) == b"\1\0\1\0"


def test_a_reset_ends_only_open_connections(proxy: FaultProxy) -> None:
    with client(proxy) as one:
        assert ask(one, b"x") == b"x"
        assert proxy.open_connections == 1
        proxy.reset()
        assert proxy.open_connections == 0
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    with client(proxy) as one:
        assert ask(one, b"y") == b"y"


def test_a_dead_target_ends_the_connection(echo: Echo, proxy: FaultProxy) -> None:
    proxy.target = ("127.0.0.1", free_port())
    with pytest.raises(ConnectionResetError), client(proxy) as one:  # when it connects, or reads
        one.recv(1)
    proxy.target = echo.address
    with client(proxy) as one:
        assert ask(one, b"back") == b"back"


def test_modes_are_switched_while_bytes_run(proxy: FaultProxy) -> None:
    """Nothing gets lost or stuck, whatever the order."""
    text = bytes(range(256)) * 4096
    with client(proxy) as one:
        sender = threading.Thread(target=one.sendall, args=(text,))
        sender.start()
        got = b""
        for fault in (proxy.hang, lambda: proxy.slow(1e6), lambda: proxy.delay(9)) * 3:
            fault()
            proxy.heal()
            got += exactly(one, len(text) // 9)
        got += exactly(one, len(text) - len(got))
        sender.join()
    assert got == text


@pytest.mark.parametrize(
    "wrong",
    [
        lambda proxy: proxy.cut(-1),
        lambda proxy: proxy.cut(1, side="up"),
        lambda proxy: proxy.slow(0),
        lambda proxy: proxy.slow(float("nan")),
        lambda proxy: proxy.delay(-1),
        lambda proxy: proxy.flip(0),
    ],
)
def test_a_wrong_fault_is_refused(proxy: FaultProxy, wrong: object) -> None:
    with pytest.raises(InvalidValue):
        wrong(proxy)  # type: ignore[operator]
    assert proxy.mode == "pass"
