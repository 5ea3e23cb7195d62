"""Several drafts and leases at once, of memory of a process and of the node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue, OutOfRoom
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT = ALIGNMENT
BLOCKS = [block_id(number) for number in range(20)]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")


@pytest.fixture(params=["memory", pytest.param("shm", marks=LINUX)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryBackend | ShmBackend]:
    """Sixteen units; everything must add up at the end."""
    made: MemoryBackend | ShmBackend
    if request.param == "memory":
        made = MemoryBackend(16 * UNIT)
    else:
        made = ShmBackend(16 * UNIT, directory=str(tmp_path))
    with made:
        yield made
        if not made._closed:
            made.check()


def fill(backend: MemoryBackend | ShmBackend, blocks: list[bytes]) -> None:
    drafts = backend.reserve_all(blocks, [48] * len(blocks))
    for draft in drafts:
        draft.view[:] = draft.block
    backend.release_all(backend.commit_all(drafts))


def test_a_run_is_written_and_read(backend: MemoryBackend | ShmBackend) -> None:
    fill(backend, BLOCKS[:5])
    leases = backend.lease_all([*BLOCKS[:5], BLOCKS[6], BLOCKS[4]])
    assert [bytes(lease.view) for lease in leases] == BLOCKS[:5], "up to the first missing one"
    backend.delete(BLOCKS[:5])
    with pytest.raises(OutOfRoom):
        backend.reserve(BLOCKS[7], 12 * UNIT)
    assert [bytes(lease.view) for lease in leases] == BLOCKS[:5]
    backend.release_all(leases)
    backend.release_all(leases)  # a second time does nothing
    assert backend.used() == 0
    assert backend.lease_all(BLOCKS) == []
    assert backend.lease_all([]) == []


def test_leading_blocks_find_room(backend: MemoryBackend | ShmBackend) -> None:
    drafts = backend.reserve_all(BLOCKS, [UNIT] * 20)
    assert [draft.block for draft in drafts] == BLOCKS[:16]
    assert not any(backend.contains(block) for block in BLOCKS), "drafts are invisible"
    with pytest.raises(OutOfRoom) as short:
        backend.reserve_all(BLOCKS[16:], [2 * UNIT] * 4)
    assert short.value.needed == 2 * UNIT
    for draft in drafts[8:]:
        draft.discard()
    backend.release_all(backend.commit_all(drafts[:8]))
    assert backend.sizes(BLOCKS) == [UNIT] * 8 + [None] * 12
    assert backend.used() == 8 * UNIT


def test_the_same_block_twice_in_a_run(backend: MemoryBackend | ShmBackend) -> None:
    """The later draft replaces the earlier one; leases of both are of what was committed."""
    drafts = backend.reserve_all([BLOCKS[0]] * 2, [1, 2])
    drafts[0].view[:], drafts[1].view[:] = b"a", b"bb"
    leases = backend.commit_all(drafts)
    assert [bytes(lease.view) for lease in leases] == [b"a", b"bb"]
    assert backend.sizes(BLOCKS[:1]) == [2]
    again = backend.lease_all([BLOCKS[0]] * 3)
    assert [bytes(lease.view) for lease in again] == [b"bb"] * 3
    backend.release_all([*leases, *again])
    assert backend.used() == UNIT


def test_mistakes_and_the_end(backend: MemoryBackend | ShmBackend) -> None:
    drafts = backend.reserve_all(BLOCKS[:3], [1] * 3)
    drafts[1].discard()
    with pytest.raises(IllegalStep):
        backend.commit_all(drafts)
    for draft in drafts:
        draft.discard()
    assert backend.used() == 0, "nothing was committed"
    drafts = backend.reserve_all(BLOCKS[4:7], [1] * 3)
    if isinstance(backend, ShmBackend):
        with pytest.raises(InvalidValue, match="a block id has 48 bytes, got 5"):
            backend.reserve_all([BLOCKS[8], b"short"], [1, 1])
    backend.release_all(backend.lease_all(BLOCKS))
    backend.delete(BLOCKS)
    backend.close()
    with pytest.raises(BackendFailed, match="closed"):
        backend.commit_all(drafts)
    assert not any(draft.pending for draft in drafts)
