"""The shared-memory backend: the contract, its file, drafts and leases, and a state machine."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep import InvalidValue
from kvkeep.core.errors import BackendFailed, IllegalStep, OutOfRoom
from kvkeep.store.backends import ALIGNMENT, TierURL
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.backends.shm import segment as at
from kvkeep.store.backends.shm.lock import SLOTS
from kvkeep.store.backends.shm.segment import Layout
from kvkeep.store.tiers import open_backend
from kvkeep.testing.backend_hooks import block_id, content
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.backends.memory import Lease

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
UNIT = ALIGNMENT
A, B, C, D = (block_id(number) for number in range(4))


class TestShmBackend(BackendTests):
    persistent = True

    def make_backend(self, tmp_path: Path) -> ShmBackend:
        return ShmBackend(64 << 20, directory=str(tmp_path))

    def make_bounded(self, tmp_path: Path, capacity: int) -> ShmBackend:
        return ShmBackend(capacity, directory=str(tmp_path))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ShmBackend]:
    """Eight units; everything must add up at the end."""
    with ShmBackend(8 * UNIT, directory=str(tmp_path)) as backend:
        yield backend
        backend.check()


def file_of(tmp_path: Path) -> Path:
    return tmp_path / f"kvkeep-{os.geteuid()}-kvkeep"


def store(backend: ShmBackend, block: bytes, record: bytes) -> None:
    with backend.reserve(block, len(record)) as draft:
        draft.record[:] = record
        draft.commit()


# --- URLs and sizes --------------------------------------------------------------------------


def test_a_url_names_size_name_and_place(tmp_path: Path) -> None:
    url = TierURL(f"shm://1MiB?name=engines&dir={tmp_path}")
    with open_backend(url) as backend:
        url.finish()
        assert isinstance(backend, ShmBackend)
        assert backend.capacity == 1 << 20
        assert backend.describe() == "shm://1MiB?name=engines"
        assert backend.warmed(60.0)
        found = (tmp_path / f"kvkeep-{os.geteuid()}-engines").stat()
        assert found.st_mode & 0o777 == 0o600
        assert found.st_blocks * 512 >= found.st_size, "not all of its memory is reserved"


def test_a_url_without_a_size_opens_what_exists(tmp_path: Path) -> None:
    url = f"shm://?dir={tmp_path}"
    with pytest.raises(InvalidValue, match="no arena is there; give a size"):
        open_backend(TierURL(url))
    with ShmBackend(8 * UNIT, directory=str(tmp_path)), open_backend(TierURL(url)) as backend:
        assert backend.capacity == 8 * UNIT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shm://64MiB?size=64MiB", "once"),
        ("shm:///64MiB", "once"),
        ("shm://much", "much"),
        ("shm://1KiB", "too small"),
        ("shm://1MiB?name=../x", "no name of an arena"),
        ("shm://1MiB?name=", "no name of an arena"),
        ("shm://1MiB?dir=/nowhere", "no shared arena can be made"),
    ],
)
def test_wrong_urls(text: str, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        open_backend(TierURL(text))


def test_the_first_size_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvkeep.tiers")
    with ShmBackend(8 * UNIT, directory=str(tmp_path)) as first:
        with ShmBackend(16 * UNIT, directory=str(tmp_path)) as second:
            assert second.capacity == first.capacity == 8 * UNIT
        assert "made with 32 KiB, and 64 KiB were asked for" in caplog.text
    with ShmBackend(8 * UNIT, directory=str(tmp_path)):
        assert len(caplog.records) == 1


def test_too_little_space(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"needs .* and .* has .* free: take a smaller arena"):
        ShmBackend(1 << 46, directory=str(tmp_path))
    assert os.listdir(tmp_path) == [], "a file is left"


def test_a_full_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space that others took between the question and the reservation."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(at.os, "posix_fallocate", full)
    with pytest.raises(InvalidValue, match=r"No space left on device; .* are free"):
        ShmBackend(1 << 20, directory=str(tmp_path))
    assert os.listdir(tmp_path) == []


# --- hostile files ---------------------------------------------------------------------------


def _symlink(path: Path) -> None:
    (path.parent / "target").write_bytes(b"")
    path.symlink_to(path.parent / "target")


def _hard_link(path: Path) -> None:
    path.touch(0o600)
    os.link(path, path.parent / "second")


def _other_user(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 12345, 12345)


def _sized(path: Path, data: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(data)


def _edited(path: Path, position: int, data: bytes) -> None:
    ShmBackend(8 * UNIT, directory=str(path.parent)).close()
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


HOSTILE: dict[str, tuple[Any, str]] = {
    "a symlink": (_symlink, "cannot be opened as a shared arena"),
    "a directory": (lambda path: path.mkdir(), "cannot be opened as a shared arena"),
    "a pipe": (os.mkfifo, "is no regular file"),
    "a hard link": (_hard_link, "second name"),
    "readable by others": (lambda path: path.touch(0o644), "has mode 0644"),
    "random bytes": (
        lambda path: _sized(path, random.Random(1).randbytes(1 << 16)), "does not begin as",
    ),
    "half a header": (lambda path: _sized(path, b"kvkeepS\n"), "does not begin as"),
    "another version": (
        lambda path: _edited(path, 8, b"\1\0\0\0"), "checksum of its header is wrong",
    ),
    "a later version": (
        lambda path: _edited(path, 0, _header(version=3)), r"has version 3; this kvkeep reads 2",
    ),
    "sizes that contradict": (
        lambda path: _edited(path, 0, _header(rows=1 << 27)), "sizes in its header contradict",
    ),
    "truncated": (lambda path: _edited(path, 0, b"") or os.truncate(path, 1 << 20), "truncated"),
}  # fmt: skip


def _header(version: int = 2, rows: int = 8) -> bytes:
    layout = Layout.of(8 * UNIT)
    head = at._HEADER.pack(b"kvkeepS\n", version, SLOTS, 8 * UNIT, rows, at.RECENT, layout.total)
    return head + at.zlib.crc32(head).to_bytes(4, "little")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str, tmp_path: Path) -> None:
    make, says = HOSTILE[kind]
    make(file_of(tmp_path))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InvalidValue, match=says):
        ShmBackend(8 * UNIT, directory=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == before
    assert not (tmp_path / "target").exists() or not (tmp_path / "target").stat().st_size


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    _other_user(file_of(tmp_path))
    with pytest.raises(InvalidValue, match="belongs to user 12345"):
        ShmBackend(8 * UNIT, directory=str(tmp_path))


def test_a_creator_that_died_is_replaced(tmp_path: Path) -> None:
    """Its file has no header yet: another process begins again, with its own size."""
    _sized(file_of(tmp_path), bytes(1 << 20))
    with ShmBackend(8 * UNIT, directory=str(tmp_path)) as backend:
        store(backend, A, b"a")
        assert file_of(tmp_path).stat().st_size == Layout.of(8 * UNIT).total


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("attached", [False, True], ids=["reopened", "in use"])
def test_a_scribbled_index_serves_no_wrong_byte(tmp_path: Path, seed: int, attached: bool) -> None:
    """Random bytes over a part of the index: a record is right or missing, and the rest works."""
    chance = random.Random(seed)
    with ShmBackend(1 << 20, directory=str(tmp_path)) as backend:
        blocks = [block_id(number) for number in range(20)]
        for number, block in enumerate(blocks):
            store(backend, block, content(block, 1, 3000 * number + 1))
        layout = backend._rows.layout
        if not attached:
            backend.close()
        with open(file_of(tmp_path), "r+b") as file:
            for _ in range(1 + seed % 3):
                begin = (
                    chance.randrange(layout.column_at("generation"), layout.column_at("busy")) & ~7
                )
                file.seek(begin)
                file.write(chance.randbytes(8 * chance.choice([1, 20, layout.rows])))
        with ShmBackend(1 << 20, directory=str(tmp_path)) as other:
            if attached:
                with other._rows:
                    pass
                other._rows.words[at.CHANGING] = 1  # as if its writer had died
            with other._rows:
                pass
            for number, block in enumerate(blocks):
                found = other.get(block, aligned)
                assert found is None or found == content(block, 1, 3000 * number + 1)
            other.check()
            store(other, A, b"new")
            assert other.get(A, aligned) == b"new"


# --- drafts and leases -----------------------------------------------------------------------


def test_drafts_and_leases_end_once(backend: ShmBackend) -> None:
    lease = backend.reserve(A, 5000)
    assert not backend.contains(A)
    assert backend.used() == 2 * UNIT
    lease.commit()
    with pytest.raises(IllegalStep):
        lease.commit()
    assert backend.delete([A]) == 5000
    assert backend.used() == 2 * UNIT, "the lease keeps it"
    lease.release()
    lease.release()
    assert backend.used() == 0
    other = backend.reserve(B, 1)
    other.release()
    other.release()
    assert backend.used() == 0


def test_the_room_that_is_missing_is_named(backend: ShmBackend) -> None:
    for number in range(8):
        store(backend, block_id(number), bytes(UNIT))
    backend.delete([block_id(1), block_id(5)])
    with pytest.raises(OutOfRoom) as fragmented:
        backend.reserve(A, 2 * UNIT)
    assert fragmented.value.needed == 2 * UNIT
    with pytest.raises(OutOfRoom) as short:
        backend.reserve(A, 3 * UNIT)
    assert short.value.needed == UNIT
    with pytest.raises(OutOfRoom) as never:
        backend.reserve(A, 9 * UNIT)
    assert never.value.needed > backend.capacity


def test_the_number_of_records_is_bounded(tmp_path: Path) -> None:
    with ShmBackend(1 << 20, directory=str(tmp_path), records=4) as backend:

        def fill() -> None:
            for number in range(300):
                store(backend, block_id(number), b"x")

        with pytest.raises(OutOfRoom):
            fill()
        assert len(backend) == 4
        backend.delete([block_id(1)])
        store(backend, A, b"again")
        backend.check()


def test_a_closed_backend(tmp_path: Path) -> None:
    backend = ShmBackend(8 * UNIT, directory=str(tmp_path))
    store(backend, A, b"kept")
    lease, draft = backend.lease(A), backend.reserve(B, 3)
    assert lease is not None
    backend.close()
    for call in (lambda: backend.lease(A), lambda: backend.reserve(C, 1), draft.commit):
        with pytest.raises(BackendFailed, match="is closed"):
            call()
    assert bytes(lease.view) == b"kept"
    lease.release()
    with ShmBackend(8 * UNIT, directory=str(tmp_path)) as again:
        assert again.get(A, aligned) == b"kept"
        assert again.used() == UNIT
        again.check()


def test_the_least_recently_used_goes_first(backend: ShmBackend) -> None:
    for block in (A, B, C, D):
        store(backend, block, bytes(2 * UNIT))
    backend.touch([A])
    pinned = backend.pin([B], time.time() + 10, 8 * UNIT)
    assert pinned == [B]
    lease = backend.lease(C)
    gone = [block for block, _ in backend.evict(8 * UNIT)]
    assert gone == [D, A], "B is pinned, C is leased"
    assert lease is not None
    lease.release()
    backend.end_pins({B: 0})
    assert [block for block, _ in backend.evict(8 * UNIT)] == [B, C]


def test_uses_of_one_process_count_in_another(tmp_path: Path) -> None:
    with (
        ShmBackend(8 * UNIT, directory=str(tmp_path)) as one,
        ShmBackend(8 * UNIT, directory=str(tmp_path)) as two,
    ):
        for block in (A, B, C, D):
            store(one, block, bytes(2 * UNIT))
        assert [block for block, _ in two.evict(1)] == [A]
        one.touch([B])  # after `two` chose its next victims
        lease = one.lease(C)
        assert lease is not None
        assert [block for block, _ in two.evict(1)] == [D]
        lease.release()


def test_a_deleted_record_stays_until_its_last_lease_ends(tmp_path: Path) -> None:
    with (
        ShmBackend(8 * UNIT, directory=str(tmp_path)) as one,
        ShmBackend(8 * UNIT, directory=str(tmp_path)) as two,
    ):
        store(one, A, b"a" * UNIT)
        leases = [backend.lease(A) for backend in (one, two)]
        one.delete([A])
        for lease in leases:
            assert lease is not None
            assert one.used() == UNIT
            assert lease.view == b"a" * UNIT
            lease.release()
        assert one.used() == 0
        one.check()


@pytest.mark.parametrize("others", [3, 16, 40])
def test_what_others_published_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Also if it was more than they note for each other."""
    monkeypatch.setattr(at, "RECENT", 16)
    with (
        ShmBackend(64 * UNIT, directory=str(tmp_path)) as one,
        ShmBackend(64 * UNIT, directory=str(tmp_path)) as two,
    ):
        store(one, A, b"a")
        assert two.contains(A)
        blocks = [block_id(number) for number in range(100, 100 + others)]
        for block in blocks:
            store(one, block, block)
        one.delete([A])
        assert two.sizes([*blocks, A]) == [*[len(block) for block in blocks], None]


