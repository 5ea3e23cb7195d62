"""What a shared arena does about accidents: dead neighbours, odd timing, a damaged index."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
from shm_worker import forked, lines_of

from kvkeep.core.errors import BackendFailed, InvalidValue
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.backends.shm import segment as at
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
UNIT = ALIGNMENT
A, B, C = (block_id(number) for number in range(3))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ShmBackend]:
    """Sixteen units; everything must add up at the end."""
    with ShmBackend(16 * UNIT, directory=str(tmp_path)) as backend:
        yield backend
        backend.check()


def put(backend: ShmBackend, block: bytes, record: bytes) -> None:
    backend.put(block, memoryview(record))


def get(backend: ShmBackend, block: bytes) -> bytes | None:
    found = backend.get(block, aligned)
    return None if found is None else bytes(found)


# --- processes -------------------------------------------------------------------------------


def test_the_holds_of_the_dead_do_not_pass_to_their_successor(
    backend: ShmBackend, tmp_path: Path
) -> None:
    """Engines that are killed and started again, beside one that lives, leak no memory."""
    put(backend, A, bytes(UNIT))

    def engine(out: int) -> None:
        mine = ShmBackend(None, directory=str(tmp_path))
        slot = mine._rows.lock.slot
        mine.lease(A)
        mine.reserve(B, 5 * UNIT)
        mine.evict(1, leave=True)
        os.write(out, f"{slot}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    slots = {line for _ in range(4) for line in lines_of(*forked(engine))}
    assert len(slots) == 1, "the test wants a slot that is used again"
    with ShmBackend(None, directory=str(tmp_path)) as other:
        assert {str(other._rows.lock.slot)} == slots
        assert other.used() == UNIT
        assert other.leaving_bytes == 0
        assert [gone for gone, _ in other.evict(1)] == [A]
        put(other, C, bytes(16 * UNIT))
        other.delete([C])


def test_a_forked_process_gets_no_lease(backend: ShmBackend) -> None:
    """Not even of a record that its parent leases: the parent may release and reuse it."""
    put(backend, A, b"a")
    lease = backend.lease(A)
    assert lease is not None

    def child(out: int) -> None:
        for call in (backend.lease, backend.contains):
            try:
                call(A)
            except BackendFailed as error:
                os.write(out, f"{'parent of this process' in str(error)}\n".encode())

    assert lines_of(*forked(child)) == ["True", "True"]
    lease.release()


def test_a_lock_that_was_stuck_is_waited_for_again(backend: ShmBackend, tmp_path: Path) -> None:
    """After a stop nobody waits until it was had once; then a busy neighbour fails no call."""
    lock = backend._rows.lock
    lock.timeout = 0.2
    with ShmBackend(None, directory=str(tmp_path)) as other:
        with other._rows.lock:
            with pytest.raises(BackendFailed, match=r"held the lock for 0\.2 s or more"):
                put(backend, A, b"a")
            begin = time.monotonic()
            for _ in range(100):
                with pytest.raises(BackendFailed):
                    put(backend, A, b"a")
            assert time.monotonic() - begin < 100 * 0.2, "each call waits anew"
        put(backend, A, b"a")
        lock.timeout = 60.0

        def busy(out: int) -> None:
            mine = ShmBackend(None, directory=str(tmp_path))
            os.write(out, b"ready\n")
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                with mine._rows.lock:
                    time.sleep(0.003)
                time.sleep(0.001)

        pid, reading = forked(busy)
        assert os.read(reading, 6) == b"ready\n"
        for _ in range(20):
            put(backend, A, b"a")
        lines_of(pid, reading)


# --- records and blocks ----------------------------------------------------------------------


def test_an_empty_record(backend: ShmBackend, tmp_path: Path) -> None:
    put(backend, A, b"")
    with ShmBackend(None, directory=str(tmp_path)) as other:
        before = other.repairs
        assert get(other, A) == b""
        assert other.sizes([A]) == [0]
        assert (other.repairs, other.lost) == (before, 0)


def test_a_wrong_block_id_is_the_callers_mistake(backend: ShmBackend) -> None:
    before = backend.repairs
    with pytest.raises(InvalidValue, match="a block id has 48 bytes, got 5"):
        put(backend, b"short", b"a")
    put(backend, A, b"a")
    assert backend.repairs == before


# --- a damaged index -------------------------------------------------------------------------


def _extents(backend: ShmBackend) -> None:
    backend._rows.words[at.FREE_EXTENTS] = 10**9
    backend._rows._free_offset[0] = 10**9


def _numbers(backend: ShmBackend) -> None:
    for word in (at.GENERATION, at.PUBLISHED, at.REPAIRS, at.LOST, at.BUSY, at.HIGH):
        backend._rows.words[word] = (1 << 63) - 1


def _counts(backend: ShmBackend) -> None:
    backend._rows.words[at.LOW] = backend._rows.layout.rows


@pytest.mark.parametrize("damage", [_extents, _numbers, _counts])
def test_damage_fails_a_call_at_most_and_is_mended(
    backend: ShmBackend, damage: Callable[[ShmBackend], None]
) -> None:
    """A number that leads nowhere is a failure of the place; the next call rebuilds the index."""
    put(backend, A, b"a")
    lease = backend.lease(A)
    damage(backend)
    calls: list[Callable[[], object]] = [
        partial(put, backend, A, b"b"),
        partial(backend.delete, [C]),
        partial(put, backend, A, b"c"),
    ]
    for call in calls:
        with suppress(BackendFailed):
            call()
    assert get(backend, A) == b"c"
    assert lease is not None
    assert bytes(lease.view) == b"a"
    lease.release()


def test_a_header_that_is_gone_takes_no_memory_from_its_users(
    backend: ShmBackend, tmp_path: Path
) -> None:
    put(backend, A, b"a")
    with open(backend.path, "r+b") as file:
        file.write(bytes(at.HEADER_BYTES))
    with pytest.raises(InvalidValue, match="was overwritten while processes have it open"):
        ShmBackend(1 << 20, directory=str(tmp_path))
    assert os.path.getsize(backend.path) == backend._rows.layout.total
    assert get(backend, A) == b"a"


def test_listing_beside_changes(backend: ShmBackend, tmp_path: Path) -> None:
    """NumPy refuses to count what changes meanwhile."""

    def busy(out: int) -> None:
        mine = ShmBackend(None, directory=str(tmp_path))
        os.write(out, b"ready\n")
        while True:
            put(mine, A, b"a")
            mine.delete([A])

    pid, reading = forked(busy)
    assert os.read(reading, 6) == b"ready\n"
    try:
        for _ in range(20_000):
            assert {item.block for item in backend.list()} <= {A}
    finally:
        os.kill(pid, signal.SIGKILL)
        lines_of(pid, reading)
