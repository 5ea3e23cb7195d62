"""The budget that a directory keeps to without ``size=``, and which it remembers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sqlite3
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from kvkeep.store import BlockStore
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.tiers import open_backend

GIB = 1 << 30
BLOCK = bytes(48)


def url_of(path, size=None) -> str:
    return f"file://{path}" + (f"?size={size}" if size else "")


def settled(path, size=None) -> int:
    """The capacity that a store gets which opens the directory."""
    with open_backend(TierURL(url_of(path, size))) as backend:
        backend.settle_capacity()
        return backend.capacity


def last(path):
    with DiskBackend(path) as backend:
        return backend.last_budget()


@pytest.fixture
def disk(monkeypatch):
    """A filesystem of which the test says how large it is, and how much is free."""
    there = SimpleNamespace(f_frsize=4096, f_blocks=GIB // 4096, f_bavail=GIB // 4 // 4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: there)
    return there


def test_a_new_directory_gets_a_share_of_what_is_free_and_says_so(tmp_path, disk, caplog):
    capacity = settled(tmp_path / "d")
    assert capacity == int(GIB // 4 * 0.8)
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "kvkeep.tiers")
    assert f"file://{tmp_path}/d has no size=: it keeps to 204.8 MiB" in record.getMessage()
    found = last(tmp_path / "d")
    assert (found.bytes, found.given) == (capacity, False)
    assert abs(found.opened - time.time()) < 60


def test_it_is_the_same_next_time_whatever_is_free_then(tmp_path, disk, caplog):
    capacity = settled(tmp_path / "d")
    disk.f_bavail = 1
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert settled(tmp_path / "d") == capacity
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().endswith("it keeps to 204.8 MiB, as when last opened")


def test_what_is_there_already_is_not_evicted(tmp_path, disk):
    with DiskBackend(tmp_path / "d") as backend:  # of a time without a remembered budget
        backend.put(BLOCK, memoryview(bytes(50_000)))
        used = backend.used()
    disk.f_bavail = 0
    assert settled(tmp_path / "d") == used
    with open_backend(TierURL(url_of(tmp_path / "d"))) as backend:
        assert backend.sizes([BLOCK]) == [50_000]


def test_it_is_never_more_than_the_disk(tmp_path, disk):
    assert settled(tmp_path / "d", 8 * GIB) == 8 * GIB  # given: theirs to say
    assert settled(tmp_path / "d") == GIB
    assert last(tmp_path / "d").bytes == GIB


def test_a_size_that_is_given_holds_and_is_remembered(tmp_path, disk, caplog):
    capacity = settled(tmp_path / "d")
    assert settled(tmp_path / "d", "10MiB") == 10 << 20 != capacity
    assert last(tmp_path / "d")[:2] == (10 << 20, True)
    caplog.clear()
    assert settled(tmp_path / "d", "20MiB") == 20 << 20
    assert caplog.records == []
    assert settled(tmp_path / "d") == 20 << 20
    assert last(tmp_path / "d")[:2] == (20 << 20, True)


def test_looking_changes_nothing(tmp_path, disk):
    with open_backend(TierURL(url_of(tmp_path / "d"))) as backend:
        assert backend.capacity is None
    assert last(tmp_path / "d") is None
    settled(tmp_path / "d", "10MiB")
    for size in (None, "5MiB"):
        with open_backend(TierURL(url_of(tmp_path / "d", size))) as backend:
            assert backend.capacity == (10 << 20 if size is None else 5 << 20)
    assert last(tmp_path / "d")[:2] == (10 << 20, True)


def test_a_backend_of_ones_own_without_capacity_has_none(tmp_path, disk, caplog):
    with DiskBackend(tmp_path / "d") as backend:
        backend.settle_capacity()
        assert backend.capacity is None
    assert last(tmp_path / "d") is None
    with DiskBackend(tmp_path / "d", 1 << 20) as backend:
        backend.settle_capacity()
    assert last(tmp_path / "d")[:2] == (1 << 20, True)
    assert caplog.records == []


@pytest.mark.parametrize(
    "text",
    [b"", b"\0" * 64, b"kvkeep budget x given 1", b"kvkeep budget 1 given 1", b"\xff" * 100,
     b"kvkeep budget 999999999 maybe 1", b"kvkeep budget 99999999 given 1 more", b"kvkeep"],
)  # fmt: skip
def test_what_is_no_budget_is_none(tmp_path, disk, text):
    before_the_index(tmp_path / "d", text)
    assert last(tmp_path / "d") is None
    assert settled(tmp_path / "d") == int(GIB // 4 * 0.8)
    assert last(tmp_path / "d").given is False


def before_the_index(path, text) -> None:
    """A directory as kvkeep left it that had a file for the budget."""
    DiskBackend(path).close()
    shutil.rmtree(path / "index")
    (path / "budget").write_bytes(text)


def test_the_budget_of_a_directory_without_an_index_is_taken_over(tmp_path, disk):
    before_the_index(tmp_path / "d", b"kvkeep budget 10485760 given 1700000000".ljust(63) + b"\n")
    assert last(tmp_path / "d") == (10 << 20, True, 1.7e9)
    assert settled(tmp_path / "d") == 10 << 20


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_anything_else_under_its_name_is_no_budget(tmp_path, disk, kind):
    before_the_index(tmp_path / "d", b"")
    there = tmp_path / "d" / "budget"
    there.unlink()
    (tmp_path / "elsewhere").write_bytes(b"kvkeep budget 10485760 given 1700000000")
    if kind == "link":
        there.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(there)
    else:
        there.mkdir()
    assert last(tmp_path / "d") is None
    assert settled(tmp_path / "d") == int(GIB // 4 * 0.8)
    assert (tmp_path / "elsewhere").exists()


def test_a_stopped_process_within_a_change_is_not_waited_for_long(tmp_path, disk):
    settled(tmp_path / "d", "10MiB")
    (index,) = (path for path in (tmp_path / "d" / "index").iterdir() if len(path.name) == 16)
    with closing(sqlite3.connect(index, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        with open_backend(TierURL(url_of(tmp_path / "d"))) as backend:
            backend.timeout = 0.05
            backend.settle_capacity()
            assert backend.capacity == 10 << 20


def _settle(path, barrier, found) -> None:
    barrier.wait(30)
    found.put(settled(path))


def test_processes_that_open_a_new_directory_at_once_agree(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier, found = fork.Barrier(4), fork.SimpleQueue()
    made = [fork.Process(target=_settle, args=(tmp_path / "d", barrier, found)) for _ in range(4)]
    for one in made:
        one.start()
    capacities = {found.get() for _ in made}
    for one in made:
        one.join()
    assert capacities == {last(tmp_path / "d").bytes}


def test_a_store_evicts_what_was_used_least_recently_once_that_is_full(tmp_path, disk):
    disk.f_bavail = 10  # pages: the budget are 8 of them, and each record takes two
    keys = [bytes([n]) * 32 for n in range(6)]
    tiers = ("memory://1MiB", f"file://{tmp_path}/d?policy=lru")
    with BlockStore("a", tiers=tiers) as store:
        for key in keys:
            assert store.put([key], [bytes(5000)]) == 1
            assert store.flush(20)
        _, tier = store.stats()
        assert (tier.capacity, tier.blocks, tier.counters["evictions"]) == (8 * 4096, 4, 2)
    with BlockStore("a", tiers=[f"file://{tmp_path}/d"]) as store:
        assert [store.lookup([key]) for key in keys] == [0, 0, 1, 1, 1, 1]