def test_an_entry_that_does_not_prove_itself_is_dropped(tmp_path: Path) -> None:
    """One number of the index is overwritten while processes use it: a miss, and counted."""
    with ShmBackend(8 * UNIT, directory=str(tmp_path)) as backend:
        store(backend, A, b"a" * UNIT)
        store(backend, B, b"b" * UNIT)
        rows = backend._rows
        rows.offset[rows.find(A)[0]] = rows.offset[rows.find(B)[0]]
        with ShmBackend(8 * UNIT, directory=str(tmp_path)) as other:
            assert other.get(A, aligned) is None
            assert other.get(B, aligned) == b"b" * UNIT
            assert other.lost == 1
            other.check()


# --- threads and a state machine -------------------------------------------------------------


def test_threads_of_two_openings(tmp_path: Path) -> None:
    """Readers, writers and evicting threads: every record read is whole and of its block."""
    stop = time.monotonic() + 1.5
    failures: list[BaseException] = []
    reads = [0]
    opened = [ShmBackend(1 << 20, directory=str(tmp_path)) for _ in range(2)]

    def run(seed: int) -> None:
        mine, dice = opened[seed % 2], random.Random(seed)
        try:
            while time.monotonic() < stop:
                block = block_id(dice.randrange(30))
                if dice.random() < 0.4:
                    data = np.full(dice.choice([500, 60_000, 200_000]), dice.randrange(256), "u1")
                    data[:48] = np.frombuffer(block, np.uint8)
                    try:
                        mine.put(block, memoryview(data))
                    except OutOfRoom as short:
                        mine.evict(short.needed)
                else:
                    found = mine.get(block, aligned)
                    if found is not None:
                        reads[0] += 1
                        assert found[:48] == block
                        rest = np.frombuffer(found, np.uint8)[48:]
                        assert (rest == rest[0]).all(), "two records are mixed"
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert reads[0] > 50
    opened[0].check()
    for one in opened:
        one.close()


