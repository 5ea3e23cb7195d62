"""The memory backend: the contract, drafts and leases."""

from __future__ import annotations

import random
import resource
import threading
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
from kvkeep.store.backends.memory import Lease, MemoryBackend
from kvkeep.testing.backend_hooks import block_id, content, version
from kvkeep.testing.backend_suite import BackendTests
from kvkeep.testing.backend_threads import together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT = ALIGNMENT
A, B, C, D = (block_id(number) for number in range(4))


class TestMemoryBackend(BackendTests):
    def make_backend(self, tmp_path: Path) -> MemoryBackend:
        return MemoryBackend(64 << 20)

    def make_bounded(self, tmp_path: Path, capacity: int) -> MemoryBackend:
        return MemoryBackend(capacity)


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    """Eight units; everything must add up at the end."""
    with MemoryBackend(8 * UNIT) as backend:
        yield backend
        backend.check()


def store(backend: MemoryBackend, block: bytes, record: bytes) -> None:
    with backend.reserve(block, len(record)) as draft:
        draft.record[:] = record
        draft.commit()


# --- URLs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["memory://64MiB", "memory://?size=64MiB", "memory:///?size=64MiB"]
)
def test_a_url_names_the_size(text: str) -> None:
    url = TierURL(text)
    with MemoryBackend.from_url(url) as backend:
        url.finish()
        assert backend.capacity == 64 << 20
        assert backend.describe() == "memory://64MiB"


@pytest.mark.parametrize(
    "text",
    ["memory://", "memory://64MiB?size=64MiB", "memory:///64MiB", "memory://much", "memory://1KiB"],
)
def test_a_url_gives_the_size_once(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"memory://|amount|size"):
        MemoryBackend.from_url(TierURL(text))


@pytest.mark.parametrize(("touch", "waits"), [("yes", False), ("no", True)])
def test_touched_memory_is_resident(touch: str, waits: bool) -> None:
    url = TierURL(f"memory://128MiB?touch={touch}")
    with MemoryBackend.from_url(url) as backend:
        url.finish()
        with backend.reserve(block_id(1), 128 << 20) as draft:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            np.frombuffer(draft.record, np.uint8)[::ALIGNMENT] = 1
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert (faults >= 32) == waits, f"{faults} faults; in huge pages it is 64"


# --- drafts ----------------------------------------------------------------------------------


def test_a_draft_is_visible_after_its_commit(backend: MemoryBackend) -> None:
    store(backend, A, b"old")
    with backend.reserve(A, 5000) as draft:
        assert draft.record.nbytes == 5000
        draft.record[:] = b"n" * 5000
        assert backend.sizes([A]) == [3]
        assert backend.used() == 3 * UNIT
        draft.commit()
        assert backend.sizes([A]) == [5000]
    assert backend.used() == 2 * UNIT
    assert len(backend) == 1


def test_an_exception_discards_the_draft(backend: MemoryBackend) -> None:
    store(backend, A, b"old")
    draft = backend.reserve(A, 5000)

    def write() -> None:
        with draft:
            draft.record[:] = b"n" * 5001  # one too many

    with pytest.raises(ValueError, match="different structures"):
        write()
    assert backend.used() == UNIT
    assert backend.sizes([A]) == [3]
    with pytest.raises(IllegalStep):
        draft.commit()


def test_a_draft_ends_once(backend: MemoryBackend) -> None:
    draft = backend.reserve(A, 1)
    draft.commit()
    draft.release()
    with pytest.raises(IllegalStep):
        draft.commit()
    assert backend.contains(A)
    other = backend.reserve(B, 1)
    other.release()
    other.release()
    assert not backend.contains(B)


def test_two_drafts_of_one_block(backend: MemoryBackend) -> None:
    first, second = backend.reserve(A, 3), backend.reserve(A, 3)
    first.record[:], second.record[:] = b"one", b"two"
    second.commit()
    first.commit()
    lease = backend.lease(A)
    assert lease is not None
    with lease:
        assert lease.view == b"one"


def test_a_draft_is_a_lease_after_its_commit(backend: MemoryBackend) -> None:
    lease = backend.reserve(A, 3)
    lease.record[:] = b"new"
    lease.commit()
    assert backend.leased == UNIT
    backend.delete([A])
    assert lease.view == b"new"
    assert backend.used() == UNIT
    lease.release()
    assert backend.used() == 0


def test_an_empty_record(backend: MemoryBackend) -> None:
    backend.put(A, aligned(0))
    assert backend.sizes([A]) == [0]
    found = backend.get(A, aligned)
    assert found is not None
    assert found.nbytes == 0


# --- room ------------------------------------------------------------------------------------


def needed(backend: MemoryBackend, size: int) -> int:
    used = backend.used()
    with pytest.raises(OutOfRoom) as caught:
        backend.reserve(D, size)
    assert backend.used() == used
    return caught.value.needed


