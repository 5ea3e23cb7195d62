"""A large directory is counted correctly while other processes write there."""

from __future__ import annotations

import os
import signal
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import OutOfRoom
from kvkeep.store.backends.disk import DiskBackend, directory
from kvkeep.store.backends.disk import backend as disk_backend
from kvkeep.store.backends.disk.recount import Recount
from kvkeep.testing.backend_hooks import block_id, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvkeep.store.backends.base import Listed

UNIT = 4096
HEAD = 64  # bytes of the ledger before its journal
A, B, C = block_id(1), block_id(2), block_id(3, space=1)
NEW, FAR = block_id(4), block_id(5, space=2)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file makes a directory large."""
    monkeypatch.setattr(disk_backend, "SMALL", 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of three records, six units, whose ledger says another number."""
    with DiskBackend(tmp_path / "store") as backend:
        for units, block in enumerate((A, B, C), 1):
            put(backend, block, bytes(units * UNIT))
    falsify(tmp_path / "store", 20 * UNIT)
    return tmp_path / "store"


def falsify(root: Path, used: int) -> None:
    """As after a loss of power: an outdated count without a mark."""
    with open(root / "ledger", "r+b") as ledger:
        ledger.write(struct.pack("<8sQQ", b"kvledger", 1, used))


def on_disk(root: Path) -> int:
    """Bytes of all files, in whole units, counted without the backend."""
    files = [path for path in root.glob("*/*") if path.is_file()]
    return sum(-(-path.stat().st_size // UNIT) * UNIT for path in files)


def check(root: Path, backend: DiskBackend) -> None:
    """Assert that the count equals a scan, in all processes, and that no journal runs."""
    assert not backend._usage.ledger.wants_count
    assert backend.used() == DiskBackend(root).used() == on_disk(root)
    assert (root / "ledger").stat().st_size == HEAD


class Steps:
    """Calls ``do`` at the step ``at`` of a recount: none of them may hold the lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, do: Callable[[], object]) -> None:
        self.seen = 0
        self._at = at
        self._do = do
        for place, name in (
            (Recount, "__init__"),
            (Recount, "finish"),
            (directory, "lstat"),
            (directory.RecordDirectory, "entries"),
        ):
            monkeypatch.setattr(place, name, self._around(getattr(place, name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*given: Any, **named: Any) -> Any:
            self._step()
            try:
                return call(*given, **named)
            finally:
                self._step()

        return stepped

    def _step(self) -> None:
        self.seen += 1
        if self.seen == self._at:
            self._do()


def in_child(work: Callable[[], object]) -> int:
    """Do ``work`` in another process; return its status from `os.waitpid`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


_CALLS = ("open", "pwrite", "pwritev", "ftruncate", "rename", "unlink", "mkdir", "rmdir", "utime")


def killed(at: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in another process that gets SIGKILL at its system call ``at``, before or after.

    False when it ended before that.
    """

    def counted() -> None:
        seen = 0

        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def stepped(*given: Any, **named: Any) -> Any:
                nonlocal seen
                done = None
                for before in (True, False):
                    if seen == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    seen += 1
                    if before:
                        done = call(*given, **named)
                return done

            return stepped

        for name in _CALLS:
            setattr(os, name, around(getattr(os, name)))
        work()

    status = in_child(counted)
    assert status in (0, signal.SIGKILL)
    return status != 0


# --- changes while it is counted -------------------------------------------------------------


def change(backend: DiskBackend, steps: str) -> None:
    """Do ``steps``: words of a block and the change to it."""
    backend.timeout = 0.2  # if the lock is held, this fails
    blocks = {"A": A, "B": B, "C": C, "N": NEW, "F": FAR}
    for word in steps.split():
        block = blocks[word[0]]
        if word[1:] == "-":
            backend.delete([block])
        elif word[1:] == "!":
            backend.quarantine(block, "bad")
        else:
            put(backend, block, bytes(int(word[1:]) * UNIT))


CHANGES = ["F7", "B9", "C1", "A-", "C!", "B- B5", "N3 N-", "A4 B! C- N1 A-"]


@pytest.mark.parametrize("steps", CHANGES)
@pytest.mark.parametrize("who", ["itself", "another", "process"])
def test_a_change_at_any_step_of_a_recount_is_counted(root: Path, who: str, steps: str) -> None:
    """And the change waits for no lock."""
    begin = {path: path.read_bytes() for path in root.glob("*/*")}
    at, reached = 0, True
    while reached:
        at += 1
        for path in root.glob("*/*"):
            path.unlink()
        for path, data in begin.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        falsify(root, 20 * UNIT)
        backend, another = DiskBackend(root), DiskBackend(root)
        another.used()  # it has counted, and trusts the ledger from now on
        does = partial(change, another if who == "another" else backend, steps)
        if who == "process":
            alone = partial(change, DiskBackend(root), steps)

            def does(alone: Callable[[], object] = alone) -> None:
                assert in_child(alone) == 0

        with pytest.MonkeyPatch.context() as patch:
            seen = Steps(patch, at, does)
            list(backend.list())
            reached = seen.seen >= at
        check(root, backend)
        assert another.used() == on_disk(root)
    assert at > 14, "the steps of three records"


class Walk(NamedTuple):
    """What one of two objects does, to which block, with how many units."""

    name: str
    who: int
    block: bytes
    units: int


WALKS = st.lists(
    st.builds(
        Walk,
        name=st.sampled_from(
            ["put", "put", "put", "delete", "quarantine", "begin", "next", "next", "end", "leave",
             "reopen", "falsify"]
        ),
        who=st.integers(0, 1),
        block=st.sampled_from([A, B, C, NEW, FAR]),
        units=st.integers(1, 4),
    ),
    min_size=8,
    max_size=30,
)  # fmt: skip


class Walker:
    """Two objects change and count one directory, as two processes do.

    Attributes:
        exact: nobody falsified the count since it was made.
    """

    CAPACITY = 10 * UNIT

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = [DiskBackend(root, self.CAPACITY) for _ in range(2)]
        self.listings: list[Iterator[Listed] | None] = [None, None]
        self.counts = [False, False]  # whether the listing is a recount
        self.exact = True

    def take(self, step: Walk) -> None:
        """Do it; assert that the capacity holds."""
        getattr(self, step.name)(step)
        assert on_disk(self.root) <= self.CAPACITY
        if self.exact:
            assert self.objects[step.who].used() == on_disk(self.root)

    def put(self, step: Walk) -> None:
        backend, need = self.objects[step.who], step.units * UNIT
        room = self.CAPACITY - backend.used()
        if need <= room:
            put(backend, step.block, bytes(need))
        else:
            with pytest.raises(OutOfRoom) as full:
                put(backend, step.block, bytes(need))
            assert full.value.needed == need - room

    def delete(self, step: Walk) -> None:
        self.objects[step.who].delete([step.block])

    def quarantine(self, step: Walk) -> None:
        self.objects[step.who].quarantine(step.block, "bad")

    def begin(self, step: Walk) -> None:
        backend = self.objects[step.who]
        listing = self.listings[step.who] = iter(backend.list())
        backend.used()
        self.counts[step.who] = backend._usage.ledger.wants_count
        self._go(step.who, listing)

    def next(self, step: Walk) -> None:
        if (listing := self.listings[step.who]) is not None:
            self._go(step.who, listing)

    def end(self, step: Walk) -> None:
        while (listing := self.listings[step.who]) is not None:
            self._go(step.who, listing)

    def leave(self, step: Walk) -> None:
        """A killed process may leave its journal running."""
        self.listings[step.who] = None

    def reopen(self, step: Walk) -> None:
        self.listings[step.who] = None
        self.objects[step.who] = DiskBackend(self.root, self.CAPACITY)

    def falsify(self, step: Walk) -> None:
        falsify(self.root, self.objects[step.who].used() + step.units * UNIT)
        self.exact = False

    def _go(self, who: int, listing: Iterator[Listed]) -> None:
        if next(listing, None) is None:
            self.listings[who] = None
            if self.counts[who] and not self.objects[who]._usage.ledger.wants_count:
                self.exact = True


@given(WALKS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_two_processes_that_count_and_change_a_directory(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Walk]
) -> None:
    root = tmp_path_factory.mktemp("walk") / "store"
    walker = Walker(root)
    for step in steps:
        walker.take(step)
    walker.falsify(Walk("falsify", 0, A, 1))
    last = DiskBackend(root, walker.CAPACITY)
    list(last.list())
    check(root, last)


# --- processes that are killed, journals that are damaged ------------------------------------


def test_a_listing_killed_at_any_call_leaves_a_countable_directory(root: Path) -> None:
    at = 0
    while killed(at, lambda: list(DiskBackend(root).list())):
        backend = DiskBackend(root)
        put(backend, NEW, bytes((1 + at % 5) * UNIT))
        list(backend.list())
        check(root, backend)
        falsify(root, 20 * UNIT)
        at += 1
    assert at > 10


@pytest.mark.parametrize("steps", CHANGES[:-1])
@pytest.mark.parametrize("seen", [1, 3])
def test_a_writer_killed_at_any_call_never_counts_too_low(
    root: Path, steps: str, seen: int
) -> None:
    """The ledger is never too low, and a running recount finds the right count."""
    at, more = 0, True
    while more:
        backend = DiskBackend(root)
        listing = iter(backend.list())
        for _ in range(seen):
            next(listing)
        more = killed(at, partial(change, DiskBackend(root), steps))
        for other in (backend, DiskBackend(root)):
            assert other.used() >= on_disk(root), at
        put(backend, NEW, bytes((1 + at % 5) * UNIT))
        list(listing)
        if backend._usage.ledger.wants_count:  # killed while it noted the change
            list(backend.list())
        check(root, backend)
        for units, block in enumerate((A, B, C), 1):
            put(backend, block, bytes(units * UNIT))
        backend.delete([NEW, FAR])
        at += 1
    assert at > 10
