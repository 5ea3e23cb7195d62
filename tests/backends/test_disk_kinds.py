"""Special files in place of the store's own: refused by name, without waiting for them."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.codecs import load_key
from kvkeep.testing.backend_hooks import block_id, get, put, sizes_listed

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = block_id(1), block_id(2)


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def make_device(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make devices")
    try:
        os.mknod(path, 0o020600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices can be made here")


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "named pipe"),
    "folder": (Path.mkdir, "directory"),
    "link": (lambda path: path.symlink_to("/etc/passwd"), "symbolic link"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "symbolic link"),
    "socket": (make_socket, "socket|No such device"),
    "device": (make_device, "device"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with DiskBackend(tmp_path / "store") as backend:
        put(backend, A, b"record")
    return tmp_path / "store"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["FORMAT", "index/*[0-9a-f]", "index/*-journal"])
def test_a_file_of_the_store_must_be_regular(root: Path, kind: str, name: str) -> None:
    make, said = KINDS[kind]
    (path,) = root.glob(name)
    path.unlink()
    make(path)
    said = rf"(?s)({said}|Is a directory|symbolic links).*{path.name}"
    started = time.monotonic()
    with pytest.raises(InvalidValue, match=said):
        DiskBackend(root)
    assert time.monotonic() - started < 10
    assert path.lstat()


@pytest.mark.parametrize("kind", [*KINDS, "file"])
@pytest.mark.parametrize("name", ["tmp", "quarantine", "index"])
def test_a_directory_of_the_store_must_be_one(root: Path, kind: str, name: str) -> None:
    if kind == "folder":
        return
    make, said = KINDS.get(kind, (Path.touch, "regular file"))
    shutil.rmtree(root / name)
    make(root / name)
    with pytest.raises(InvalidValue, match=rf"it is a ({said.partition('|')[0]}).*{name}"):
        DiskBackend(root)


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling", "socket", "device"])
def test_an_index_replaced_by_a_special_file_is_a_failure(root: Path, kind: str) -> None:
    backend = DiskBackend(root, 1 << 20)  # so little that no room is reserved ahead
    put(backend, B, b"record")
    (root / "index").rename(root / "saved")
    KINDS[kind][0](root / "index")
    for change in (lambda: put(backend, B, b"new"), lambda: backend.delete([B]), backend.used):
        with pytest.raises(BackendFailed, match="must be a directory"):
            change()
    assert get(backend, A) == b"record"
    (root / "index").unlink()
    (root / "saved").rename(root / "index")
    put(backend, B, b"new")


@pytest.mark.parametrize("kind", KINDS)
def test_special_files_in_tmp_are_left_alone(root: Path, kind: str) -> None:
    KINDS[kind][0](root / "tmp" / "strange")
    KINDS[kind][0](root / "quarantine" / "strange")
    with DiskBackend(root, 1 << 20) as backend:
        assert sizes_listed(backend) == {A: 6}
        put(backend, B, b"record")
        backend.quarantine(B, "bad")
        assert backend.used() == 2 * 4096
    assert (root / "tmp" / "strange").lstat()


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_the_directory_of_a_namespace_must_be_one(root: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / A[16:].hex()).write_bytes(b"not ours")
    space = root / A[:16].hex()
    space.rename(tmp_path / "away")
    if kind == "link":
        space.symlink_to(outside)
    else:
        KINDS.get(kind, (Path.touch, ""))[0](space)
    backend = DiskBackend(root)
    assert list(backend.list()) == []
    for change in (lambda: put(backend, B, b"new"), lambda: backend.delete([A])):
        with pytest.raises(BackendFailed, match="must be a directory"):
            change()
    assert os.listdir(outside) == [A[16:].hex()]
    assert os.listdir(root / "tmp") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize("name", ["FORMAT", "index", "tmp", "quarantine"])
def test_files_of_another_user_are_refused_by_name(root: Path, name: str) -> None:
    os.chown(root / name, 12345, 12345)
    with pytest.raises(InvalidValue, match=f"(?s)belongs to user 12345.*{name}"):
        DiskBackend(root)


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(InvalidValue, match="no key file"):
        load_key(tmp_path / "key")