def test_out_of_room_says_what_to_free(backend: MemoryBackend) -> None:
    assert needed(backend, 8 * UNIT + 1) == 9 * UNIT  # more than there will ever be
    blocks = [block_id(number) for number in range(10, 17)]
    for block in blocks:
        store(backend, block, b"x" * UNIT)
    assert needed(backend, 3 * UNIT) == 2 * UNIT
    backend.delete(blocks[::2])
    assert backend.arena.free_bytes == 5 * UNIT
    assert backend.arena.largest == 2 * UNIT
    assert needed(backend, 3 * UNIT) == 3 * UNIT  # enough is free, in pieces
    backend.delete(blocks[1:2])
    backend.reserve(D, 3 * UNIT).release()


def test_freeing_the_needed_bytes_makes_room() -> None:
    """With records of many sizes, repeated eviction ends, and no memory is lost."""
    chance = random.Random(3)
    with MemoryBackend(64 * UNIT) as backend:
        for number in range(1500):
            size = chance.randrange(1, 20 * UNIT)
            while True:
                try:
                    draft = backend.reserve(block_id(number), size)
                except OutOfRoom as error:
                    missing = error.needed
                    for one in list(backend.list()):
                        if missing <= 0:
                            break
                        missing -= backend.delete([one.block])
                    continue
                break
            backend.commit_all([draft], release=True)
            assert backend.used() <= 64 * UNIT
        backend.check()


def test_room_for_one_size_is_never_fragmented(backend: MemoryBackend) -> None:
    chance = random.Random(4)
    for number in range(500):
        store(backend, block_id(number), b"x" * (2 * UNIT))
        listed = [one.block for one in backend.list()]
        if len(listed) == 4:
            backend.delete([chance.choice(listed)])
    assert len(backend) == 3


# --- leases ----------------------------------------------------------------------------------


def test_a_lease_reads_in_place(backend: MemoryBackend) -> None:
    store(backend, A, b"record")
    lease = backend.lease(A)
    assert lease is not None
    with lease:
        assert lease.view.readonly
        assert lease.view == b"record"
    assert backend.leased == 0
    assert backend.lease(B) is None


@pytest.mark.parametrize("how", ["delete", "replace", "quarantine", "close"])
def test_leased_bytes_stay(how: str) -> None:
    backend = MemoryBackend(8 * UNIT)
    store(backend, A, b"a" * 5000)
    leases = [backend.lease(A) for _ in range(3)]
    if how == "delete":
        assert backend.delete([A]) == 5000
    elif how == "replace":
        store(backend, A, b"b" * 5000)
    elif how == "quarantine":
        backend.quarantine(A, "a test says so")
    else:
        backend.close()
    if how != "close":
        for block in (C, D):  # all other room is written over
            store(backend, block, b"x" * (2 * UNIT))
    for lease in leases:
        backend.check()
        assert backend.leased == 2 * UNIT
        assert lease is not None
        assert lease.view == b"a" * 5000
        lease.release()
        lease.release()
    assert backend.leased == 0
    backend.delete([A, C, D])
    assert backend.used() == 0
    backend.check()
    backend.close()


def test_leased_memory_is_not_reused(backend: MemoryBackend) -> None:
    store(backend, A, b"a" * (5 * UNIT))
    lease = backend.lease(A)
    assert lease is not None
    with lease:
        backend.delete([A])
        assert needed(backend, 4 * UNIT) == UNIT
    backend.reserve(B, 8 * UNIT).release()


def test_a_closed_backend_does_nothing() -> None:
    backend = MemoryBackend(8 * UNIT)
    store(backend, A, b"a")
    draft = backend.reserve(B, 1)
    backend.close()
    backend.close()
    draft.record[:] = b"b"  # its thread does not know yet
    with pytest.raises(BackendFailed, match="closed"):
        draft.commit()
    with pytest.raises(BackendFailed, match="closed"):
        backend.get(A, aligned)
    with pytest.raises(BackendFailed, match="closed"):
        backend.put(A, aligned(1))
    assert backend.sizes([A]) == [None]
    assert backend.delete([A]) == 0
    assert backend.used() == 0
    backend.check()


def test_touch_is_listed() -> None:
    with MemoryBackend(8 * UNIT) as backend:
        store(backend, A, b"a")
        (before,) = backend.list()
        backend.touch([A, B])
        (after,) = backend.list()
        assert after.used >= before.used
        assert len(backend) == 1
        backend.touch([A, B], [after.used + 5, after.used + 6])
        backend.touch([A], [after.used + 4])
        assert next(backend.list()).used == after.used + 5, "a later use stays"


# --- many at once ----------------------------------------------------------------------------


