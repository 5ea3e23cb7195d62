"""Write budgets: the bucket against a model, and processes that share one and are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom
from kvkeep.store.backends import OverBudget, TierURL, WriteBudget
from kvkeep.store.backends.budget import FileBucket, MemoryBucket
from kvkeep.store.backends.disk import DiskBackend

SECOND = 1_000_000_000
BUDGET = WriteBudget(1200, 100)


@pytest.mark.parametrize(
    ("text", "amount", "seconds"),
    [("2TB/day", 2 * 10**12, 86_400), ("50 GiB/hour", 50 << 30, 3_600), ("4096/day", 4096, 86_400)],
)
def test_a_budget_is_bytes_per_day_or_hour(text: str, amount: int, seconds: int) -> None:
    assert WriteBudget.parse(text) == WriteBudget(amount, seconds)


@pytest.mark.parametrize("text", ["2TB", "2TB/week", "/day", "2T/day", "-1/day", "0/day", "day"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        WriteBudget.parse(text)
    with pytest.raises(InvalidValue, match="writes="):
        TierURL(f"file:///x?writes={text}").write_budget("writes")


def test_a_budget_reads_back_as_text() -> None:
    assert str(WriteBudget.parse("2GiB/day")) == "2 GiB/day"
    assert str(BUDGET).endswith("/100 s")


class _Model:
    """A bucket in exact fractions."""

    def __init__(self, now: int) -> None:
        self.held = Fraction(0)
        self.at = now

    def now(self, now: int) -> None:
        if now < self.at - BUDGET.seconds * SECOND:
            self.held, self.at = max(self.held, Fraction(BUDGET.burst)), now
            return
        passed = Fraction(max(0, now - self.at), SECOND)
        rate = Fraction(BUDGET.amount - BUDGET.burst, BUDGET.seconds)
        self.held = max(Fraction(0), self.held - rate * passed)
        self.at = max(self.at, now)


class BudgetMachine(RuleBasedStateMachine):
    """Several writers over one file, with restarts, and a clock that is set back and forth."""

    path: str

    def __init__(self) -> None:
        super().__init__()
        self.clock = 10**18
        Path(self.path).unlink(missing_ok=True)
        self.writers = [self._open() for _ in range(3)]
        self.model = _Model(self.clock)
        self.total = 0
        self.lasting = 0  # time as far as the bucket lets it pass
        self.latest = self.clock
        self.charged: list[tuple[int, int]] = []

    def _open(self) -> FileBucket:
        return FileBucket(BUDGET, "here", self.path, lambda: self.clock)

    @initialize()
    def begin(self) -> None:
        with pytest.raises(OverBudget):
            self.writers[0].charge(BUDGET.burst + 1)

    @rule(writer=st.integers(0, 2), size=st.integers(1, 110))
    def charge(self, writer: int, size: int) -> None:
        self.model.now(self.clock)
        bucket = self.writers[writer]
        fits = self.model.held + size <= BUDGET.burst
        try:
            bucket.charge(size)
        except OverBudget:
            # What leaks is rounded down, by less than a byte in all.
            assert not fits or self.model.held + size > BUDGET.burst - 1
            return
        assert fits
        self.model.held += size
        self.total += size
        self.charged.append((self.lasting, size))
        assert bucket.written == self.total

    @rule(seconds=st.integers(0, 130))
    def wait(self, seconds: int) -> None:
        self._set(self.clock + seconds * SECOND)

    @rule(seconds=st.integers(1, 90))
    def set_back(self, seconds: int) -> None:
        self._set(self.clock - seconds * SECOND)

    @rule()
    def set_far_back(self) -> None:
        self._set(self.latest - 500 * SECOND)
        self.writers[0].refresh()  # else nobody would see that it was so far back

    def _set(self, now: int) -> None:
        self.clock = now
        if now < self.latest - BUDGET.seconds * SECOND:
            self.latest = now
        self.lasting += max(0, now - self.latest)
        self.latest = max(self.latest, now)
        self.writers[0].refresh()
        self.model.now(now)

    @rule(writer=st.integers(0, 2))
    def restart(self, writer: int) -> None:
        self.writers[writer] = self._open()

    @invariant()
    def no_span_has_more_than_the_budget(self) -> None:
        span = BUDGET.seconds * SECOND
        for begin, _ in self.charged:
            inside = [size for at, size in self.charged if begin <= at <= begin + span]
            assert sum(inside) <= BUDGET.amount

    @invariant()
    def nobody_knows_of_less_room_than_there_is(self) -> None:
        self.writers[1].refresh()
        assert 0 <= self.writers[1].left() <= BUDGET.burst


def test_buckets_agree_with_a_model(tmp_path: Path) -> None:
    machine = type("Machine", (BudgetMachine,), {"path": str(tmp_path / "writes")})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("content", [b"kvwr", b"something else that is as long as it has to be!!!"])
def test_a_damaged_file_counts_as_spent(tmp_path: Path, content: bytes) -> None:
    now = [10**18]
    path = tmp_path / "writes"
    path.write_bytes(content)
    bucket = FileBucket(BUDGET, "here", str(path), lambda: now[0])
    with pytest.raises(OverBudget, match="here"):
        bucket.charge(1)
    bucket.refresh()
    now[0] += 100 * SECOND
    bucket.charge(100)  # from then on it leaked


def test_every_flipped_bit_of_the_file_counts_as_spent_and_leaks(tmp_path: Path) -> None:
    now = [10**18]
    path = tmp_path / "writes"
    FileBucket(BUDGET, "here", str(path), lambda: now[0]).charge(60)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        now[0] = 10**18
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        bucket = FileBucket(BUDGET, "here", str(path), lambda: now[0])
        with pytest.raises(OverBudget):
            bucket.charge(1)
        now[0] += 100 * SECOND
        bucket.charge(100)


@pytest.mark.parametrize("amount", ["1024EiB/day", "9" * 30 + "EB/day"])
def test_an_amount_has_room_in_the_file_or_is_refused(tmp_path: Path, amount: str) -> None:
    if len(amount) > 20:
        with pytest.raises(InvalidValue, match="bytes of a write budget"):
            WriteBudget.parse(amount)
        return
    path = tmp_path / "writes"
    path.write_bytes(b"damaged")  # so the bucket is full
    bucket = FileBucket(WriteBudget.parse(amount), "here", str(path))
    with pytest.raises(OverBudget):
        bucket.charge(1 << 69)
    bucket.refresh()
    assert bucket.state()["left"] > 0


def test_a_clock_that_was_ahead_for_years_does_not_stop_a_process(tmp_path: Path) -> None:
    """It asks what is `left` before it charges, and what it knows has the wrong time."""
    now = [10**18]
    file = FileBucket(BUDGET, "here", str(tmp_path / "writes"), lambda: now[0])
    for bucket in (file, MemoryBucket(BUDGET, "here", lambda: now[0])):
        now[0] = 2 * 10**18
        bucket.charge(10)
        now[0] = 10**18
        assert bucket.left() == 0
        now[0] += 100 * SECOND
        assert bucket.left() == 100  # so it is asked to charge again
        with pytest.raises(OverBudget):
            bucket.charge(1)
        now[0] += 100 * SECOND
        bucket.charge(bucket.left())


@pytest.mark.skipif(sys.platform == "win32", reason="no file:// there")
@pytest.mark.parametrize("what", ["folder", "pipe", "link", "nowhere"])
def test_a_file_that_cannot_be_used_is_a_fault_of_the_place(tmp_path: Path, what: str) -> None:
    path = tmp_path / "writes"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path = tmp_path / "nowhere" / "writes"
    with pytest.raises(BackendFailed, match="cannot be used"):
        FileBucket(BUDGET, "here", str(path)).charge(1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_filesystem_is_no_fault_of_the_place() -> None:
    with pytest.raises(OutOfRoom, match="/dev/full"):
        FileBucket(BUDGET, "here", "/dev/full").charge(1)


def test_after_the_machine_was_started_anew_the_bucket_is_full(tmp_path: Path) -> None:
    path = str(tmp_path / "writes")
    before = FileBucket(BUDGET, "here", path, lambda: 10**18)
    before.charge(10)
    after = FileBucket(BUDGET, "here", path, lambda: 10**18 + SECOND)
    after._boot += 1
    with pytest.raises(OverBudget):
        after.charge(1)
    assert after.written == 10


def test_a_lock_that_is_held_is_a_fault_of_the_place(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "writes"
    bucket = FileBucket(BUDGET, "here", str(path), timeout=lambda: 0.05)
    bucket.charge(1)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BackendFailed, match="locked"):
            bucket.charge(1)
    bucket.charge(1)


def test_processes_that_are_killed_never_write_more_than_the_budget(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("no file:// there")
    budget = WriteBudget(48 * 8192 * 12, 600)
    root, chance = tmp_path / "store", random.Random(1)
    begun = time.time()
    command = [sys.executable, str(Path(__file__).with_name("budget_worker.py")), str(root)]
    command += [str(budget.amount), str(budget.seconds)]
    puts = 0
    for turn in range(2):
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"open\n"
            if not turn:
                time.sleep(chance.random() / 50)  # killed while there is budget left
                os.kill(worker.pid, signal.SIGKILL)
        if turn:
            time.sleep(1.0)
            for worker in workers:
                os.kill(worker.pid, signal.SIGKILL)
        for worker in workers:
            puts += worker.communicate()[0].count(b"put\n")
    passed = time.time() - begun
    # Files in tmp/ may have been made by a process killed before it wrote to them.
    files = [path for path in root.glob("*/*") if len(path.name) == 64]
    written = 8192 * len(files)
    allowed = budget.burst + (budget.amount - budget.burst) * passed / budget.seconds
    bucket = FileBucket(budget, "here", str(root / "writes"))
    bucket.refresh()
    assert puts * 8192 <= written <= bucket.written <= allowed
    assert written > budget.burst / 2, "they were killed before they did anything"


def test_a_directory_with_the_file_of_a_budget_is_still_a_store(tmp_path: Path) -> None:
    with DiskBackend(tmp_path / "store") as backend:
        backend.limit_writes(WriteBudget(1 << 20))
        block = bytes(48)
        backend.put(block, memoryview(bytes(100)))
        assert backend.budget is not None
        assert backend.budget.written == 4096  # files take whole units
        with pytest.raises(OverBudget):
            backend.put(bytes([1]) * 48, memoryview(bytes(200_000)))
        assert backend.used() == 4096
    (tmp_path / "store" / "FORMAT").unlink()
    with DiskBackend(tmp_path / "store") as backend:
        assert backend.sizes([block]) == [100]
