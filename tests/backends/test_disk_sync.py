"""Background syncs: never inside a put, all done before `flush` returns."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import BackendFailed
from kvkeep.store import BlockStore
from kvkeep.store.backends.disk import DiskBackend, sync
from kvkeep.store.backends.disk.sync import SyncQueue
from kvkeep.testing.backend_hooks import block_id, content, get, put
from kvkeep.testing.backend_threads import together

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


class Power:
    """Replaces ``os.fsync``: knows which files would survive a loss of power.

    A record is left when its file was synced, and then the directory that names it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.delay = 0.0
        self.fails = False
        self.threads: set[str] = set()
        self.most = 0  # files synced between two syncs of the root
        self._files: set[str] = set()
        self.lasting: set[str] = set()
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        if self.fails:
            raise OSError(5, "Input/output error")
        time.sleep(self.delay)
        self.threads.add(threading.current_thread().name)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(path):
            named = {file for file in self._files.copy() if os.path.dirname(file) == path}
            self.lasting |= named
            self.most = max(self.most, len(self._files))
            self._files -= named
        else:
            self._files.add(path)

    def keeps(self, block: bytes) -> bool:
        return any(path.endswith(block[16:].hex()) for path in self.lasting.copy())


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    return Power(monkeypatch)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_put_never_syncs(tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "SYNC_FROM", 4)
    monkeypatch.setattr(sync, "_BATCH", 8)
    backend = DiskBackend(tmp_path / "store")
    power.threads.clear()
    for number in range(60):
        put(backend, block_id(number), b"record")
    until(lambda: len(backend._sync) < 4)  # so few are left to a flush
    assert power.threads == {"kvkeep sync"}
    assert power.most <= 8, "in batches"
    backend.flush()
    assert all(power.keeps(block_id(number)) for number in range(60))