def test_eight_threads_with_drafts_and_leases() -> None:
    """Each record names its block and version; leases are checked twice."""
    backend = MemoryBackend(14 * UNIT)
    blocks = [block_id(number) for number in range(6)]
    sizes = (8, 4096, 5000, 3 * UNIT, 6 * UNIT)
    stored, checked, refused = [0] * 8, [0] * 8, [0] * 8

    def look(lease: Lease, block: bytes) -> int:
        record = bytes(lease.view)
        number = version(record)
        assert record == content(block, number, sizes[number % len(sizes)])
        return number

    def work(who: int) -> None:
        chance = random.Random(who)
        for step in range(300):
            block, what = chance.choice(blocks), chance.random()
            if what < 0.4:
                number = who * 1000 + step
                record = content(block, number, sizes[number % len(sizes)])
                try:
                    with backend.reserve(block, len(record)) as draft:
                        draft.record[:] = record
                        if chance.random() < 0.8:
                            draft.commit()
                            assert look(draft, block) == number
                            stored[who] += 1
                except OutOfRoom:
                    refused[who] += 1
                    backend.delete([chance.choice(blocks)])
            elif what < 0.85:
                lease = backend.lease(block)
                if lease is not None:
                    with lease:
                        number = look(lease, block)
                        assert look(lease, block) == number
                    checked[who] += 1
            elif what < 0.95:
                backend.delete([block])
            else:
                backend.check()

    together(*[lambda who=who: work(who) for who in range(8)])  # type: ignore[misc]
    assert all(stored)
    assert all(checked)
    assert sum(refused)
    assert backend.leased == 0
    backend.check()
    backend.delete(blocks)
    assert backend.used() == 0


def test_a_block_is_never_missing_while_it_is_replaced(backend: MemoryBackend) -> None:
    store(backend, A, b"0" * 8)
    done = threading.Event()

    def write() -> None:
        try:
            for _ in range(2000):
                store(backend, A, b"1" * 8)
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            assert backend.contains(A)
            assert backend.sizes([A]) == [8]

    together(write, read)


class MemoryMachine(RuleBasedStateMachine):
    """Drafts and leases of any lifetime, compared with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = MemoryBackend(24 * UNIT)
        self.model: dict[bytes, bytes] = {}
        self.drafts: list[tuple[Lease, bytes, bytes]] = []
        self.leases: list[tuple[Lease, bytes]] = []
        self.number = 0

    @rule(
        block=st.sampled_from([A, B, C, D]),
        size=st.sampled_from([1, 4096, 4097, 3 * UNIT, 7 * UNIT, 11 * UNIT]),
    )
    def reserve(self, block: bytes, size: int) -> None:
        self.number += 1
        record = content(block, self.number, size)
        free = self.backend.arena.free_bytes
        try:
            draft = self.backend.reserve(block, size)
        except OutOfRoom as error:
            taken = -(-size // UNIT) * UNIT
            expected = taken - free if free < taken else taken
            assert error.needed == expected  # noqa: PT017 - mostly there is room
            return
        draft.record[:] = record
        self.drafts.append((draft, block, record))

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), lease=st.booleans())
    def commit(self, data: st.DataObject, lease: bool) -> None:
        draft, block, record = self.taken(data, self.drafts)
        self.backend.commit_all([draft], release=not lease)
        self.model[block] = record
        if lease:
            self.leases.append((draft, record))

    @precondition(lambda self: self.drafts)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.taken(data, self.drafts)[0].release()

    @rule(block=st.sampled_from([A, B, C, D]))
    def lease(self, block: bytes) -> None:
        lease = self.backend.lease(block)
        assert (lease is None) == (block not in self.model)
        if lease is not None:
            self.leases.append((lease, self.model[block]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, record = self.taken(data, self.leases)
        assert lease.view == record
        lease.release()

    @rule(blocks=st.lists(st.sampled_from([A, B, C, D]), max_size=3))
    def delete(self, blocks: list[bytes]) -> None:
        gone = [
            len(self.model.pop(block)) for block in dict.fromkeys(blocks) if block in self.model
        ]
        assert self.backend.delete(blocks) == sum(gone)

    @rule(block=st.sampled_from([A, B, C, D]))
    def get(self, block: bytes) -> None:
        found = self.backend.get(block, aligned)
        assert (None if found is None else bytes(found)) == self.model.get(block)

    @invariant()
    def agree(self) -> None:
        self.backend.check()
        assert {one.block: one.size for one in self.backend.list()} == {
            block: len(record) for block, record in self.model.items()
        }
        for lease, record in self.leases:
            assert lease.view == record
        for draft, _, record in self.drafts:
            assert draft.record == record
        assert len(self.backend) == len(self.model)

    def taken(self, data: st.DataObject, things: list[Any]) -> Any:
        return things.pop(data.draw(st.integers(0, len(things) - 1)))

    def teardown(self) -> None:
        for draft, _, _ in self.drafts:
            draft.release()
        for lease, _ in self.leases:
            lease.release()
        self.backend.delete([A, B, C, D])
        assert self.backend.used() == 0
        self.backend.check()
        self.backend.close()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
