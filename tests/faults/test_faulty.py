"""Backends that fail on demand: valid without a fault, and each fault does what it says."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from faults import CALLS, CountingBackend, FaultyBackend
from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.testing.backend_hooks import block_id, content, get, put
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

A, B = block_id(1), block_id(2)
RECORD = content(A, 1, 5000)


class TestFaultyBackend(BackendTests):
    examples = 10

    def make_backend(self, tmp_path: Path) -> FaultyBackend:
        return FaultyBackend(MemoryBackend(64 << 20))

    def make_bounded(self, tmp_path: Path, capacity: int) -> FaultyBackend:
        return FaultyBackend(MemoryBackend(capacity))


@pytest.fixture
def faulty() -> Iterator[FaultyBackend]:
    with FaultyBackend(MemoryBackend(1 << 20)) as backend:
        put(backend, A, RECORD)
        yield backend
        backend.heal()


def test_calls_are_counted(faulty: FaultyBackend) -> None:
    get(faulty, A)
    get(faulty, A)
    get(faulty, B)
    faulty.sizes([A, B])
    assert (faulty.calls["put"], faulty.calls["get"], faulty.calls["room"]) == (1, 3, 2)
    assert (faulty.asked["get", A], faulty.asked["get", B], faulty.asked["sizes", B]) == (2, 1, 1)
    assert not any(faulty.inside.values())


def test_every_call_can_fail_and_is_counted(faulty: FaultyBackend) -> None:
    faulty.fail(*CALLS)
    buffer = memoryview(bytearray(b"x"))
    for call in (
        lambda: faulty.put(A, buffer), lambda: get(faulty, A), lambda: faulty.sizes([A]),
        lambda: faulty.delete([A]), faulty.list, lambda: faulty.touch([A]),
        lambda: faulty.quarantine(A, "bad"), faulty.used, faulty.flush, faulty.close,
    ):  # fmt: skip
        with pytest.raises(BackendFailed):
            call()
    faulty.heal()
    assert get(faulty, A) == RECORD
    assert not any(faulty.inside.values())
    assert set(CALLS) == set(faulty.calls)


def test_a_get_can_fail_when_its_room_was_given(faulty: FaultyBackend) -> None:
    faulty.fail("room", times=1, error=PermissionError("no"))
    with pytest.raises(PermissionError):
        get(faulty, A)
    assert get(faulty, A) == RECORD


def test_hanging_calls_continue_after_heal(faulty: FaultyBackend) -> None:
    faulty.hang("get")
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(get(faulty, A)))
    thread.start()
    faulty.wait_inside("get")
    faulty.flip()
    faulty.heal("flip")  # that is another fault
    thread.join(0.05)
    assert thread.is_alive()
    assert faulty.sizes([A]) == [5000]  # only get hangs
    faulty.heal()
    thread.join(10)
    assert found == [RECORD]
    with pytest.raises(AssertionError, match="0 of 1 calls of put"):
        faulty.wait_inside("put", timeout=0.0)


def test_slow_ends_by_itself(faulty: FaultyBackend) -> None:
    faulty.slow(0.01, "get", times=1)
    assert get(faulty, A) == RECORD


def test_flip_and_truncate(faulty: FaultyBackend) -> None:
    faulty.flip(times=1)
    flipped = get(faulty, A)
    assert flipped is not None
    wrong = int.from_bytes(flipped, "little") ^ int.from_bytes(RECORD, "little")
    assert wrong.bit_count() == 1
    faulty.truncate(times=1)
    front = get(faulty, A)
    assert front
    assert len(front) < len(RECORD)
    assert RECORD.startswith(front)
    assert get(faulty, A) == RECORD, "what lies there is whole"
    faulty.truncate()
    assert get(faulty, B) is None


def test_lose_and_fill_up(faulty: FaultyBackend) -> None:
    faulty.lose(times=1)
    put(faulty, B, b"lost")
    assert get(faulty, B) is None
    faulty.fill_up()
    with pytest.raises(OutOfRoom) as short:
        put(faulty, B, b"four")
    assert short.value.needed == 4
    faulty.heal("fill_up")
    put(faulty, B, b"kept")
    assert get(faulty, B) == b"kept"


def test_mistakes_are_refused(faulty: FaultyBackend) -> None:
    with pytest.raises(InvalidValue, match="no call is named open"):
        faulty.fail("open")
    with pytest.raises(InvalidValue, match="made around another"):
        CountingBackend.from_url(TierURL("counting://x"))
