"""The ledger: the count is right whatever its file contains; every wait has an end."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.disk.ledger import Count, DiskLedger
from kvkeep.testing.backend_hooks import block_id, content, get, put
from kvkeep.testing.backend_threads import together

if TYPE_CHECKING:
    from pathlib import Path

UNIT = 4096
A, B = block_id(1), block_id(2)


def no_op() -> None:
    """Nothing to restore, nothing to report."""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"kvledger",
        bytes(24),
        bytes(range(100, 124)),
        struct.pack("<8sQQ", b"kvledger", 0, 12345),  # marked: somebody was killed
        struct.pack("<8sQQ", b"kvledger", 7, 12345),
        struct.pack("<8sQQ", b"kvkeeper", 1, 12345),
    ],
)
def test_an_untrusted_ledger_is_recounted(tmp_path: Path, text: bytes) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, A, content(A, 1, 5000))
    (tmp_path / "store" / "ledger").write_bytes(text)
    assert backend.used() == 2 * UNIT
    (tmp_path / "store" / "ledger").write_bytes(text)
    assert backend.delete([A]) == 5000
    assert backend.used() == 0


def test_a_directory_that_becomes_empty_needs_no_recount(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, A, b"record")
    backend.delete([A])
    ledger = (tmp_path / "store" / "ledger").read_bytes()
    assert ledger[:24] == struct.pack("<8sQQ", b"kvledger", 1, 0)


def test_opening_counts_whatever_the_ledger_says(tmp_path: Path) -> None:
    """A loss of power may leave a valid but outdated count."""
    put(DiskBackend(tmp_path / "store"), A, b"record")
    (tmp_path / "store" / "ledger").write_bytes(struct.pack("<8sQQ", b"kvledger", 1, 1 << 40))
    assert DiskBackend(tmp_path / "store").used() == UNIT


def test_deleting_uncounted_files_does_not_make_it_negative(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, A, b"record")
    path = tmp_path / "store" / A[:16].hex() / A[16:].hex()
    os.truncate(path, 100 * UNIT)  # by hand
    backend.delete([A])
    assert backend.used() == 0
    put(backend, B, b"record")
    assert backend.used() == UNIT


def break_in_the_middle(count: Count) -> None:
    count.mark()
    raise FileNotFoundError


def test_a_mark_stays_when_a_change_fails_in_the_middle(tmp_path: Path) -> None:
    path, counted = tmp_path / "ledger", [100, 300, 500]
    path.touch()
    ledger = DiskLedger(str(path), lambda _count: counted.pop(0), no_op)
    with ledger.held(1.0) as count:
        assert count.used == 100
        count.mark()
        count.used += 50
    with ledger.held(1.0) as count:
        assert count.used == 150, "nothing failed, nothing is counted"
    with pytest.raises(FileNotFoundError), ledger.held(1.0):
        os.stat(tmp_path / "missing")
    with ledger.held(1.0) as count:
        assert count.used == 150
    with pytest.raises(FileNotFoundError), ledger.held(1.0) as count:
        break_in_the_middle(count)
    with ledger.held(1.0) as count:
        assert count.used == 300
    assert counted == [500]


def test_waiting_for_a_stopped_lock_holder_times_out(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, A, b"record")
    backend.timeout = 0.02
    with open(tmp_path / "store" / "ledger", "rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        for change in (lambda: put(backend, B, b"new"), lambda: backend.delete([A]), backend.used):
            with pytest.raises(BackendFailed, match="locked for more than"):
                change()
        assert get(backend, A) == b"record", "reading needs no lock"
        assert backend.sizes([A, B]) == [6, None]
    put(backend, B, b"new")
    assert backend.used() == 2 * UNIT


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.touch()
    ledger = DiskLedger(str(path), lambda _count: 0, no_op)

    def add() -> None:
        for _ in range(100):
            with ledger.held(60.0) as count:
                before = count.used
                count.mark()
                os.stat(path)  # lets other threads run
                count.used = before + 1

    together(*[add] * 4)
    with ledger.held(1.0) as count:
        assert count.used == 400
