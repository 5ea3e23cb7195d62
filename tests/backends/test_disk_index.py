"""An index that is damaged, of another version, or made by several processes at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from disk_worker import index_of

from kvkeep.store.backends.disk import DiskBackend
from kvkeep.testing.backend_hooks import block_id, content, get, put, sizes_listed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNIT = 4096
RECORDS = 300


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_off(path: Path) -> None:
    os.truncate(path, 100)


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))


def random_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[UNIT:] = random.Random(4).randbytes(len(data) - UNIT)
    path.write_bytes(data)


def changed(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as index:
            for statement in statements:
                index.execute(statement)

    change.__name__ = statements[0]
    return change


DAMAGES = [
    truncated,
    cut_off,
    random_bytes,
    random_pages,
    changed("PRAGMA user_version = 2"),
    changed("DROP TABLE room"),
    changed("DROP TABLE records", "CREATE TABLE records(a, b)"),
    changed("INSERT INTO records VALUES (x'00', 1, 1)"),
    changed("INSERT OR REPLACE INTO facts VALUES ('budget', '[1,')"),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_damaged_index_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], is_open: bool
) -> None:
    expected = {block_id(number): 100 + number for number in range(RECORDS)}
    backend = DiskBackend(tmp_path, 64 << 20)
    for block, size in expected.items():
        put(backend, block, content(block, 1, size))
    backend.close()
    if is_open:
        assert backend.used() == RECORDS * UNIT
    (path,) = index_of(tmp_path)
    damage(path)
    with backend if is_open else DiskBackend(tmp_path, 64 << 20) as again:
        again.settle_capacity()
        assert again.last_budget().bytes == 64 << 20
        assert sizes_listed(again) == expected
        put(again, block_id(RECORDS), b"new")
        assert get(again, block_id(0)) == content(block_id(0), 1, 100)
        assert again.used() == (RECORDS + 1) * UNIT
    assert len(index_of(tmp_path)) == 1


def test_an_index_that_is_lost_while_it_is_compared_is_compared_anew(tmp_path: Path) -> None:
    """The new one has the inode of the old one, on most filesystems."""
    blocks = [block_id(1, space) for space in range(4)]
    with DiskBackend(tmp_path, 64 << 20) as backend:
        for block in blocks:
            put(backend, block, b"record")
        assert backend.used() == 4 * UNIT
        listing = backend.list()
        assert next(listing).block == blocks[0]
        (path,) = index_of(tmp_path)
        path.write_bytes(bytes(len(path.read_bytes())))
        assert [item.block for item in listing] == blocks[1:]
        assert backend.used() == 4 * UNIT


def test_a_torn_index_is_mended_by_a_listing(tmp_path: Path) -> None:
    """A writer was killed within a transaction, and its journal is lost."""
    with DiskBackend(tmp_path, 64 << 20) as backend:
        for number in range(RECORDS):
            put(backend, block_id(number), b"record")
        backend.used()
        (path,) = index_of(tmp_path)
        older = path.read_bytes()
        for number in range(RECORDS, 2 * RECORDS):
            put(backend, block_id(number), b"record")
        backend.delete([block_id(number) for number in range(100)])
    newer = bytearray(path.read_bytes())
    for page in range(1, len(older) // UNIT, 2):
        newer[page * UNIT : (page + 1) * UNIT] = older[page * UNIT : (page + 1) * UNIT]
    path.write_bytes(newer)
    path.with_name(f"{path.name}-journal").unlink()
    with DiskBackend(tmp_path, 64 << 20) as again:
        assert len(sizes_listed(again)) == 2 * RECORDS - 100
        assert again.used() == (2 * RECORDS - 100) * UNIT


@pytest.mark.parametrize("is_open", [False, True])
def test_an_index_replaced_by_an_older_copy_is_compared(tmp_path: Path, is_open: bool) -> None:
    with DiskBackend(tmp_path, 64 << 20) as backend:
        for number in range(RECORDS):
            put(backend, block_id(number), content(block_id(number), 1, 100))
        backend.used()
        (path,) = index_of(tmp_path)
        backend.close()
        older = path.read_bytes()
        for number in range(100, 200):
            put(backend, block_id(number), content(block_id(number), 2, 5000))
        backend.delete([block_id(number) for number in range(100)])
        if not is_open:
            backend.close()
        path.with_name("copy").write_bytes(older)
        path.with_name("copy").rename(path)
        assert backend.used() == (2 * 100 + RECORDS - 200) * UNIT
        assert sizes_listed(backend) == {
            block_id(number): 5000 if number < 200 else 100 for number in range(100, RECORDS)
        }


def _used(path: Path, barrier, answers) -> None:
    barrier.wait(30)
    with DiskBackend(path, 64 << 20) as backend:
        used = backend.used()
        answers.put((used, len(list(backend.list()))))


def test_processes_that_make_an_index_at_once_agree(tmp_path: Path) -> None:
    """As when a directory is opened that has none yet."""
    with DiskBackend(tmp_path) as backend:
        for number in range(1000):
            put(backend, block_id(number), b"record")
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(3), fork.SimpleQueue()
    made = [fork.Process(target=_used, args=(tmp_path, barrier, answers)) for _ in range(3)]
    for process in made:
        process.start()
    assert [answers.get() for _ in made] == [(1000 * UNIT, 1000)] * 3
    for process in made:
        process.join()
