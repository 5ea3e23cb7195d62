"""Valkey and Redis servers that are dead, hang, are slow, cut connections or send garbage."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import pytest
from servers import Server, make_certificates, needs_server, server

from faults import FaultProxy
from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.valkey import ValkeyBackend
from kvkeep.testing.backend_hooks import block_id, content, get, put, sizes_listed
from kvkeep.testing.backend_threads import together
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = needs_server
A, B, C = (block_id(number) for number in range(3))
SHORT_S = 0.15
LARGE = 3 << 20

Call = "Callable[[ValkeyBackend], object]"
CALLS = {
    "put": lambda backend: put(backend, C, content(C, 1, 200_000)),
    "get": lambda backend: get(backend, A),
    "sizes": lambda backend: backend.sizes([A, B]),
    "delete": lambda backend: backend.delete([C]),
    "list": lambda backend: list(backend.list()),
    "touch": lambda backend: backend.touch([A]),
    "quarantine": lambda backend: backend.quarantine(C, "a test"),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture
def proxy(running: Server) -> Iterator[FaultProxy]:
    running.ask("FLUSHALL")
    with FaultProxy(running.address) as one:
        yield one


@pytest.fixture
def backend(proxy: FaultProxy) -> Iterator[ValkeyBackend]:
    """A backend behind the proxy with two records, and a connection that was used."""
    with open_url(f"valkey://{proxy.address}") as one:
        put(one, A, content(A, 0, LARGE))
        put(one, B, content(B, 0, 1000))
        one.timeout = SHORT_S
        yield one


def open_url(text: str) -> ValkeyBackend:
    return ValkeyBackend.from_url(TierURL(text))


def assert_sound(backend: ValkeyBackend) -> None:
    """Assert that everything works, and that the records are right."""
    backend.timeout = 10.0
    assert get(backend, B) == content(B, 0, 1000)
    assert get(backend, A) == content(A, 0, LARGE)
    assert backend.sizes([A, B]) == [LARGE, 1000]
    put(backend, C, b"after")
    assert get(backend, C) == b"after"
    assert backend.delete([C]) == 5


def fails_in_time(backend: ValkeyBackend, call: Callable[[ValkeyBackend], object]) -> str:
    """Assert that ``call`` raises `BackendFailed` in time; return the message."""
    start = time.monotonic()
    with pytest.raises(BackendFailed) as caught:
        call(backend)
    taken = time.monotonic() - start
    assert taken < 10 * backend.timeout, f"{taken:.2f} s, and {backend.timeout} s were given"
    return str(caught.value)


# --- dead and back ---------------------------------------------------------------------------


def test_a_server_that_starts_later() -> None:
    with open_url(f"valkey://127.0.0.1:{free_port()}") as backend:
        for call in CALLS.values():
            fails_in_time(backend, call)


@pytest.mark.parametrize("name", CALLS)
def test_refused_and_back(proxy: FaultProxy, backend: ValkeyBackend, name: str) -> None:
    proxy.refuse()
    for _ in range(3):
        assert "refused" in fails_in_time(backend, CALLS[name])
    proxy.heal()
    assert_sound(backend)


def test_killed_under_load() -> None:
    """Every call succeeds or fails; all succeed when the server is back."""
    with server() as one, open_url(one.url) as kv:
        stop = threading.Event()
        failures: list[BackendFailed] = []

        def work(who: int) -> None:
            block, number = block_id(who), 0
            while not stop.is_set():
                number += 1
                try:
                    put(kv, block, content(block, number, 300_000))
                    found = get(kv, block)
                except BackendFailed as error:
                    failures.append(error)
                    stop.wait(0.01)
                    continue
                assert found in {content(block, number, 300_000), None}

        def kill() -> None:
            for _ in range(3):
                stop.wait(0.1)
                one.kill()
                one.start()
            stop.set()

        together(kill, *[lambda who=who: work(who) for who in range(8)])
        assert failures
        put(kv, A, b"alive")
        assert get(kv, A) == b"alive"


# --- hung and slow ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_hung(proxy: FaultProxy, backend: ValkeyBackend, name: str) -> None:
    """On the connection that is open, and on new ones."""
    proxy.hang()
    for _ in range(3):
        assert "did not answer in" in fails_in_time(backend, CALLS[name])
    proxy.heal()
    assert_sound(backend)


def test_a_late_answer_is_discarded(proxy: FaultProxy, backend: ValkeyBackend) -> None:
    """The answer to a call that timed out must not become the answer to the next one."""
    for _ in range(3):
        proxy.delay(SHORT_S * 1.5)
        backend.timeout = SHORT_S
        fails_in_time(backend, CALLS["get"])
        fails_in_time(backend, CALLS["sizes"])
        proxy.heal()
        backend.timeout = 10.0
        assert get(backend, B) == content(B, 0, 1000)
        assert backend.sizes([B, C]) == [1000, None]


def test_trickling_bytes_win_no_time(proxy: FaultProxy, backend: ValkeyBackend) -> None:
    proxy.slow(200_000, side="answers")
    assert "did not answer in" in fails_in_time(backend, CALLS["get"])
    proxy.slow(200_000, side="requests")
    large = memoryview(bytes(32 << 20))
    assert "did not answer in" in fails_in_time(backend, lambda one: one.put(C, large))
    proxy.heal()
    assert_sound(backend)
    assert get(backend, C) is None, "half a record was put"


def test_slow_but_in_time(proxy: FaultProxy, backend: ValkeyBackend) -> None:
    backend.timeout = 20.0
    proxy.slow(LARGE * 4, side="both")
    assert get(backend, A) == content(A, 0, LARGE)
    put(backend, C, content(C, 0, 500_000))
    proxy.heal()
    assert get(backend, C) == content(C, 0, 500_000)


def test_waiting_for_a_connection_counts_against_the_timeout(proxy: FaultProxy) -> None:
    """Twelve calls and one connection to a server that hangs: together they take about two
    time-outs, since whoever waits for the connection has its own time running."""
    with open_url(f"valkey://{proxy.address}?connections=1") as backend:
        put(backend, A, b"x")
        backend.timeout = SHORT_S
        proxy.hang()
        together(*[lambda: fails_in_time(backend, CALLS["get"]) for _ in range(12)])
        proxy.heal()
        backend.timeout = 10.0
        assert get(backend, A) == b"x"


# --- cut off ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_cut_in_an_answer(proxy: FaultProxy, backend: ValkeyBackend, name: str, after: int) -> None:
    proxy.cut(after)
    for _ in range(2):  # on a connection that is open, and while a new one is made
        fails_in_time(backend, CALLS[name])
    proxy.heal()
    assert_sound(backend)


@pytest.mark.parametrize("after", [0, 4, 150, 100_000, 199_999])
def test_a_cut_put_keeps_the_old_record(
    proxy: FaultProxy, backend: ValkeyBackend, after: int
) -> None:
    backend.timeout = 10.0
    put(backend, C, b"before")
    backend.timeout = SHORT_S
    proxy.cut(after, side="requests")
    fails_in_time(backend, CALLS["put"])
    proxy.heal()
    backend.timeout = 10.0
    assert get(backend, C) == b"before"
    assert_sound(backend)


# --- garbage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_flipped_bits_everywhere(proxy: FaultProxy, backend: ValkeyBackend, name: str) -> None:
    """Each call fails or answers, and none affects later calls."""
    for every in (1, 2, 5):
        for first in range(min(every, 3)):
            backend.timeout = SHORT_S
            proxy.flip(every, first)
            with contextlib.suppress(BackendFailed):
                CALLS[name](backend)
            proxy.heal()
            backend.timeout = 10.0
            assert get(backend, B) == content(B, 0, 1000)
    assert_sound(backend)


def test_an_unsolicited_answer_is_not_read(proxy: FaultProxy, backend: ValkeyBackend) -> None:
    """An extra answer ends the connection instead of shifting all later answers by one."""
    backend.timeout = 10.0
    proxy.replace(b"$4\r\nmine\r\n:7\r\n")
    try:
        assert get(backend, A) == b"mine"  # well-formed: only a record's checksum can tell
    finally:
        proxy.heal()
    assert_sound(backend)
    assert set(sizes_listed(backend)) == {A, B}


# --- the same with TLS -----------------------------------------------------------------------


def test_faults_behind_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with (
        server(password="sesame", certificates=certificates) as one,
        FaultProxy(one.address) as proxy,
        open_url(f"valkeys://:sesame@{proxy.address}?ca={certificates.ca}") as backend,
    ):
        put(backend, A, content(A, 0, LARGE))
        put(backend, B, content(B, 0, 1000))
        for fault in (
            proxy.hang,
            proxy.refuse,
            lambda: proxy.cut(LARGE // 2),
            lambda: proxy.slow(100_000),
            lambda: proxy.flip(every=100_000, first=500),
            lambda: proxy.replace(b"+OK\r\n"),
        ):
            backend.timeout = 3 * SHORT_S
            fault()
            for _ in range(2):
                assert "sesame" not in fails_in_time(backend, CALLS["get"])
            proxy.heal()
            assert_sound(backend)
