"""Several processes over one place: they evict, they find each other's blocks, all is right."""

from __future__ import annotations

import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_kv import counter, disk, get, open_store, put, quiet, records
from writer_process import UNIT, Processes, on_disk, prompt

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from servers import needs_server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes() as one:
        yield one


def test_two_writers_with_evictions_in_one_directory(processes: Processes, tmp_path: Path) -> None:
    """Room for a fifth of what they put: both evict own and others' blocks all the time."""
    budget = 60 * UNIT
    url, root = disk(tmp_path / "d", size=str(budget)), tmp_path / "d"
    for who in (0, 1):
        processes.start("share", url, who, who, 1200, 2)
    while not (files := list(root.glob("index/*-journal"))):
        time.sleep(0.001)
    most = 0
    path = str(files[0]).removesuffix("-journal")
    with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as index:
        end, left = time.monotonic() + PATIENCE, 100
        while left and time.monotonic() < end:
            left -= most > budget / 2  # they have begun to need others' room
            index.execute("BEGIN IMMEDIATE")  # so no room is given to others
            most = max(most, on_disk(root))
            index.execute("COMMIT")
            time.sleep(0.005)
    said = processes.wait()
    assert budget / 2 < most <= budget
    shared = [list(map(int, words)) for what, *words in said if what == "shared"]
    assert len(shared) == 2
    for who, own, other, evictions, damaged, errors, refused, drops in shared:
        assert own > 0
        assert other > 0, f"{who} never found what the other had put"
        assert evictions > 50
        assert (damaged, errors, refused) == (0, 0, 0)
        assert drops < evictions, "there was hardly ever room"
    with open_store(url) as store:
        found = sum(get(store, prompt(who, family, 40)) for who in (0, 1) for family in range(12))
        assert found
        assert store.stats().tiers[1].blocks == len(records(root))
        store.check()


def test_what_another_process_deletes_is_a_miss_and_is_put_again(tmp_path: Path) -> None:
    """All of it, though a get finds out about the first few blocks only."""
    url, long = disk(tmp_path / "d"), range(800)
    with open_store("memory://4MiB", url) as one, open_store("memory://4MiB", url) as other:
        put(one, long, wait=True)
        assert other.lookup(long).tokens == 800
        assert one.clear().bytes > 0
        assert get(other, long) == 0
        assert counter(other, "misses") > 0
        quiet(other)
        assert other.lookup(long).tokens == 0
        assert put(other, long, wait=True).tokens == 800
        assert get(one, long) == 800
        quiet(one)
        one.check()
        other.check()


def test_what_both_put_is_written_once(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with open_store("memory://4MiB", url) as one, open_store("memory://4MiB", url) as other:
        put(one, range(40), wait=True)
        assert put(other, range(40), wait=True).tokens == 40  # into its own memory
        assert counter(one, "writes") == counter(other, "already") == 10
        assert counter(other, "writes") == 0


@needs_server
def test_a_reader_behind_a_writer_on_one_server(processes: Processes) -> None:
    """Prompts grow while they are read: each time a right prefix, no shorter than before."""
    families, length = 10, 160
    with server() as one, open_store("memory://4MiB", one.url) as store:
        partial = 0
        for who in range(5):  # on a busy machine a writer may end before we go on
            assert get(store, prompt(who, 0, length)) == 0  # connected, before it is written
            processes.start("write", one.url, who, 0, families, length)
            seen = [0] * families
            end = time.monotonic() + PATIENCE
            while seen != [length] * families:
                for family in range(families):
                    found = get(store, prompt(who, family, length))
                    assert found >= seen[family]
                    seen[family] = found
                    partial += 0 < found < length
                assert time.monotonic() < end, f"{seen} of {length}"
            processes.wait()
            if partial:
                break
        assert partial, "all was written before anything was read"
        assert counter(store, "damaged") == counter(store, "errors") == 0
        store.check()


@needs_server
def test_two_writers_of_the_same_on_one_server(processes: Processes) -> None:
    """The second finds the first one's blocks there, and does not send them again."""
    with server() as one:
        processes.start("write", one.url, 0, 0, 3, 40)
        assert ["written", "0"] in processes.wait()
        with open_store("memory://4MiB", one.url) as store:
            for family in range(3):
                assert put(store, prompt(0, family, 44), wait=True).tokens == 44
            assert counter(store, "already") == 30
            assert counter(store, "writes") == 3
