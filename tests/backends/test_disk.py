"""The disk backend: the contract; special files, full and read-only disks, durability."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends import TierURL, disk
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend, files
from kvkeep.testing.backend_hooks import block_id, content, get, put, sizes_listed
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNIT = 4096
A, B, C = (block_id(number) for number in range(3))


class TestDisk(BackendTests):
    persistent = True

    def make_backend(self, tmp_path: Path) -> DiskBackend:
        return DiskBackend(tmp_path / "store")

    def make_bounded(self, tmp_path: Path, capacity: int) -> DiskBackend:
        return DiskBackend(tmp_path / "store", capacity)


class TestDiskBuffered(TestDisk):
    examples = 10
    steps = 20

    def make_backend(self, tmp_path: Path) -> DiskBackend:
        return DiskBackend(tmp_path / "store", sync="always", io="buffered")


@pytest.fixture
def backend(tmp_path: Path) -> DiskBackend:
    return DiskBackend(tmp_path / "store", 1 << 20)


def file_of(backend: DiskBackend, block: bytes) -> Path:
    return Path(backend.describe().removeprefix("file://"), block[:16].hex(), block[16:].hex())


# --- URLs ------------------------------------------------------------------------------------


def test_a_url_gives_path_and_options(tmp_path: Path) -> None:
    url = TierURL(f"file://{tmp_path}/a%20b?size=2MiB&sync=always&io=buffered")
    with DiskBackend.from_url(url) as backend:
        url.finish()
        assert backend.capacity == 2 << 20
        assert backend.describe() == f"file://{tmp_path}/a b"
        assert backend.shared
    assert (tmp_path / "a b" / "FORMAT").read_bytes() == b"kvkeep blocks 1\n"


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("file://var/store", "file:///var/store"),
        ("file://./store", f"file://{Path.cwd()}/store"),
        ("file:///kv/~/x", "~ .*file://~/x"),
        ("file:///~/kv", "file://~/kv "),
        ("file://~other/kv", "~other .*whole path.*%7E"),
        ("file://$HOME/kv?size=1MiB", r"\$HOME .*file://~/kv "),
        ("file:///${HOME}/kv", r"file://~/kv "),
        ("file://~/$USER", r"\$USER .*whole path.*%24"),
        ("file://", "three slashes"),
        ("file:///", "three slashes"),
        ("file:///x?sync=sometimes", "never, flush, always"),
        ("file:///x?io=fast", "auto, direct, buffered"),
        ("file:///x?size=much", "amount of memory"),
        ("file:///x?size=4095", "4096"),
    ],
)
def test_an_invalid_url_names_a_valid_one(rest: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        DiskBackend.from_url(TierURL(rest))


def test_a_folder_may_be_called_as_nothing_is_expanded(tmp_path: Path) -> None:
    url = TierURL(f"file://{tmp_path}/%24HOME/%7E/kv~1?size=1MiB")
    assert url.path == f"{tmp_path}/$HOME/~/kv~1"
    assert TierURL(url.safe).path == url.path


@pytest.mark.parametrize(
    "given", [{"sync": "often"}, {"io": "quick"}, {"capacity": 1.5}, {"capacity": 0}]
)
def test_wrong_arguments_make_no_directory(tmp_path: Path, given: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        DiskBackend(tmp_path / "store", **given)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


# --- files -----------------------------------------------------------------------------------


def test_files_are_private_and_as_long_as_their_records(backend: DiskBackend) -> None:
    for size in (1, UNIT, 100_001, 300_000):
        put(backend, A, content(A, size, size))
        found = file_of(backend, A).stat()
        assert (found.st_mode & 0o7777, found.st_size) == (0o600, size)
    root = file_of(backend, A).parents[1]
    for path in [root, *root.iterdir()]:
        assert path.stat().st_mode & 0o7777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
def test_memory_of_any_alignment_is_written_and_read(tmp_path: Path, io: disk.Io) -> None:
    try:
        backend = DiskBackend(tmp_path / "store", io=io)
    except InvalidValue:
        pytest.skip("the filesystem of the tests has no direct I/O")
    for size in (5, UNIT, 100_001, 1_200_001):
        record = content(A, 1, size)
        backend.put(A, memoryview(b"x" + record)[1:])
        found = backend.get(A, lambda size: memoryview(bytearray(size + 1))[1:])
        assert found == record


def test_direct_and_buffered_read_each_other(tmp_path: Path) -> None:
    backends = [DiskBackend(tmp_path / "store", io=io) for io in ("auto", "buffered")]
    for number, (writer, reader) in enumerate([backends, backends[::-1]]):
        put(writer, A, content(A, number, 200_001))
        assert get(reader, A) == content(A, number, 200_001)


def test_recency_is_kept_in_order(backend: DiskBackend, tmp_path: Path) -> None:
    for block in (A, B, C):
        put(backend, block, b"record")
    backend.touch([A, block_id(9)])
    for opened in (backend, DiskBackend(tmp_path / "store")):
        used = {one.block: one.used for one in opened.list()}
        assert used[B] < used[C] < used[A] <= time.time()


def test_uses_may_be_recorded_late(backend: DiskBackend, tmp_path: Path) -> None:
    """Times and order are kept, and later uses stay."""
    for block in (A, B, C):
        put(backend, block, b"record")
        backend.used()
        os.utime(file_of(backend, block), (1e9, 1e9))
    shutil.rmtree(tmp_path / "store" / "index")  # made anew of the files
    backend.touch([C, block_id(9), B, A], [1e9 + 5, 1e9 + 5, 1e9 + 5, 1e9 + 6])
    used = {one.block: one.used for one in backend.list()}
    assert 1e9 + 5 <= used[C] < used[B] < 1e9 + 5.1
    assert used[A] == 1e9 + 6
    backend.touch([A, C], [1e9 + 1, 1e9 + 7])
    used = {one.block: one.used for one in backend.list()}
    assert (used[A], used[C]) == (1e9 + 6, 1e9 + 7)
    before = time.time() - 1
    backend.touch([A])
    assert next(one.used for one in backend.list() if one.block == A) > before


def test_a_record_from_the_future_is_as_old_as_the_list(backend: DiskBackend) -> None:
    put(backend, A, b"record")
    os.utime(file_of(backend, A), (2e9, 4e9))
    (one,) = backend.list()
    assert one.used <= time.time()


# --- special files ---------------------------------------------------------------------------


def test_foreign_things_are_neither_listed_nor_touched(backend: DiskBackend) -> None:
    put(backend, A, b"record")
    space = file_of(backend, A).parent
    strange = [space / "x", space / ("A" * 64), space / (" " + "a" * 63), space / ("b" * 62)]
    for path in strange:
        path.write_bytes(b"foreign")
    (space.parent / "notes.txt").write_bytes(b"foreign")
    (space.parent / ("F" * 32)).mkdir()
    (space / B[16:].hex()).write_bytes(b"")
    assert sizes_listed(backend) == {A: 6}
    assert backend.odd == len(strange) + 1
    assert backend.odd_bytes == len(strange) * 7
    with DiskBackend(space.parent) as again:
        assert sizes_listed(again) == {A: 6}
        assert again.used() == UNIT, "the budget is for records"
    assert all(path.read_bytes() == b"foreign" for path in strange)


@pytest.mark.parametrize("kind", ["directory", "fifo", "symlink", "dangling", "socket"])
def test_a_special_file_is_no_record(backend: DiskBackend, kind: str, tmp_path: Path) -> None:
    put(backend, B, b"record")
    path = file_of(backend, A)
    outside = tmp_path / "outside"
    outside.write_bytes(b"not to be read, written or deleted")
    make: dict[str, Callable[[], object]] = {
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "symlink": lambda: path.symlink_to(outside),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "socket": lambda: os.mknod(path, 0o140600),
    }
    make[kind]()
    used = backend.used()
    assert backend.get(A, aligned) is None
    assert backend.sizes([A, B]) == [None, 6]
    assert backend.delete([A]) == 0
    assert sizes_listed(backend) == {B: 6}
    assert sizes_listed(DiskBackend(tmp_path / "store")) == {B: 6}
    if kind == "directory":
        with pytest.raises(BackendFailed):
            put(backend, A, b"new")
    else:
        put(backend, A, b"new")
        assert get(backend, A) == b"new"
        assert backend.delete([A]) == 3
    assert backend.used() == used == UNIT
    assert os.listdir(tmp_path / "store" / "tmp") == []
    assert outside.read_bytes() == b"not to be read, written or deleted"


def test_an_empty_file_is_a_miss_and_goes_to_quarantine(backend: DiskBackend) -> None:
    put(backend, A, b"record")
    os.truncate(file_of(backend, A), 0)
    assert backend.sizes([A]) == [None]
    assert backend.get(A, aligned) is None
    assert backend.quarantined == 1
    assert not file_of(backend, A).exists()


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize(
    ("size", "left"),
    [(5000, 100), (200_001, 0), (200_001, 70_000), (1_200_001, 1 << 19), (1_200_001, 800_000)],
)
def test_a_file_cut_short_while_it_is_read_is_a_failure(
    tmp_path: Path, io: disk.Io, size: int, left: int
) -> None:
    backend = DiskBackend(tmp_path / "store", io=io)
    put(backend, A, content(A, 1, size))

    def room(asked: int) -> memoryview:
        os.truncate(file_of(backend, A), left)
        return aligned(asked)

    with pytest.raises(BackendFailed, match="truncated"):
        backend.get(A, room)


def test_an_absurd_size_reaches_the_room_and_is_refused(backend: DiskBackend) -> None:
    put(backend, A, b"record")
    os.truncate(file_of(backend, A), 1 << 42)  # sparse

    def room(size: int) -> memoryview:
        raise OutOfRoom(size)

    with pytest.raises(OutOfRoom) as caught:
        backend.get(A, room)
    assert caught.value.needed == 1 << 42


# --- quarantine ------------------------------------------------------------------------------


def test_quarantine_keeps_the_newest_sixteen_with_reasons(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "store", 64 << 20)
    for number in range(20):
        put(backend, block_id(number), content(block_id(number), 1, 5000))
        backend.quarantine(block_id(number), "The checksum is wrong: ../\n" * 20)
    backend.quarantine(block_id(77), "not there")
    kept = sorted((tmp_path / "store" / "quarantine").iterdir())
    assert backend.quarantined == 20
    assert backend.used() == 16 * 2 * UNIT
    assert [bytes.fromhex(path.name.split(".")[1]) for path in kept] == [
        block_id(number) for number in range(4, 20)
    ]
    assert all("the-checksum-is-wrong" in path.name for path in kept)
    assert kept[0].read_bytes() == content(block_id(4), 1, 5000)


def test_quarantine_leaves_room_for_records(backend: DiskBackend) -> None:
    assert backend.capacity == 1 << 20
    for number in range(10):
        put(backend, A, content(A, number, 40_000))
        backend.quarantine(A, "bad")
        used = backend.used()
        assert used is not None
        assert 0 < used <= 1 << 16


# --- the budget ------------------------------------------------------------------------------


def test_out_of_room_says_how_much_to_free(backend: DiskBackend) -> None:
    for block in (A, B, C):
        put(backend, block, content(block, 1, 300_000))
    with pytest.raises(OutOfRoom) as caught:
        put(backend, block_id(4), content(A, 1, 300_000))
    assert caught.value.needed == 4 * 74 * UNIT - (1 << 20)
    assert backend.used() == 3 * 74 * UNIT


def test_each_process_keeps_to_its_own_capacity(backend: DiskBackend, tmp_path: Path) -> None:
    small = DiskBackend(tmp_path / "store", 8 * UNIT)
    for number in range(10):
        put(backend, block_id(number), b"x")
    with pytest.raises(OutOfRoom):
        put(small, A, b"x")
    backend.delete([block_id(number) for number in range(3)])
    put(small, A, b"x")
    assert small.used() == backend.used() == 8 * UNIT


def test_files_of_killed_writers_are_removed(backend: DiskBackend, tmp_path: Path) -> None:
    """By another process whose store is full, and by each process that opens the directory."""
    left = tmp_path / "store" / "tmp" / "123-left"
    assert backend.used() == 0
    for _ in range(2):
        left.write_bytes(bytes(1 << 19))
        with pytest.raises(OutOfRoom):
            put(backend, A, bytes((1 << 20) + 1))
        put(backend, A, content(A, 1, 900_000))
        assert not left.exists()
        assert backend.used() == 220 * UNIT
        backend.delete([A])
    left.write_bytes(bytes(1 << 19))
    assert sizes_listed(DiskBackend(tmp_path / "store")) == {}
    assert not left.exists()


@pytest.mark.parametrize("notice", ["get", "delete", "list", "reopen"])
def test_files_deleted_by_hand_take_no_room(
    backend: DiskBackend, tmp_path: Path, notice: str
) -> None:
    """Their bytes count until a call misses one of them."""
    put(backend, A, content(A, 1, 900_000))
    assert backend.used() == 220 * UNIT
    file_of(backend, A).unlink()
    with pytest.raises(OutOfRoom):
        put(backend, B, content(B, 1, 900_000))
    if notice == "get":
        assert get(backend, A) is None
    elif notice == "delete":
        assert backend.delete([A]) == 0
    else:
        assert sizes_listed(backend if notice == "list" else DiskBackend(tmp_path / "store")) == {}
    put(backend, B, content(B, 1, 900_000))
    assert backend.used() == 220 * UNIT


# --- disks that are full or read-only --------------------------------------------------------


def test_a_file_larger_than_allowed_has_failed(backend: DiskBackend, tmp_path: Path) -> None:
    """It is not out of room: evicting others would empty the tier, and not help."""
    put(backend, A, b"record")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(BackendFailed) as caught:
            put(backend, B, content(B, 1, 200_000))
        assert not isinstance(caught.value, OutOfRoom)
        put(backend, C, content(C, 1, 90_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sizes_listed(backend) == {A: 6, C: 90_000}
    assert backend.used() == DiskBackend(tmp_path / "store").used() == (1 + 22) * UNIT
    assert os.listdir(tmp_path / "store" / "tmp") == []


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no filesystem can be mounted here: {done.stderr.strip()}")


def test_a_filesystem_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(InvalidValue, match=r"without locks.*No locks available.*valkey://"):
        DiskBackend(tmp_path / "store")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid():
        pytest.skip("only root can mount a small filesystem")
    mount("-t", "tmpfs", "-o", "size=1M,mode=0700", "kvkeep-test", str(path))
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_out_of_room_and_recovers(small: Path) -> None:
    backend, kept = DiskBackend(small / "store"), {}
    error = None
    while error is None:
        block = block_id(len(kept))
        try:
            put(backend, block, content(block, 1, 100_001))
            kept[block] = 100_001
        except OutOfRoom as full:
            error = full
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC
    assert error.needed == 25 * UNIT
    assert len(kept) > 5
    with pytest.raises(OutOfRoom):  # in place of another: that one stays
        put(backend, A, content(A, 2, 150_000))
    for block in kept:
        assert get(backend, block) == content(block, 1, 100_001)
    assert backend.used() == DiskBackend(small / "store").used() == len(kept) * 25 * UNIT
    assert os.listdir(small / "store" / "tmp") == []
    # Full to the last byte: records can still be deleted.
    free = os.statvfs(small).f_bavail
    (small / "filler").write_bytes(bytes(free * UNIT))
    with pytest.raises(OSError, match="No space"):
        (small / "another").write_bytes(bytes(UNIT))
    with pytest.raises(OutOfRoom):
        put(backend, block_id(50), b"x")
    assert backend.delete([A]) == 100_001
    put(backend, block_id(50), content(A, 1, 90_000))
    assert get(backend, block_id(50)) == content(A, 1, 90_000)


def test_a_read_only_store_is_read(small: Path) -> None:
    with DiskBackend(small / "store") as writer:
        put(writer, A, content(A, 1, 100_001))
        put(writer, B, b"record")
    mount("-o", "remount,ro", str(small))
    with DiskBackend(small / "store", 1 << 20) as backend:
        assert sizes_listed(backend) == {A: 100_001, B: 6}
        assert get(backend, A) == content(A, 1, 100_001)
        assert backend.sizes([A, B, C]) == [100_001, 6, None]
        backend.touch([A, B])
        backend.flush()
        assert backend.used() == 26 * UNIT
        for change in (
            lambda: put(backend, C, b"new"),
            lambda: backend.delete([A]),
            lambda: backend.quarantine(A, "bad"),
        ):
            with pytest.raises(BackendFailed) as caught:
                change()
            assert caught.value.errno == errno.EROFS
    with pytest.raises(InvalidValue, match="Read-only"):
        DiskBackend(small / "new")


# --- durability -------------------------------------------------------------------------------


class Synced:
    """Records what is synced, and syncs it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        self.paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        self._fsync(fd)

    def take(self) -> list[str]:
        paths, self.paths = self.paths, []
        return paths


