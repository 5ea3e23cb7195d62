"""Several processes in one directory: killed at any instant, counted at any instant."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from disk_worker import GONE, KEYS, block_of, index_of, record, version_of

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.testing.backend_hooks import get, put

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = 4096
CAPACITY = 400_000  # about six of the largest records: writers are out of room all the time


def on_disk(root: Path) -> int:
    """Bytes of all records and drafts, in whole units, without the backend."""
    files: dict[int, int] = {}  # by inode: one may be renamed meanwhile
    for directory, _, names in os.walk(root):
        for name in names if directory not in {str(root), str(root / "index")} else ():
            with suppress(FileNotFoundError):
                found = os.lstat(os.path.join(directory, name))
                files[found.st_ino] = -(-found.st_size // UNIT) * UNIT
    return sum(files.values())


@contextmanager
def unchanged(root: Path) -> Iterator[int]:
    """Let no process begin a change; the bytes that count as used."""
    (path,) = index_of(root)
    with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as index:
        index.execute("BEGIN IMMEDIATE")
        yield index.execute("SELECT SUM(bytes) FROM room").fetchone()[0]


class Workers:
    """A process that forks writers, so that starting one needs no imports."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("disk_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"
        self.said: list[str] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the process that starts writers is gone"
        return line

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def start(self, job: str, root: Path, *numbers: int) -> int:
        self.tell(f"{job} {root} {' '.join(map(str, numbers))}")
        while not (line := self.line()).startswith("started"):
            self.said.append(line)
        return int(line.split()[1])

    def wait(self) -> list[str]:
        """All output until they ended."""
        self.tell("wait")
        while (line := self.line()) != "all":
            self.said.append(line)
        said, self.said = self.said, []
        assert not [line for line in said if line.startswith("raised")]
        return said

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


class Told:
    """What writers reported: the version of each key, and the one being written."""

    def __init__(self) -> None:
        self.is_there: dict[tuple[int, int], int] = {}

    def check(self, said: list[str], root: Path) -> None:
        making: dict[int, tuple[int, int]] = {}
        for line in said:
            what, *numbers = line.split()
            if what == "dead":
                continue
            who, key, version = map(int, numbers)
            if what == "begin":
                making[who] = key, version
            else:
                assert making.pop(who) == (key, version)
            if what == "done":
                self.is_there[who, key] = version
        with DiskBackend(root, CAPACITY) as backend:
            found = {one.block: one.size for one in backend.list()}
            assert os.listdir(root / "tmp") == []
            assert backend.used() == on_disk(root) <= CAPACITY
            assert backend.odd == 0
            for who in (1, 2):
                for key in range(KEYS):
                    version = self.verified(backend, block_of(who, key), found)
                    allowed = {self.is_there.get((who, key), GONE)}
                    if making.get(who, (None, 0))[0] == key:
                        allowed.add(making[who][1])
                    assert version in allowed, f"key {key} of {who}, {making}"
                    self.is_there[who, key] = version

    def verified(self, backend: DiskBackend, block: bytes, found: dict[bytes, int]) -> int:
        data = backend.get(block, aligned)
        assert found.get(block) == (None if data is None else len(data))
        if data is None:
            return GONE
        assert data == record(block, version_of(data)), "bytes that nobody wrote like this"
        return version_of(data)


def test_a_hundred_killed_writers(workers: Workers, tmp_path: Path) -> None:
    """Each time no record is torn, no finished put lost, no file left over, the count exact."""
    chance = random.Random(11)
    told, changes = Told(), 0
    observer = DiskBackend(tmp_path, CAPACITY)  # counted once, so later it has to trust the index
    for _ in range(50):
        pids = [
            workers.start("work", tmp_path, CAPACITY, who, chance.randrange(1 << 30), 1 << 30)
            for who in (1, 2)
        ]
        for pid in pids:
            time.sleep(chance.uniform(0, 0.06))
            os.kill(pid, signal.SIGKILL)
        said = workers.wait()
        changes += sum(line.startswith("done") for line in said)
        used = observer.used()  # too high if one was killed while it deleted
        assert on_disk(tmp_path) <= used <= CAPACITY
        told.check(said, tmp_path)
    assert changes > 200, "they were killed before they did anything"