class ArenaMachine(RuleBasedStateMachine):
    """Two openings of one arena against a dict; one of them may vanish as if it was killed."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(f"/dev/shm/kvkeep-test-{os.getpid()}-{time.monotonic_ns()}")
        self.directory.mkdir()
        self.open = [self.opened(), self.opened()]
        self.there: dict[bytes, bytes] = {}
        self.leases: list[tuple[int, Lease, bytes]] = []
        self.drafts: list[tuple[int, Lease]] = []
        self.counter = 0

    def opened(self) -> ShmBackend:
        return ShmBackend(16 * UNIT, directory=str(self.directory))

    blocks = st.integers(0, 7).map(block_id)
    who = st.integers(0, 1)

    @rule(who=who, block=blocks, size=st.sampled_from([1, UNIT, UNIT + 1, 3 * UNIT]))
    def put(self, who: int, block: bytes, size: int) -> None:
        self.counter += 1
        record = content(block, self.counter, size)
        try:
            store(self.open[who], block, record)
        except OutOfRoom:
            return
        self.there[block] = record

    @rule(who=who, block=blocks, size=st.integers(1, 2 * UNIT))
    def draft(self, who: int, block: bytes, size: int) -> None:
        with suppress(OutOfRoom):
            self.drafts.append((who, self.open[who].reserve(block, size)))

    @precondition(lambda self: self.drafts)
    @rule(commit=st.booleans())
    def end_draft(self, commit: bool) -> None:
        _, draft = self.drafts.pop(0)
        if commit:
            self.counter += 1
            record = content(draft.block, self.counter, len(draft.record))
            draft.record[:] = record
            draft.commit()
            self.there[draft.block] = record
        draft.release()

    @rule(who=who, block=blocks)
    def lease(self, who: int, block: bytes) -> None:
        lease = self.open[who].lease(block)
        assert (lease is not None) == (block in self.there)
        if lease is not None:
            self.leases.append((who, lease, self.there[block]))

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        _, lease, record = self.leases.pop(0)
        assert lease.view == record
        lease.release()

    @rule(who=who, block=blocks)
    def delete(self, who: int, block: bytes) -> None:
        freed = self.open[who].delete([block])
        assert freed == len(self.there.pop(block, b""))

    @rule(who=who, needed=st.integers(1, 6 * UNIT))
    def evict(self, who: int, needed: int) -> None:
        held = {lease.view.obj and record for _, lease, record in self.leases}
        for block, _ in self.open[who].evict(needed):
            assert self.there.pop(block) not in held

    @rule(who=who)
    def vanish(self, who: int) -> None:
        """Close its descriptors, as the kernel does; another process takes its place."""
        self.open[who]._rows.lock.close()
        self.leases = [one for one in self.leases if one[0] != who]
        self.drafts = [one for one in self.drafts if one[0] != who]
        self.open[who]._warming.stop()
        self.open[who] = self.opened()

    @rule(who=who)
    def die_in_a_change(self, who: int) -> None:
        self.open[who]._rows.words[at.CHANGING] = 1
        self.vanish(who)

    @invariant()
    def agrees(self) -> None:
        for one in self.open:
            found = {item.block: item.size for item in one.list()}
            assert found == {block: len(record) for block, record in self.there.items()}
        for block, record in self.there.items():
            assert self.open[self.counter % 2].get(block, aligned) == record
        for _, lease, record in self.leases:
            assert lease.view == record
        self.open[0].check()
        assert self.open[0].lost == 0

    def teardown(self) -> None:
        for _, lease, _ in self.leases:
            lease.release()
        for _, draft in self.drafts:
            draft.release()
        for one in self.open:
            one.close()
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
