"""A backend in many hands at once: every record that is read is whole."""

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
"""Seconds after which threads that do not end are stuck; far more than they need."""


def together(*jobs: Callable[[], None]) -> None:
    """Run all ``jobs`` at once, each in a thread; raise what the first of them raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below, where the test sees it
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"


class _Crowd:
    """What many threads do to few blocks; who reads verifies."""

    sizes = (8, 4000, 4096, 70_001)

    def __init__(self, backend: Backend, blocks: int) -> None:
        self.backend = backend
        self.blocks = [block_id(number, space=3) for number in range(blocks)]

    def record(self, block: bytes, number: int) -> bytes:
        return content(block, number, self.sizes[number % len(self.sizes)])

    def verified(self, block: bytes) -> int | None:
        """The version that is there, after a look at every byte."""
        found = get(self.backend, block)
        if found is None:
            return None
        number = version(found)
        assert found == self.record(block, number), f"{len(found)} bytes are not one record"
        return number

    def work(self, who: int, steps: int) -> None:
        chance = random.Random(who)  # noqa: S311 - a test, not a secret
        for step in range(steps):
            block = chance.choice(self.blocks)
            what = chance.random()
            if what < 0.4:
                put(self.backend, block, self.record(block, who * steps + step))
            elif what < 0.8:
                self.verified(block)
            elif what < 0.9:
                assert self.backend.delete([block]) in {0, *self.sizes}
            elif what < 0.95:
                self.backend.touch(self.blocks)
                assert set(self.backend.sizes(self.blocks)) <= {None, *self.sizes}
            else:
                listed = sizes_listed(self.backend)
                assert listed.keys() <= set(self.blocks)
                assert set(listed.values()) <= set(self.sizes)


class BackendThreadTests(BackendHooks):
    """Several threads, few blocks."""

    steps = 60
    """How much each of 8 threads does; fewer where one call costs much."""

    def test_what_eight_threads_do_is_never_mixed_up(self, backend: Backend) -> None:
        """Put, get, delete and list at once: every record that is read is whole, and its own."""
        crowd = _Crowd(backend, blocks=6)
        together(*[lambda who=who: crowd.work(who, self.steps) for who in range(8)])
        listed = sizes_listed(backend)
        for block in crowd.blocks:
            assert (crowd.verified(block) is None) == (block not in listed)
        assert backend.delete(crowd.blocks) == sum(listed.values())
        assert sizes_listed(backend) == {}

    def test_who_reads_while_it_is_written_gets_one_whole_record(self, backend: Backend) -> None:
        """The one before or the one after, and never one older than was seen already."""
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

    def test_threads_cannot_pass_the_capacity_together(self, tmp_path: Path) -> None:
        """Whoever comes when it is full is told so; what was taken is all there."""
        backend = self.bounded(tmp_path, 1 << 20)
        kept: list[bytes] = []

        def fill(who: int) -> None:
            for number in range(8):
                block = block_id(number, space=who)
                try:
                    put(backend, block, content(block, 1, 50_000))
                except OutOfRoom:
                    continue
                kept.append(block)

        with backend:
            together(*[lambda who=who: fill(who) for who in range(6)])
            assert sizes_listed(backend) == dict.fromkeys(kept, 50_000)
            assert 1 <= len(kept) <= (1 << 20) // 50_000
            for block in kept:
                assert get(backend, block) == content(block, 1, 50_000)
