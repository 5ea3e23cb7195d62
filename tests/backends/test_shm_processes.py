"""Several processes in one arena, killed at any instant, also at every line of a change."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from shm_worker import CAPACITY, KEYS, block_of, forked, lines_of, record, version_of, work

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.backends.shm import segment as at
from kvkeep.store.backends.shm.lock import SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
SOURCE = str(Path(sys.modules[ShmBackend.__module__].__file__ or "").parent)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ShmBackend]:
    """An arena of 1 MiB; everything must add up at the end."""
    with ShmBackend(CAPACITY, directory=str(tmp_path)) as backend:
        yield backend
        backend.check()


def killed(pid: int, reading: int) -> None:
    os.kill(pid, signal.SIGKILL)
    lines_of(pid, reading)


def text(backend: ShmBackend, block: bytes) -> bytes | None:
    found = backend.get(block, aligned)
    return None if found is None else bytes(found)


def no_holds(backend: ShmBackend) -> bool:
    """Whether no process holds an entry, once the dead are forgotten."""
    with backend._rows as rows:
        rows._reaped = float("-inf")
        rows.reap()
        return not rows.held(rows.layout.rows).any()


class Model:
    """What workers reported: the version of each key, and the change that was under way."""

    def __init__(self) -> None:
        self.there: dict[tuple[int, int], int] = {}

    def learn(self, who: int, lines: list[str]) -> tuple[int, int] | None:
        making = None
        for line in lines:
            what, key, *rest = line.split()
            if what == "put":
                making = int(key), int(rest[0])
            elif what == "done":
                self.there[who, int(key)] = int(rest[0])
                making = None
            elif what == "full":
                making = None
        return making

    def check(self, backend: ShmBackend, lines: dict[int, list[str]]) -> int:
        """Compare; return how many records are there."""
        making = {who: self.learn(who, said) for who, said in lines.items()}
        evicting = any(said and said[-1].startswith(("full", "evicted")) for said in lines.values())
        evicted = {
            (int(line.split()[1]), int(line.split()[2]))
            for said in lines.values() for line in said if line.startswith("evicted")
        }  # fmt: skip
        found = 0
        for who in (1, 2):
            for key in range(KEYS):
                data = text(backend, block_of(who, key))
                version = 0 if data is None else version_of(data)
                if data is not None:
                    assert data == record(block_of(who, key), version), "wrong bytes"
                    found += 1
                allowed = {self.there.get((who, key), 0)}
                if making.get(who) and making[who][0] == key:  # type: ignore[index]
                    allowed.add(making[who][1])  # type: ignore[index]
                if evicting or (who, key) in evicted:
                    allowed.add(0)
                assert version in allowed, f"key {key} of {who}: {version}, not in {allowed}"
                self.there[who, key] = version
        return found


def test_a_hundred_kills(backend: ShmBackend, tmp_path: Path) -> None:
    """No wrong byte, no published record lost, no lock left, no memory lost."""
    chance, model = random.Random(7), Model()
    changes = found = 0
    for _ in range(50):
        jobs = {
            who: forked(partial(work, str(tmp_path), who, chance.randrange(1 << 30), 1 << 30))
            for who in (1, 2)
        }
        said: dict[int, list[str]] = {}
        for who, (pid, reading) in jobs.items():
            time.sleep(chance.uniform(0.002, 0.05))
            os.kill(pid, signal.SIGKILL)
            said[who] = lines_of(pid, reading)
        changes += sum(line.startswith("done") for lines in said.values() for line in lines)
        found += model.check(backend, said)
        assert no_holds(backend)
        backend.check()
        for who in jobs:
            backend.put(block_of(9, who), memoryview(b"the lock is free"))
        backend.delete([block_of(9, 1), block_of(9, 2)])
    assert changes > 500, "they were killed before they did anything"
    assert found > 200
    assert backend.lost == 0


# --- a crash at every line -------------------------------------------------------------------


def until_line(number: int, job: Callable[[], object], out: int) -> None:
    """Run ``job``; kill this process at the ``number``-th line of the package that it runs."""
    count = 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        job()
    finally:
        sys.settrace(None)
    os.write(out, b"finished\n")


A, B, C, D, E, F, G = (block_of(1, key) for key in range(7))
STEP = 64 << 10


def change(directory: str, number: int, out: int) -> None:
    backend = ShmBackend(CAPACITY, directory=directory)
    lease = backend.lease(C)
    assert lease is not None

    def job() -> None:
        backend.put(A, memoryview(record(A, 2)))  # replaces
        draft = backend.reserve(D, 3 * STEP)
        backend.delete([B])
        draft.release()
        backend.delete([C])  # which is leased
        backend.put(D, memoryview(record(D, 5)))
        lease.release()
        backend.evict(1)  # evicts E, the oldest
        backend.set_quota(A[:16], 1 << 19)

    until_line(number, job, out)


def change_runs(directory: str, number: int, out: int) -> None:
    backend = ShmBackend(CAPACITY, directory=directory)

    def job() -> None:
        made = [record(A, 2), record(B, 4), record(C, 5)]  # A is replaced
        drafts = backend.reserve_all([A, B, C, D], [*map(len, made), CAPACITY])
        assert len(drafts) == 3
        for draft, data in zip(drafts, made, strict=True):
            draft.record[:] = data
        backend.commit_all(drafts)
        leases = drafts + backend.lease_all([E, F, A, G])
        assert len(leases) == 6
        backend.delete([E, F, B])  # which are leased
        backend.release_all(leases)

    until_line(number, job, out)


def test_a_crash_at_every_line(tmp_path: Path) -> None:
    """After a kill at any line every record is as before or as after its change."""
    step, number, finished = 1, 1, False
    repaired = 0
    while not finished:
        with ShmBackend(CAPACITY, directory=str(tmp_path)) as backend:
            backend.delete([one.block for one in backend.list()])
            backend.put(E, memoryview(record(E, 2)))
            for block in (A, B, C, F):
                backend.put(block, memoryview(record(block, 1)))
            repairs = backend.repairs
            pid, reading = forked(partial(change, str(tmp_path), number))
            finished = lines_of(pid, reading) == ["finished"]
            there = {block: text(backend, block) for block in (A, B, C, D, E, F)}
            assert there[A] in (record(A, 1), record(A, 2)), number
            assert there[B] in (record(B, 1), None), number
            assert there[C] in (record(C, 1), None), number
            assert there[D] in (record(D, 5), None), number
            assert there[E] in (record(E, 2), None), number
            assert there[F] == record(F, 1), number
            assert no_holds(backend), number
            backend.check()
            backend.put(B, memoryview(record(B, 4)))
            assert text(backend, B) == record(B, 4)
            repaired += backend.repairs > repairs
            assert backend.lost == 0
        number += step
        step = 1 if os.environ.get("KVKEEP_FUZZ") == "long" else 13
    assert number > 300, "the whole change is a few lines"
    assert repaired > 15, "no crash was in the middle of a change"


def test_a_crash_at_every_line_of_runs(tmp_path: Path) -> None:
    """Each record of a run is as before or as after; earlier ones first; no hold stays."""
    step, number, finished, repaired, partly = 1, 1, False, 0, 0
    while not finished:
        with ShmBackend(CAPACITY, directory=str(tmp_path)) as backend:
            backend.delete([one.block for one in backend.list()])
            for block in (A, E, F):
                backend.put(block, memoryview(record(block, 1)))
            repairs = backend.repairs
            pid, reading = forked(partial(change_runs, str(tmp_path), number))
            finished = lines_of(pid, reading) == ["finished"]
            there = {block: text(backend, block) for block in (A, B, C, D, E, F)}
            assert there[A] in (record(A, 1), record(A, 2)), number
            assert there[B] in (record(B, 4), None), number
            assert there[C] in (record(C, 5), None), number
            assert there[D] is None, number
            assert there[E] in (record(E, 1), None), number
            assert there[F] in (record(F, 1), None), number
            assert there[A] == record(A, 2) or there[B] is None is there[C], number
            partly += there[A] == record(A, 2) and there[C] is None
            assert no_holds(backend), number
            backend.check()
            kept = sum(len(data) for data in there.values() if data is not None)
            assert backend.used() <= kept + 4096 * len(there), number
            repaired += backend.repairs > repairs
            assert backend.lost == 0
        number += step
        step = 1 if os.environ.get("KVKEEP_FUZZ") == "long" else 11
    assert number > 300, "the whole change is a few lines"
    assert partly, "no crash was in the middle of a run"
    assert repaired > 15, "no crash was in the middle of a change"


# --- leases, drafts and locks of the dead ----------------------------------------------------


def test_the_dead_keep_no_runs(backend: ShmBackend, tmp_path: Path) -> None:
    """A process that is killed with 64 leases and 64 drafts, each taken in one step."""
    leased = [block_of(3, key) for key in range(64)]
    drafted = [block_of(4, key) for key in range(64)]
    for block in leased:
        backend.put(block, memoryview(block))

    def other(out: int) -> None:
        mine = ShmBackend(CAPACITY, directory=str(tmp_path))
        leases, drafts = mine.lease_all(leased), mine.reserve_all(drafted, [5000] * 64)
        os.write(out, f"{len(leases)} {len(drafts)}\n".encode())
        time.sleep(60)
        mine.release_all([*leases, *drafts])

    pid, reading = forked(other)
    assert os.read(reading, 6) == b"64 64\n"
    backend.delete(leased)
    assert backend.used() == 64 * 3 * 4096, "they are held"
    killed(pid, reading)
    assert no_holds(backend)
    assert backend.used() == 0
    with backend.reserve(C, CAPACITY) as draft:
        draft.commit()


def test_a_lease_keeps_its_bytes_from_other_processes(backend: ShmBackend, tmp_path: Path) -> None:
    backend.put(A, memoryview(record(A, 2)))
    lease = backend.lease(A)
    assert lease is not None

    def other(out: int) -> None:
        with ShmBackend(CAPACITY, directory=str(tmp_path)) as mine:
            mine.delete([A])
            for key in range(200):
                try:
                    mine.put(block_of(2, key), memoryview(bytes([key]) * STEP))
                except OutOfRoom:
                    mine.evict(STEP)
        os.write(out, b"done\n")

    assert lines_of(*forked(other)) == ["done"]
    assert bytes(lease.view) == record(A, 2)
    assert not backend.contains(A)
    used = backend.used()
    lease.release()
    assert backend.used() < used


def test_the_dead_keep_no_memory(backend: ShmBackend, tmp_path: Path) -> None:
    """Neither drafts nor leases of a killed process: a writer who needs the room gets it."""
    backend.put(A, memoryview(bytes(4 * STEP)))

    def other(out: int) -> None:
        mine = ShmBackend(CAPACITY, directory=str(tmp_path))
        lease, draft = mine.lease(A), mine.reserve(B, 8 * STEP)
        mine.delete([A])
        assert lease is not None
        os.write(out, b"ready\n")
        time.sleep(60)
        draft.commit()

    pid, reading = forked(other)
    assert os.read(reading, 6) == b"ready\n"
    with pytest.raises(OutOfRoom):
        backend.reserve(C, CAPACITY)
    killed(pid, reading)
    backend._rows._reaped = float("-inf")
    with backend.reserve(C, CAPACITY) as draft:
        draft.commit()
    assert backend.used() == CAPACITY


def test_a_stopped_process_fails_calls_in_time(tmp_path: Path) -> None:
    """A process that is stopped while it holds the lock: others fail, and go on when it does."""
    with ShmBackend(CAPACITY, directory=str(tmp_path), timeout=0.2) as backend:
        backend.put(A, memoryview(record(A, 1)))

        def other(out: int) -> None:
            mine = ShmBackend(CAPACITY, directory=str(tmp_path))
            with mine._rows:
                os.write(out, b"ready\n")
                os.kill(os.getpid(), signal.SIGSTOP)

        pid, reading = forked(other)
        assert os.read(reading, 6) == b"ready\n"
        os.waitpid(pid, os.WUNTRACED)
        with pytest.raises(BackendFailed, match=r"another process has held the lock for 0\.2 s"):
            backend.lease(A)
        assert backend.contains(A), "lookups need no lock"
        assert backend.sizes([A, B]) == [len(record(A, 1)), None]
        killed(pid, reading)
        assert text(backend, A) == record(A, 1)


def test_a_fork_neither_uses_nor_keeps_the_lock(backend: ShmBackend, tmp_path: Path) -> None:
    """A child of a killed process keeps neither its lock nor its slot."""

    def parent(out: int) -> None:
        mine = ShmBackend(CAPACITY, directory=str(tmp_path))
        mine.put(A, memoryview(record(A, 1)))
        lease = mine.lease(A)
        assert lease is not None
        mine._rows.__enter__()
        if os.fork() == 0:
            lease.release()
            try:
                mine.put(B, memoryview(b"b"))
            except BackendFailed as error:
                os.write(out, f"{'parent of this process' in str(error)}\n".encode())
            time.sleep(1.0)
            os._exit(0)
        time.sleep(60)

    pid, reading = forked(parent)
    assert os.read(reading, 100) == b"True\n"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert text(backend, A) == record(A, 1)
    assert no_holds(backend)
    os.close(reading)


def test_slots_are_taken_and_given_back(backend: ShmBackend, tmp_path: Path) -> None:
    with ShmBackend(CAPACITY, directory=str(tmp_path)) as other:
        words = backend._rows.words
        slots = [words[at.SLOT_AT + slot] for slot in range(SLOTS)]
        assert [pid for pid in slots if pid] == [os.getpid()] * 2
        other.put(A, memoryview(b"a"))
        assert text(backend, A) == b"a"
    assert sum(map(bool, words[at.SLOT_AT : at.SLOT_AT + SLOTS].tolist())) == 1


def test_all_slots_can_be_open(tmp_path: Path) -> None:
    opened = [ShmBackend(1 << 16, directory=str(tmp_path)) for _ in range(SLOTS)]
    with pytest.raises(BackendFailed, match="256 processes"):
        ShmBackend(1 << 16, directory=str(tmp_path))
    last = opened.pop()
    last.put(A, memoryview(b"a"))
    lease = last.lease(A)
    assert lease is not None
    last.close()
    opened[0].delete([A])
    assert opened[0].used() == 4096, "a lease outlives its backend"
    lease.release()
    assert opened[0].used() == 0
    ShmBackend(1 << 16, directory=str(tmp_path)).close()
    opened[0].check()
    for one in opened:
        one.close()
