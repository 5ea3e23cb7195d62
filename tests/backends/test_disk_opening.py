"""Opening a directory of records: creation, checks, refusals."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.testing.backend_hooks import block_id, get, put, sizes_listed

if TYPE_CHECKING:
    from pathlib import Path

A = block_id(1)
FORMAT = b"kvkeep blocks 1\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def snapshot(path: Path) -> dict[str, bytes | None]:
    return {
        str(one.relative_to(path)): one.read_bytes() if one.is_file() else None
        for one in path.rglob("*")
    }


def test_it_is_created_with_its_parents(tmp_path: Path) -> None:
    DiskBackend(tmp_path / "a" / "b" / "store")
    assert mode(tmp_path / "a" / "b" / "store") == 0o700


def test_an_empty_directory_is_used_and_made_private(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o755)
    DiskBackend(tmp_path / "store")
    assert mode(tmp_path / "store") == 0o700
    (tmp_path / "store").chmod(0o750)
    DiskBackend(tmp_path / "store")
    assert mode(tmp_path / "store") == 0o700


@pytest.mark.parametrize("name", ["notes.txt", "lost+found/", "ab" * 16 + "/"])
def test_a_directory_with_foreign_files_is_refused(tmp_path: Path, name: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o755)
    (store / name).mkdir() if name.endswith("/") else (store / name).write_bytes(b"mine")
    before = snapshot(store)
    with pytest.raises(InvalidValue, match=r"not kvkeep's.*below it"):
        DiskBackend(store)
    assert snapshot(store) == before
    assert mode(store) == 0o755


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"kvkeep blocks 2\n", "kvkeep blocks 2.*writes.*kvkeep blocks 1.*delete"),
        (b"kvkeep blocks \xff\n", "another directory"),
        (b"PNG", "not kvkeep's"),
        (b"kvkeep blocks 1", "delete"),  # torn: not trusted
        (FORMAT + b"and more", "delete"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    store = tmp_path / "store"
    with DiskBackend(store) as backend:
        put(backend, A, b"record")
    (store / "FORMAT").write_bytes(text)
    before = snapshot(store)
    with pytest.raises(InvalidValue, match=said):
        DiskBackend(store)
    assert snapshot(store) == before


@pytest.mark.parametrize("there", [(), ("tmp",), ("tmp", "quarantine"), ("index",), ("FORMAT",)])
def test_a_half_created_directory_is_completed(tmp_path: Path, there: tuple[str, ...]) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for name in there:
        if name != "FORMAT":
            (store / name).mkdir()
        else:
            (store / name).touch()
    with DiskBackend(store) as backend:
        put(backend, A, b"record")
        assert backend.used() == 4096
    assert (store / "FORMAT").read_bytes() == FORMAT


def test_a_format_without_the_rest_is_completed(tmp_path: Path) -> None:
    """As an incomplete backup leaves it."""
    store = tmp_path / "store"
    with DiskBackend(store) as backend:
        put(backend, A, b"record")
    for name in ("tmp", "quarantine"):
        (store / name).rmdir()
    shutil.rmtree(store / "index")
    with DiskBackend(store) as backend:
        assert get(backend, A) == b"record"
        assert backend.used() == 4096
        put(backend, A, b"again")


@pytest.mark.parametrize("kind", ["file", "beneath a file", "dangling"])
def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    place = {"file": file, "beneath a file": file / "store", "dangling": tmp_path / "loop"}[kind]
    if kind == "dangling":
        place.symlink_to(place)
    with pytest.raises(InvalidValue, match="cannot hold records"):
        DiskBackend(place)


def test_a_link_to_a_directory_is_followed_once(tmp_path: Path) -> None:
    """A later change of the link does not affect an open backend."""
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with DiskBackend(tmp_path / "link") as backend:
        (tmp_path / "link").unlink()
        put(backend, A, b"record")
        assert sizes_listed(backend) == {A: 6}
    assert (tmp_path / "disk" / "FORMAT").exists()


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory to another user")
    store = tmp_path / "store"
    store.mkdir()
    os.chown(store, 12345, 12345)
    with pytest.raises(InvalidValue, match=r"user 12345.*of this user"):
        DiskBackend(store)
    assert os.listdir(store) == []


def test_directories_of_empty_namespaces_are_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    other = block_id(1, space=7)
    with DiskBackend(store) as backend:
        put(backend, A, b"record")
        put(backend, other, b"record")
        backend.delete([other])
        assert sizes_listed(backend) == {A: 6}
        assert sorted(p.name for p in store.iterdir() if len(p.name) == 32) == ["00" * 16]
        put(backend, other, b"again")
        assert get(backend, other) == b"again"
