"""A directory that is emptied, removed, replaced or locked away while a backend has it open."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.testing.backend_hooks import block_id, content, get, put, sizes_listed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNIT = 4096
A, B, C = (block_id(number) for number in range(3))
OTHER = block_id(7, space=5)


def empty(root: Path) -> None:
    """As ``rm -rf DIR/*`` does."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def files_only(root: Path) -> None:
    """As ``rm DIR/*`` does."""
    for path in root.iterdir():
        if path.is_file():
            path.unlink()


def replaced(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def exchanged(root: Path) -> None:
    """By another store, as a restored backup is."""
    root.rename(root.with_name("old"))
    put(DiskBackend(root), OTHER, b"another's")


def moved(root: Path) -> None:
    root.rename(root.with_name("old"))


def without(*names: str) -> Callable[[Path], None]:
    def take(root: Path) -> None:
        for name in names:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    take.__name__ = "without_" + "_".join(name[:10] for name in names)
    return take


WAYS = [
    empty,
    shutil.rmtree,
    replaced,
    exchanged,
    moved,
    without("tmp"),
    without("index"),
    without("quarantine"),
    without("FORMAT"),
    without("tmp", "index", "FORMAT"),
    files_only,
    without("00" * 16),
]


@pytest.mark.parametrize("way", WAYS)
def test_the_next_put_restores_it(tmp_path: Path, way: Callable[[Path], None]) -> None:
    root = tmp_path / "store"
    backend = DiskBackend(root, 16 << 20)
    for block in (A, B):
        put(backend, block, content(block, 1, 5000))
    list(backend.list())
    way(root)
    kept = sizes_listed(DiskBackend(root)) if root.exists() and (root / "FORMAT").exists() else {}
    put(backend, C, content(C, 1, 300_000))
    assert get(backend, C) == content(C, 1, 300_000)
    listed = sizes_listed(backend)
    assert listed.items() >= {C: 300_000}.items() | kept.items()
    expected = sum(-(-size // UNIT) * UNIT for size in listed.values())
    assert backend.used() == expected
    backend.quarantine(C, "bad")
    assert get(backend, C) is None
    assert len(os.listdir(root / "quarantine")) == 1
    with DiskBackend(root) as again:
        list(again.list())
        assert again.used() == backend.used()


def test_a_directory_that_comes_back_is_used_again(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, A, b"record")
    (tmp_path / "store").rename(tmp_path / "away")
    put(backend, B, b"meanwhile")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "away").rename(tmp_path / "store")
    put(backend, C, b"later")
    assert sizes_listed(backend) == {A: 6, C: 5}
    assert backend.used() == 2 * UNIT


def test_foreign_files_in_its_place_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    backend = DiskBackend(root)
    put(backend, A, b"record")
    replaced(root)
    (root / "thesis.tex").write_bytes(b"mine")
    with pytest.raises(BackendFailed, match="not kvkeep's"):
        put(backend, A, b"again")
    assert os.listdir(root) == ["thesis.tex"]
    (root / "thesis.tex").unlink()
    put(backend, A, b"again")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_nothing_is_written_below_an_unmounted_disk(tmp_path: Path) -> None:
    disk, root = tmp_path / "disk", tmp_path / "disk" / "store"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "kvkeep-test", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    backend = DiskBackend(root)
    put(backend, A, b"record")
    subprocess.run(["umount", "-l", str(disk)], check=True)
    assert get(backend, A) is None
    with pytest.raises(BackendFailed, match="mount its disk again"):
        put(backend, B, b"record")
    assert list(backend.list()) == []
    assert os.listdir(disk) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_becomes_writable_again(tmp_path: Path) -> None:
    disk, root = tmp_path / "disk", tmp_path / "disk" / "store"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "kvkeep-test", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    try:
        backend = DiskBackend(root, 1 << 20)
        put(backend, A, b"record")
        backend.close()  # no filesystem becomes read-only while the index is open
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(BackendFailed) as caught:
            put(backend, B, b"record")
        assert caught.value.errno == errno.EROFS
        assert get(backend, A) == b"record"
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        put(backend, B, b"record")
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * UNIT))
        with pytest.raises(OutOfRoom):
            put(backend, C, b"record")
        (disk / "filler").unlink()
        put(backend, C, b"record")
        assert backend.used() == 3 * UNIT
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


AS_NOBODY = """
import os, sys
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.core.errors import BackendFailed
from kvkeep.testing.backend_hooks import block_id, get, put
os.seteuid(65534)
A, B, C = (block_id(number) for number in range(3))
backend = DiskBackend(sys.argv[1], 1 << 20)
put(backend, A, b"record")
put(backend, B, b"record")
os.chmod(backend._directory.path(A), 0)
assert get(backend, A) is None and backend.quarantined == 1, "unreadable: no failure of the disk"
os.chmod(sys.argv[1], 0)
for change in (lambda: put(backend, C, b"new"), lambda: get(backend, B)):
    try:
        change()
    except BackendFailed as error:
        assert "Permission denied" in str(error), error
    else:
        raise AssertionError("the directory may not be entered")
os.chmod(sys.argv[1], 0o700)
put(backend, C, b"new")
assert get(backend, B) == b"record"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_permission_revoked_and_granted_again(tmp_path: Path) -> None:
    import sys

    root = tmp_path / "nobody"
    root.mkdir()
    os.chown(root, 65534, 65534)
    for path in (*tmp_path.parents, tmp_path):
        if path.owner() == "root" and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
