"""Stores whose shared memory fails for a while: a neighbour is stopped in a change."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from test_shared_memory import TAKES, keys_of, opened, put, read

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.blocks import BlockStore
from kvkeep.store.tiers import Exclusive
from kvkeep.store.tiers.shared_memory import SharedMemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")


def front_of(store: BlockStore) -> SharedMemoryTier:
    memory = store._tiered.memory
    assert isinstance(memory, SharedMemoryTier)
    memory.backend._rows.lock.timeout = 0.05
    return memory


class Neighbour:
    """Another process with the arena, stopped in the middle of a change."""

    def __init__(self, directory: Path) -> None:
        self._pid = os.fork()
        if not self._pid:
            other = ShmBackend(None, directory=str(directory))
            other._rows.__enter__()
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(self._pid, os.WUNTRACED)

    def end(self) -> None:
        """End it; others repair what it left."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Callable[[], Neighbour]]:
    """Start and stop a neighbour; it ends with the test."""
    there: list[Neighbour] = []

    def begin() -> Neighbour:
        there.append(Neighbour(tmp_path))
        return there[-1]

    yield begin
    for one in there:
        one.end()


def test_no_call_raises_but_the_one_that_cannot_be_counted(
    tmp_path: Path, stop: Callable[[], Neighbour]
) -> None:
    """Lookups need no lock, also of unknown blocks; a change fails, and is counted."""
    keys, others = keys_of(1), keys_of(2)
    with opened(tmp_path) as store:
        put(store, keys)
        memory = front_of(store)
        tiered, order = store._tiered, memory.catalogue
        blocks, unknown = ([store._space + key for key in some] for some in (keys, others))
        neighbour = stop()
        lookups: list[Callable[[], object]] = [
            lambda: store.knows(others),
            lambda: store.unknown(others),
            lambda: store.lookup(others),
            lambda: read(store, others),
            lambda: tiered.used(unknown),
            lambda: tiered.pins.pinned(unknown),
            lambda: tiered.losses_of(unknown),
            lambda: order.hold(unknown, []),
            lambda: tiered.locate_each(unknown),
        ]
        for call in lookups:
            call()
        assert store.stats()[0].counters["errors"] == 0
        changes: list[Callable[[], object]] = [
            lambda: put(store, others),
            lambda: read(store, keys),
            lambda: tiered.pins.pin(blocks, 60.0),
            lambda: tiered.pins.unpin(unknown),
            lambda: order.hold(blocks, []),
        ]
        for call in changes:
            before = store.stats()[0].counters["errors"]
            call()
            assert store.stats()[0].counters["errors"] > before
        with pytest.raises(BackendFailed, match="a process that is stopped"):
            tiered.set_quota(blocks[0][:16], 1 << 20)  # it would not hold, and nobody would know
        neighbour.end()
        assert read(store, keys) == 8
        assert put(store, others) == 8
        store.check()


@pytest.mark.parametrize("what", ["remove", "clear"])
def test_a_removal_that_fails_says_so_and_is_made_up_for(
    tmp_path: Path, stop: Callable[[], Neighbour], what: str
) -> None:
    """Until then the blocks are hidden: their owner may write them anew with other bytes."""
    keys = keys_of(1)
    with opened(tmp_path) as store, opened(tmp_path) as other:
        put(store, keys)
        front_of(store)
        neighbour = stop()
        removed = store.remove(keys[:4]) if what == "remove" else store.clear()
        assert removed.failed == ("shm",)
        assert not removed.complete
        assert store.knows(keys) == store.lookup(keys) == read(store, keys) == 0
        neighbour.end()
        assert store.lookup(keys) == 0
        assert read(store, keys) == 0
        assert other.lookup(keys) == 0, "they are deleted as soon as the lock can be had"
        assert put(store, keys[:4]) == 4
        assert read(store, keys) >= 4
        store.check()


def test_a_demotion_that_ends_in_vain_is_ended_later(
    tmp_path: Path, stop: Callable[[], Neighbour]
) -> None:
    """Else the block could not be evicted as long as this process lives."""
    keys = keys_of(1)
    with opened(tmp_path) as store:
        put(store, keys)
        memory = front_of(store)
        (block,) = memory.leave(1)
        neighbour = stop()
        memory.left(block)
        neighbour.end()
        assert memory.reserve(block, 16 * TAKES - 4096) is not None
        assert memory.leaving_bytes == 0
        assert block not in memory
        assert memory.counters.as_dict()["evictions"] == 8
        store.check()


def test_a_block_that_leaves_twice(tmp_path: Path) -> None:
    """It is removed and stored anew while its old record is being demoted, and has to go, too."""
    keys = keys_of(1, 1)
    with opened(tmp_path) as store:
        put(store, keys)
        memory = front_of(store)
        (block,) = memory.leave(1)
        memory.remove([block])
        put(store, keys)
        assert memory.leave(1) == [block]
        memory.left(block)
        assert block in memory, "the second demotion is still under way"
        memory.left(block)
        assert block not in memory
        assert memory.backend.used() == 0, "both records are free"


def test_demotion_beside_stops(tmp_path: Path, stop: Callable[[], Neighbour]) -> None:
    """Above a directory: blocks are there or counted, and nothing hangs."""
    urls = [f"shm://{16 * TAKES}?dir={tmp_path}", f"file://{tmp_path}/disk?size=64MiB"]
    with BlockStore("tenant", tiers=urls, policy=Exclusive()) as store:
        memory = front_of(store)
        for prompt in range(1, 5):
            put(store, keys_of(prompt))
        neighbour = stop()
        for prompt in range(1, 9):
            put(store, keys_of(prompt))
            read(store, keys_of(prompt))
        assert not store.flush(10.0), "memory cannot be read, so nothing more can be written"
        neighbour.end()
        assert put(store, keys_of(9)) == 8
        assert store.flush(20.0)
        assert read(store, keys_of(9)) == 8
        assert store.flush(20.0)  # to read makes room, too
        until = time.monotonic() + 10.0
        while memory.leaving_bytes and time.monotonic() < until:
            time.sleep(0.01)  # a write counts as over before its callbacks have run
        assert memory.leaving_bytes == 0
        counted = store.stats()[0].counters
        assert counted["writes"] == counted["evictions"] + len(memory.backend)
        store.check()