def test_a_slow_disk_drops_nothing(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put used to sync all of 4,096 unsynced files, which took longer than the timeout."""
    monkeypatch.setattr(sync, "UNSYNCED_AT_MOST", 100)
    url = f"file://{tmp_path}/store?size=1GiB&timeout=300ms"
    with BlockStore("m", tiers=["memory://16MiB", url]) as store:
        power.delay = 0.002
        keys = [block_id(number)[16:] for number in range(300)]
        for key in keys:
            store.put([key], [b"z" * 100], wait=20)
        tier = store.stats()[1]
        assert (tier.counters["drops"], tier.counters["errors"], tier.breaker_opened) == (0, 0, 0)
        assert tier.counters["writes"] == 300
        assert store.flush(60)
        assert all(power.keeps(bytes(16) + key) for key in keys)
        assert store.stats()[1].breaker_opened == 0


def test_throttling_is_counted_and_bounded(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "SYNC_FROM", 1 << 30)
    monkeypatch.setattr(sync, "UNSYNCED_AT_MOST", 4)
    monkeypatch.setattr(sync, "_SLOWED", 0.01)
    backend = DiskBackend(tmp_path / "store")
    for number in range(8):
        put(backend, block_id(number), b"record")
    assert backend.slowed == 4
    with pytest.raises(BackendFailed, match="8 files wait for fsync"):
        put(backend, block_id(9), b"record")
    backend.flush()
    put(backend, block_id(9), b"record")
    assert backend.slowed == 5


class Clock:
    """Replaces the module ``time``: sleeps return at once and are added up.

    After ``after`` seconds of waiting, ``then`` is called once.
    """

    def __init__(self, after: float = float("inf"), then: Callable[[], None] = int) -> None:
        self.waited = 0.0
        self._after = after
        self._then = then

    def monotonic(self) -> float:
        return 1000.0 + self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        if self.waited >= self._after:
            self._after = float("inf")
            self._then()


@pytest.mark.parametrize("timeout", [0.1, 1.0, 2.0, 5.0, 600.0])
def test_a_put_waits_a_second_or_half_its_timeout(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """A longer wait would exceed the timeout and make a slow disk a failing one."""
    monkeypatch.setattr(sync, "SYNC_FROM", 1 << 30)
    monkeypatch.setattr(sync, "UNSYNCED_AT_MOST", 4)
    backend = DiskBackend(tmp_path / "store")
    backend.timeout = timeout
    monkeypatch.setattr(sync, "time", clock := Clock())
    for number in range(8):
        before = clock.waited
        put(backend, block_id(number), b"record")
        waited, share = clock.waited - before, min(1.0, timeout / 2)
        assert waited == 0 if number < 4 else share <= waited < share + 0.01


def test_a_throttled_put_continues_when_enough_is_synced(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "SYNC_FROM", 1 << 30)
    monkeypatch.setattr(sync, "UNSYNCED_AT_MOST", 4)
    backend = DiskBackend(tmp_path / "store")
    for number in range(4):
        put(backend, block_id(number), b"record")
    monkeypatch.setattr(sync, "time", clock := Clock(0.2, backend._sync.flush))
    put(backend, block_id(4), b"record")
    assert 0.2 <= clock.waited < 0.21
    assert (backend.slowed, len(backend._sync)) == (1, 1)


def test_close_drains(tmp_path: Path, power: Power) -> None:
    backend = DiskBackend(tmp_path / "store")
    for number in range(5):
        put(backend, block_id(number), b"record")
    backend.close()
    backend.close()
    assert all(power.keeps(block_id(number)) for number in range(5))


def test_close_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, power: Power) -> None:
    backend = DiskBackend(tmp_path / "store")
    backend.timeout = 0.05
    put(backend, block_id(1), b"record")
    power.delay = 1.0
    started = time.monotonic()
    backend.close()
    assert time.monotonic() - started < 0.9
    until(lambda: len(backend._sync) == 0)


def test_a_failed_background_sync_is_repeated(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "SYNC_FROM", 2)
    monkeypatch.setattr(sync, "_RETRY", 0.01)
    backend = DiskBackend(tmp_path / "store")
    power.fails = True
    for number in range(3):
        put(backend, block_id(number), b"record")
    until(lambda: backend._sync.failed > 1)
    with pytest.raises(BackendFailed):
        backend.flush()
    power.fails = False
    until(lambda: len(backend._sync) == 0)
    with suppress(BackendFailed):  # the thread may have failed again since
        backend.flush()
    backend.flush()
    assert all(power.keeps(block_id(number)) for number in range(3))


def test_flush_raises_errors_of_the_background_sync(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a write error once: the second fsync succeeds, the data is lost."""
    monkeypatch.setattr(sync, "SYNC_FROM", 2)
    monkeypatch.setattr(sync, "_RETRY", 0.01)
    backend = DiskBackend(tmp_path / "store")
    power.fails = True
    for number in range(3):
        put(backend, block_id(number), b"record")
    until(lambda: backend._sync.failed > 0)
    power.fails = False
    until(lambda: len(backend._sync) == 0)
    with pytest.raises(BackendFailed, match="Input/output error"):
        backend.flush()
    backend.flush()


def test_a_pipe_in_place_of_a_record_does_not_stop_flush(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store")
    for number, kind in enumerate((os.mkfifo, os.mkdir, lambda path: os.symlink("x", path))):
        put(backend, block_id(number), b"record")
        path = backend._directory.path(block_id(number))
        os.unlink(path)
        kind(path)
    backend.flush()
    assert len(backend._sync) == 0


@pytest.mark.parametrize("seed", range(4))
def test_power_lost_at_any_instant_keeps_what_was_flushed(
    tmp_path: Path, power: Power, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Four threads put, two flush, and the background thread syncs."""
    chance = random.Random(seed)
    monkeypatch.setattr(sync, "SYNC_FROM", chance.choice([1, 3, 20]))
    monkeypatch.setattr(sync, "_BATCH", chance.choice([1, 5, 256]))
    power.delay = chance.choice([0.0, 0.0005])
    backend = DiskBackend(tmp_path / "store")
    done: list[bytes] = []

    def writer(who: int) -> None:
        for number in range(40):
            block = block_id(100 * who + number, space=who % 2)
            put(backend, block, b"record")
            done.append(block)

    def flusher() -> None:
        for _ in range(8):
            before = done.copy()
            backend.flush()
            lost = [block for block in before if not power.keeps(block)]
            assert not lost

    together(*[lambda who=who: writer(who) for who in range(4)], flusher, flusher)
    backend.flush()
    assert all(map(power.keeps, done))
    assert len(backend._sync) == 0


def test_a_fork_syncs_the_queue_of_its_parent(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, block_id(1), b"record")
    backend._sync._lock.acquire()  # as if another thread were in the middle
    child = os.fork()
    if not child:
        status = 1
        try:
            put(backend, block_id(2), content(block_id(2), 1, 5000))
            backend.flush()
            status = len(backend._sync)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    backend._sync._lock.release()
    assert get(backend, block_id(2)) == content(block_id(2), 1, 5000)


def test_never_queues_nothing(tmp_path: Path) -> None:
    syncing = SyncQueue("never", str(tmp_path))
    syncing.add([str(tmp_path / "x")])
    assert len(syncing) == 0
    assert syncing.drain(0.0)