def refusing(number: int) -> Callable[..., int]:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def test_direct_io_is_off_only_where_the_filesystem_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    for number, answer in ((errno.EINVAL, False), (errno.EOPNOTSUPP, False), (errno.EIO, None)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refusing(number))
            if answer is None:
                with pytest.raises(OSError, match="Input/output"):
                    files.supports_direct(str(path))
            else:
                assert files.supports_direct(str(path)) is answer


def test_preallocation_may_be_unsupported_but_must_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        monkeypatch.setattr(os, "posix_fallocate", refusing(errno.EOPNOTSUPP))
        files.preallocate(fd, UNIT)
        for number in (errno.ENOSPC, errno.EFBIG, errno.EIO):
            monkeypatch.setattr(os, "posix_fallocate", refusing(number))
            with pytest.raises(OSError, match="Errno") as caught:
                files.preallocate(fd, UNIT)
            assert caught.value.errno == number
    finally:
        os.close(fd)


@pytest.mark.parametrize("direct", [True, False])
def test_direct_io_is_used_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    if not files.supports_direct(str(path)):
        pytest.skip("the filesystem of the tests has no direct I/O")
    turned: list[bool] = []
    real = files._set_direct
    monkeypatch.setattr(
        files, "_set_direct", lambda fd, *, on: turned.append(on) or real(fd, on=on)
    )
    fd = os.open(path, os.O_RDWR)
    try:
        buffer = aligned(100_001)
        files.write_whole(fd, buffer, direct=direct)
        os.ftruncate(fd, 100_001)
        assert files.read_whole(fd, aligned(100_001), direct=direct)
    finally:
        os.close(fd)
    assert turned == ([True, True] if direct else [])


linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@linux
def test_flush_syncs_contents_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DiskBackend(tmp_path / "store")
    synced = Synced(monkeypatch)
    blocks = [block_id(number, space=number % 2) for number in range(6)]
    for block in blocks:
        put(backend, block, b"record")
    assert synced.take() == []
    backend.delete([blocks.pop()])
    backend.flush()
    files = [str(file_of(backend, block)) for block in blocks]
    paths = synced.take()
    spaces = {os.path.dirname(path) for path in files}
    assert set(paths) == {*files, *spaces, str(tmp_path / "store")}
    for path in files:
        # The directory after the file; it was synced earlier as well, for the deleted records.
        assert path in paths[: len(paths) - paths[::-1].index(os.path.dirname(path))]
    assert paths[-1] == str(tmp_path / "store")
    backend.flush()
    assert synced.take() == []


@linux
@pytest.mark.parametrize(("sync", "at_once"), [("never", False), ("always", True)])
def test_never_and_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: disk.Sync, at_once: bool
) -> None:
    backend = DiskBackend(tmp_path / "store", sync=sync)
    synced = Synced(monkeypatch)
    put(backend, A, b"record")
    paths = synced.take()
    if at_once:
        assert "/tmp/" in paths[0].removeprefix(str(tmp_path))  # whole before it has its name
        assert str(file_of(backend, A).parent) in paths
    else:
        assert paths == []
    backend.flush()
    assert synced.take() == []


def test_a_failed_flush_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DiskBackend(tmp_path / "store")
    put(backend, A, b"record")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no file can be opened
    try:
        with pytest.raises(BackendFailed):
            backend.flush()
        with pytest.raises(BackendFailed):
            backend.put(B, memoryview(b"record"))
        with pytest.raises(BackendFailed):
            backend.get(A, aligned)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    synced = Synced(monkeypatch)
    backend.flush()
    assert str(file_of(backend, A)) in synced.take()
    assert get(backend, A) == b"record"


def test_only_the_index_stays_open(backend: DiskBackend) -> None:
    def opened() -> set[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        paths = [os.readlink(link) for link in links if os.path.lexists(link)]
        return {path for path in paths if path.startswith(backend.describe()[7:])}

    for number in range(5):
        put(backend, block_id(number), content(A, number, 70_000))
        get(backend, block_id(number))
    with pytest.raises(OutOfRoom):
        put(backend, A, bytes(2 << 20))
    backend.delete([A, B])
    backend.quarantine(C, "bad")
    backend.flush()
    listing = backend.list()
    next(listing)
    assert {path.rpartition("/")[0] for path in opened()} == {f"{backend.describe()[7:]}/index"}
    backend.close()
    assert opened() == set()