def test_the_budget_holds_at_any_instant(workers: Workers, tmp_path: Path) -> None:
    """Two processes that run out of space all the time; no file is uncounted."""
    DiskBackend(tmp_path, CAPACITY).used()
    for who in (1, 2):
        workers.start("work", tmp_path, CAPACITY, who, who, 700)
    most = 0
    for _ in range(200):
        with unchanged(tmp_path) as used:
            assert on_disk(tmp_path) <= used <= CAPACITY
            most = max(most, used)
        time.sleep(0.002)
    said = workers.wait()
    assert most > CAPACITY * 0.7, "they never had much"
    assert sum(line.startswith("full") for line in said) > 10
    assert all(line.endswith(" 0") for line in said if line.startswith("dead"))
    Told().check(said, tmp_path)


def test_an_index_lost_again_and_again_while_others_write(workers: Workers, tmp_path: Path) -> None:
    """Whoever makes it anew may be killed; in the end the count is exact, and nothing is lost."""
    chance = random.Random(5)
    DiskBackend(tmp_path, CAPACITY).used()
    for who in (1, 2):
        workers.start("work", tmp_path, CAPACITY, who, who, 400)
    for turn in range(15):
        pids = [workers.start("sweep", tmp_path, CAPACITY, who, 0, 1 << 30) for who in (3, 4)]
        for pid in pids:
            time.sleep(chance.uniform(0, 0.03))
            if turn % 2:
                for path in index_of(tmp_path):
                    path.unlink(missing_ok=True)
            os.kill(pid, signal.SIGKILL)
    said = workers.wait()
    assert sum(line.startswith("full") for line in said) > 10
    Told().check(said, tmp_path)


@pytest.mark.parametrize("stopped", ["within a change", "while it writes"])
def test_a_stopped_process_stops_no_other(workers: Workers, tmp_path: Path, stopped: str) -> None:
    with DiskBackend(tmp_path, CAPACITY) as backend:
        put(backend, block_of(9, 9), b"record")
        pid = workers.start("stop", tmp_path, CAPACITY, 1, int("within" in stopped), 0)
        while not any(line.startswith("stopped") for line in workers.said):
            workers.said.append(workers.line())
        backend.timeout = 0.1
        before = time.monotonic()
        if stopped == "within a change":
            for change in (lambda: put(backend, block_of(9, 8), b"x"), backend.used):
                with pytest.raises(BackendFailed, match="locked for more than"):
                    change()
        else:  # what it reserved counts
            assert backend.used() == 3 * UNIT
            put(backend, block_of(9, 8), b"x")
            assert backend.used() == 4 * UNIT
        assert get(backend, block_of(9, 9)) == b"record", "reading needs no lock"
        assert backend.sizes([block_of(9, 9)]) == [6]
        assert time.monotonic() - before < 2
        os.kill(pid, signal.SIGKILL)
        workers.wait()
        backend.timeout = 5
        put(backend, block_of(9, 8), b"x")
        assert backend.used() == on_disk(tmp_path) == 2 * UNIT
        assert os.listdir(tmp_path / "tmp") == []


def test_a_fork_can_use_the_backend(workers: Workers, tmp_path: Path) -> None:
    """Also while threads of its parent put records."""
    workers.start("fork", tmp_path, 1 << 30, 99, 0, 40)
    assert [line.split()[2] for line in workers.wait()] == ["0"]
    with DiskBackend(tmp_path) as backend:
        blocks = [one.block for one in backend.list()]
        assert len(blocks) == 2 * 7
        for block in blocks:
            data = backend.get(block, aligned)
            assert data is not None
            assert data[:48] == block
        assert backend.used() == on_disk(tmp_path) == 2 * 7 * 2 * UNIT
        assert os.listdir(tmp_path / "tmp") == []
