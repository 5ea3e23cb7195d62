"""What a shared arena does about accidents: dead neighbours, odd timing, a damaged index."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from shm_worker import forked, lines_of

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.shm import ShmBackend, books
from kvkeep.store.backends.shm import layout as at
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvkeep.store.backends.shm.core import Hold

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


# --- wrong bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("many", [1, 20], ids=["one", "many"])
@pytest.mark.parametrize("held", [False, True])
def test_an_entry_that_is_reused_in_the_middle_of_a_lookup(
    backend: ShmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, held: bool
) -> None:
    """Between the comparison of ids and what is remembered, it becomes the record of another block.

    Then lookups must not take it for the first one's ever after.
    """
    put(backend, A, b"a" * 100)
    with ShmBackend(None, directory=str(tmp_path)) as other:
        index = other.arena.books
        walk, learn_all = index.walk, index._learn_all
        swapped = False

        def swap() -> None:
            nonlocal swapped
            if not swapped:
                swapped = True
                backend.delete([A])
                put(backend, B, b"b" * 100)

        def slow_walk(block: bytes, *most: int) -> int:
            found = walk(block, *most)
            swap()
            return found

        def slow_learn_all(*arguments: object) -> None:
            swap()
            learn_all(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(index, "walk", slow_walk)
        monkeypatch.setattr(index, "_learn_all", slow_learn_all)
        missing = [block_id(100 + number) for number in range(many - 1)]
        assert other.sizes([A, *missing]) == [None] * many
        assert swapped
        lease = other.lease(B) if held else None
        assert get(other, A) is None
        assert get(other, B) == b"b" * 100
        if lease is not None:
            lease.release()


def test_the_lease_of_a_dropped_record_does_not_end_a_new_draft(
    backend: ShmBackend, tmp_path: Path
) -> None:
    """A record is damaged and dropped while it is leased; its entry becomes a draft."""
    put(backend, A, b"a")
    lease = backend.lease(A)
    assert lease is not None
    backend.arena.books.proof[lease.row] = 0
    with backend.arena:
        backend.arena._repair()
    draft = backend.reserve(B, 1)
    assert draft.offset == lease.row, "the test wants the same entry"
    lease.release()
    with ShmBackend(None, directory=str(tmp_path)) as other, pytest.raises(OutOfRoom):
        other.reserve(C, 16 * UNIT)
    draft.view[:] = b"b"
    draft.commit()
    assert get(backend, B) == b"b"


def test_the_lease_of_a_dropped_record_is_none_of_the_next_one(
    backend: ShmBackend, tmp_path: Path
) -> None:
    """A record is damaged and dropped while it is leased; another process reuses its entry.

    A lease of that record must mark the arena, as if this process had never leased the entry.
    """
    put(backend, A, b"a")
    dropped = backend.lease(A)
    assert dropped is not None
    backend.arena.books.proof[dropped.row] = 0
    with backend.arena:
        backend.arena._repair()
    with ShmBackend(None, directory=str(tmp_path)) as other:
        put(other, B, b"b" * 100)
        assert other.arena.find(B) == dropped.row, "the test wants the same entry"
        assert backend.sizes([B]) == [100]
        lease = backend.lease(B)
        assert lease is not None
        dropped.release()
        other.delete([B])
        for number in range(16):  # all memory that is free, at least
            with suppress(OutOfRoom):
                put(other, block_id(100 + number), bytes([number]) * UNIT)
        assert bytes(lease.view) == b"b" * 100
        used = other.used()
        lease.release()
        assert other.used() == used - UNIT, "its memory is free again"


def test_a_block_that_goes_in_the_middle_of_a_lookup_ends_the_run(
    backend: ShmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are of the leading blocks: those behind it must not take its place."""
    for block in (A, B, C):
        put(backend, block, block)
    hold_all = backend.arena.hold_all

    def late(blocks: Sequence[bytes]) -> list[Hold | None]:
        backend.delete([B])
        return hold_all(blocks)

    monkeypatch.setattr(backend.arena, "hold_all", late)
    leases = backend.lease_all([A, B, C])
    assert [bytes(lease.view) for lease in leases] == [A]
    backend.release_all(leases)
    backend.delete([A, C])
    assert backend.used() == 0, "the last one is not held"


