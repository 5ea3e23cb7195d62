"""What loads of a real store take, and loads that end when they are slower than computing."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvkeep.integrations.load_choice import LoadPace, TimedLoads
from kvkeep.store import BlockStore
from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE, COUNT = 1 << 14, 24


class Disk:
    def __init__(self) -> None:
        self.record_s = 0.0
        self.line = threading.Lock()
        self.hangs = threading.Event()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    one, get = Disk(), DiskBackend.get

    def slow(backend: Any, block: bytes, room: Any) -> Any:
        with one.line:
            time.sleep(one.record_s)
            until = time.monotonic() + 20
            while one.hangs.is_set() and time.monotonic() < until:
                time.sleep(0.005)
        return get(backend, block, room)

    monkeypatch.setattr(DiskBackend, "get", slow)
    yield one
    one.hangs.clear()


@pytest.fixture
def keys(tmp_path: Path) -> list[bytes]:
    """The keys of blocks on a disk."""
    keys = [os.urandom(32) for _ in range(COUNT)]
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        assert store.put(keys, [key * (SIZE // 32) for key in keys], wait=30) == COUNT
    return keys


def tiers(path: Path) -> list[str]:
    return ["memory://4MiB", f"file://{path}/kv?size=64MiB"]


def never() -> bool:
    return False


def read(costs: TimedLoads, keys: list[bytes], pace: LoadPace) -> tuple[Any, list[int]]:
    came: list[int] = []

    def sink(at: int, raw: memoryview) -> None:
        assert bytes(raw) == keys[at] * (SIZE // 32)
        came.append(at)

    return costs.read(keys, [SIZE] * len(keys), sink, pace, never), came


def test_runs_are_where_the_blocks_are(tmp_path: Path, keys: list[bytes]) -> None:
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        costs = TimedLoads(store)
        assert [(run.end, run.tier, run.seconds) for run in costs.runs(keys, [SIZE] * COUNT)] == [
            (COUNT, "file", None)
        ]
        store.read(keys[:5] + keys[9:12], [SIZE] * 8, lambda _at, _raw: None)
        ends = [(run.end, run.tier) for run in costs.runs(keys, [SIZE] * COUNT)]
        assert ends == [(5, "memory"), (9, "file"), (12, "memory"), (COUNT, "file")]
        assert store.sources([os.urandom(32)]) == [(1, "file")]  # nothing is known of it
        assert store.sources([]) == []


def test_a_read_in_time(tmp_path: Path, keys: list[bytes]) -> None:
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        found, came = read(TimedLoads(store), keys, LoadPace(time.monotonic() + 30))
        assert (found.blocks, found.late, found.failed) == (COUNT, False, "")
        assert came == list(range(COUNT))
        assert store.cost.reading("file").known


def test_a_read_that_falls_behind_ends(tmp_path: Path, keys: list[bytes], disk: Disk) -> None:
    """It ends long before the deadline; of an unknown tier, what came is news, and no fault."""
    disk.record_s = 0.05
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        costs, began = TimedLoads(store), time.monotonic()
        found, came = read(costs, keys, LoadPace(began + 60, compute_s=COUNT * 0.01))
        assert 0 < found.blocks == len(came) < COUNT
        assert (found.late, found.failed) == (True, "")
        while not store.cost.reading("file").known:
            assert time.monotonic() - began < 60
            time.sleep(0.01)
    with BlockStore("n", tiers=tiers(tmp_path), cost=store.cost) as store:
        found, _ = read(TimedLoads(store), keys, LoadPace(time.monotonic() + 60, COUNT * 0.01))
        assert (found.late, found.failed) == (True, "file")


def test_a_read_that_hangs_ends_in_time(tmp_path: Path, keys: list[bytes], disk: Disk) -> None:
    disk.hangs.set()
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        costs, began = TimedLoads(store), time.monotonic()
        found, came = read(costs, keys, LoadPace(began + 0.2, compute_s=1.0))
        assert time.monotonic() - began < 10
        assert (found.blocks, found.late, found.failed, came) == (0, True, "file", [])
        disk.hangs.clear()


def test_a_cancelled_read_is_no_fault(tmp_path: Path, keys: list[bytes]) -> None:
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        found = TimedLoads(store).read(
            keys, [SIZE] * COUNT, lambda _at, _raw: None, LoadPace(time.monotonic() + 60),
            lambda: True,
        )  # fmt: skip
        assert found[:3] == (0, False, "")


def test_probes(tmp_path: Path, keys: list[bytes], disk: Disk) -> None:
    disk.record_s = 0.02
    with BlockStore("n", tiers=tiers(tmp_path)) as store:
        costs = TimedLoads(store)
        first = costs.probe("file", keys, [SIZE] * COUNT)
        assert first.came
        assert first.expected == 0
        assert first.seconds >= 0.02
        assert store.sources(keys)[0] == (1, "memory")  # what a probe reads is no more work lost
        most = 0.0
        for _ in range(6):
            again = costs.probe("file", keys, [SIZE] * COUNT)
            most = max(most, again.expected)
        assert most > 0
        assert not costs.probe("memory", keys[-1:], [SIZE]).came or store.sources(keys[-1:]) == [
            (1, "memory")
        ]
