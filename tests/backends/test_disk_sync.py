"""Background syncs: never inside a put, all done before `flush` returns."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.disk import DiskBackend, sync
from kvkeep.store.backends.disk.sync import SyncQueue
from kvkeep.testing.backend_hooks import block_id, put
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


def test_never_queues_nothing(tmp_path: Path) -> None:
    syncing = SyncQueue("never", str(tmp_path))
    syncing.add([str(tmp_path / "x")])
    assert len(syncing) == 0
    assert syncing.drain(0.0)
