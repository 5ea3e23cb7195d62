"""A backend used by many threads: every record that is read is whole."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom
from kvkeep.testing.backend_hooks import (
    BackendHooks,
    block_id,
    content,
    get,
    put,
    sizes_listed,
    version,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvkeep.store.backends import Backend

__all__ = ["BackendThreadTests", "together"]

_PATIENCE = 120.0
"""Seconds after which threads count as stuck; far more than they need."""


def together(*jobs: Callable[[], None]) -> None:
    """Run all ``jobs`` at the same time, one thread each; raise the first exception of them."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), "threads are stuck"


class _Crowd:
    """Random calls of many threads on few blocks; each read verifies the record."""

    sizes = (8, 4000, 4096, 70_001)

    def __init__(self, backend: Backend, blocks: int) -> None:
        self.backend = backend
        self.blocks = [block_id(number, space=3) for number in range(blocks)]

    def record(self, block: bytes, number: int) -> bytes:
        return content(block, number, self.sizes[number % len(self.sizes)])

    def verified(self, block: bytes) -> int | None:
        """Return the stored version, None if missing; assert that every byte is right."""
        found = get(self.backend, block)
        if found is None:
            return None
        number = version(found)
        assert found == self.record(block, number), f"{len(found)} bytes are not one record"
        return number

    def work(self, thread: int, steps: int) -> None:
        chance = random.Random(thread)  # noqa: S311 - a test, not a secret
        for step in range(steps):
            block = chance.choice(self.blocks)
            roll = chance.random()
            if roll < 0.4:
                put(self.backend, block, self.record(block, thread * steps + step))
            elif roll < 0.8:
                self.verified(block)
            elif roll < 0.9:
                assert self.backend.delete([block]) in {0, *self.sizes}
            elif roll < 0.95:
                self.backend.touch(self.blocks)
                assert set(self.backend.sizes(self.blocks)) <= {None, *self.sizes}
            else:
                listed = sizes_listed(self.backend)
                assert listed.keys() <= set(self.blocks)
                assert set(listed.values()) <= set(self.sizes)


class BackendThreadTests(BackendHooks):
    """Tests with several threads."""

    steps = 60
    """Calls of each of 8 threads; use fewer if calls are expensive."""

    def test_eight_threads_never_mix_up_records(self, backend: Backend) -> None:
        """Concurrent puts, gets, deletes and listings: every record read is whole and right."""
        crowd = _Crowd(backend, blocks=6)
        together(*[lambda n=n: crowd.work(n, self.steps) for n in range(8)])
        listed = sizes_listed(backend)
        for block in crowd.blocks:
            assert (crowd.verified(block) is None) == (block not in listed)
        assert backend.delete(crowd.blocks) == sum(listed.values())
        assert sizes_listed(backend) == {}

    def test_readers_of_a_block_being_written_get_one_whole_record(self, backend: Backend) -> None:
        """A reader gets the older or the newer record, never an older one than it read before."""
        crowd, block, done = _Crowd(backend, blocks=1), block_id(0, space=3), threading.Event()
        put(backend, block, crowd.record(block, 0))

        def write() -> None:
            try:
                for number in range(1, self.steps):
                    put(backend, block, crowd.record(block, number))
            finally:
                done.set()

        def read() -> None:
            seen = 0
            while not done.is_set():
                found = crowd.verified(block)
                assert found is None or found >= seen, f"version {found} after {seen}"
                seen = found or seen

        together(write, read, read, read)
        assert crowd.verified(block) == self.steps - 1

    def test_threads_cannot_exceed_the_capacity_together(self, tmp_path: Path) -> None:
        """Puts beyond the capacity raise `OutOfRoom`; all accepted records are there."""
        backend = self.bounded(tmp_path, 1 << 20)
        kept: list[bytes] = []

        def fill(thread: int) -> None:
            for number in range(8):
                block = block_id(number, space=thread)
                try:
                    put(backend, block, content(block, 1, 50_000))
                except OutOfRoom:
                    continue
                kept.append(block)

        with backend:
            together(*[lambda n=n: fill(n) for n in range(6)])
            assert sizes_listed(backend) == dict.fromkeys(kept, 50_000)
            assert 1 <= len(kept) <= (1 << 20) // 50_000
            for block in kept:
                assert get(backend, block) == content(block, 1, 50_000)