def test_the_end_of_a_demotion_of_a_dropped_record(backend: ShmBackend) -> None:
    """It does not end that of the next record in its entry."""
    put(backend, A, b"a")
    ((_, dropped),) = backend.arena.evict(1, None, leave=True)
    backend.arena.books.proof[dropped[0]] = 0
    with backend.arena:
        backend.arena._repair()
    put(backend, B, b"b")
    ((_, hold),) = backend.arena.evict(1, None, leave=True)
    assert hold[0] == dropped[0], "the test wants the same entry"
    assert not backend.arena.left(A, dropped)
    assert backend.arena.leaving_bytes == UNIT
    assert backend.arena.left(B, hold)
    assert (backend.used(), backend.arena.leaving_bytes) == (0, 0)


# --- processes -------------------------------------------------------------------------------


def test_the_holds_of_the_dead_do_not_pass_to_their_successor(
    backend: ShmBackend, tmp_path: Path
) -> None:
    """Engines that are killed and started again, beside one that lives, leak no memory."""
    put(backend, A, bytes(UNIT))

    def engine(out: int) -> None:
        mine = ShmBackend(None, directory=str(tmp_path))
        slot = mine.arena._lock.slot
        mine.lease(A)
        mine.reserve(B, 5 * UNIT)
        mine.arena.evict(1, None, leave=True)
        os.write(out, f"{slot}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    slots = {line for _ in range(4) for line in lines_of(*forked(engine))}
    assert len(slots) == 1, "the test wants a slot that is used again"
    with ShmBackend(None, directory=str(tmp_path)) as other:
        assert {str(other.arena._lock.slot)} == slots
        assert other.used() == UNIT
        assert other.arena.leaving_bytes == 0
        assert [gone for gone, _ in other.arena.evict(1, None)] == [A]
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
    lock = backend.arena._lock
    lock.timeout = 0.2
    with ShmBackend(None, directory=str(tmp_path)) as other:
        with other.arena._lock:
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
                with mine.arena._lock:
                    time.sleep(0.003)
                time.sleep(0.001)

        pid, reading = forked(busy)
        assert os.read(reading, 6) == b"ready\n"
        for _ in range(20):
            put(backend, A, b"a")
        lines_of(pid, reading)


def test_holds_of_a_call_that_fails_are_ended(backend: ShmBackend) -> None:
    put(backend, A, b"a")
    put(backend, B, b"b")
    lease = backend.lease(A)
    assert lease is not None
    backend.arena._lock.timeout = 0.05
    other = ShmBackend(None, directory=os.path.dirname(backend.path))
    with other, other.arena._lock, pytest.raises(BackendFailed):
        backend.arena.hold_all([A, B])
    lease.release()
    backend.delete([A, B])
    assert backend.used() == 0


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


def test_blocks_of_one_chain_are_all_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first of very many, by single lookups, by many at once, and under the lock."""
    monkeypatch.setattr(books, "_LONGEST_CHAIN", 70)
    with ShmBackend(8 << 20, directory=str(tmp_path)) as backend:
        mask = backend.arena.books.layout.buckets - 1
        same = [one for one in map(block_id, range(400_000)) if not crc32(one) & mask][:90]
        assert len(same) == 90
        for block in same:
            put(backend, block, block)
        with ShmBackend(None, directory=str(tmp_path)) as other:
            before = other.repairs
            assert other.sizes(same) == [48] * 90
        with ShmBackend(None, directory=str(tmp_path)) as other:
            assert all(get(other, block) == block for block in same)
            assert other.repairs == before


# --- clocks ----------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_changes_no_order(
    backend: ShmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, real_ns = time.time, time.time_ns
    year = 365 * 86400
    monkeypatch.setattr(time, "time", lambda: real() + year)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + year * 10**9)
    put(backend, A, b"a")
    backend.touch([A])
    backend.touch([A], [time.time()])
    monkeypatch.undo()
    put(backend, B, b"b")
    assert [block for block, _ in backend.arena.evict(1, None)] == [A]
    (found,) = backend.list()
    assert abs(found.used - time.time()) < 60


# --- a damaged index -------------------------------------------------------------------------


def _bins(backend: ShmBackend) -> None:
    for number in range(at.BINS):
        backend.arena.books.words[at.BIN_AT + number] = 10**9


def _generation(backend: ShmBackend) -> None:
    backend.arena.books.words[at.GENERATION] = (1 << 63) - 1


def _heads(backend: ShmBackend) -> None:
    backend.arena.books.heads_all[:] = -1


@pytest.mark.parametrize("damage", [_bins, _generation, _heads])
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
    assert os.path.getsize(backend.path) == backend.arena.books.layout.total
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
