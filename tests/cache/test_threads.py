"""Many threads on one small cache: nothing is lost, nothing is held, nobody waits forever."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import NotCached, OutOfPages, PagedCache
from kvkeep.core.events import Closed, Evicted, Opened, Stored
from kvkeep.core.prefix import INDICES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.events import Event

THREADS = 8
SECONDS = 1.0


@pytest.fixture(autouse=True)
def _deadlocks_show_where() -> Iterator[None]:
    faulthandler.dump_traceback_later(240, exit=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many switches in the middle of a step as can be had
    yield
    sys.setswitchinterval(interval)
    faulthandler.cancel_dump_traceback_later()


class Worker(threading.Thread):
    """Runs requests of its own until told to stop; keeps what went wrong."""

    def __init__(self, cache: PagedCache, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.stop = stop
        self.finished = self.refused = 0
        self.opened = self.hits = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    self.request()
                    self.finished += 1
                except OutOfPages:
                    self.refused += 1
        except BaseException as error:  # noqa: BLE001 - the test raises it again
            self.error = error

    def request(self) -> None:
        rng, cache = self.rng, self.cache
        prompt = [*range(int(rng.integers(0, 24))), *rng.integers(0, 3, rng.integers(1, 9))]
        space = "ab"[int(rng.integers(2))]
        with cache.open(prompt, space, priority=int(rng.integers(3))) as sequence:
            self.opened += len(prompt)
            self.hits += sequence.num_cached
            assert sequence.num_cached < len(prompt)
            sequence.copies()
            sequence.publish()
            for token in rng.integers(0, 3, rng.integers(0, 6)).tolist():
                sequence.append(token)
            if rng.random() < 0.3:
                with sequence.fork() as fork:
                    fork.append([1, 2, 3])
                    fork.copies()
                    fork.publish()
            if rng.random() < 0.3:
                sequence.truncate(int(rng.integers(sequence.num_tokens + 1)))
            sequence.copies()
            sequence.publish()
            if rng.random() < 0.2:
                sequence.close(keep=False)
        self.look(prompt, space)

    def look(self, prompt: list[int], space: str) -> None:
        rng, cache = self.rng, self.cache
        chance = rng.random()
        if chance < 0.2:
            assert cache.match(prompt, space).num_tokens <= len(prompt)
        elif chance < 0.3:
            stats = cache.stats()
            assert stats.pages_used + stats.pages_free == stats.pages_total
            assert stats.pages_evictable + stats.pages_protected == stats.pages_cached
        elif chance < 0.4:
            cache.check()  # also in the middle of what others do
        elif chance < 0.5:
            cache.evict(int(rng.integers(4)))
        elif chance < 0.55:
            cache.clear(space)
        elif chance < 0.7:
            try:
                pin = cache.pin(prompt, space, ttl=float(rng.random()) / 100 + 1e-9)
                cache.unpin(pin)
            except NotCached:
                pass
        elif chance < 0.8:
            assert all(len(run.pages) for run in cache.runs(space))
            repr(cache)
            cache.namespaces()


@pytest.mark.parametrize("eviction", ["lru", "priority", "returns"])
@pytest.mark.parametrize("prefix", INDICES)
def test_many_threads(prefix: str, eviction: str) -> None:
    cache = PagedCache(24, 4, prefix=prefix, eviction=eviction)
    told: dict[type, int] = {Opened: 0, Closed: 0}
    stored = 0

    def count(event: Event) -> None:  # runs under the lock: needs none of its own
        nonlocal stored
        if type(event) in told:
            told[type(event)] += 1
        elif isinstance(event, Stored):
            stored += len(event.pages)
        elif isinstance(event, Evicted):
            stored -= len(event.pages)

    cache.subscribe(count)
    stop = threading.Event()
    workers = [Worker(cache, seed, stop) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    began = time.monotonic()
    while time.monotonic() - began < SECONDS or not all(
        worker.finished >= 10 or not worker.is_alive() for worker in workers
    ):
        time.sleep(0.05)  # they race meanwhile
    stop.set()
    for worker in workers:
        worker.join(timeout=120)
        assert not worker.is_alive()
        if worker.error is not None:
            raise worker.error
    cache.check()
    stats = cache.stats()
    assert stats.sequences == 0
    assert stats.pages_used == stats.pages_cached == stats.pages_evictable == stored
    assert stats.opened + stats.forked == stats.closed == told[Opened] == told[Closed]
    assert stats.prompt_tokens == sum(worker.opened for worker in workers)
    assert stats.hit_tokens == sum(worker.hits for worker in workers)
    assert stats.hit_tokens > 0
    assert stats.evicted_pages > 0
    assert stats.hook_errors == 0
    cache.clear()
    stats = cache.stats()
    assert (stats.pages_free, stats.references, stats.namespaces) == (24, 0, 0)
    cache.check()


@pytest.mark.parametrize("prefix", INDICES)
def test_threads_that_compute_the_same_prompt_keep_one_copy(prefix: str) -> None:
    cache = PagedCache(THREADS * 8, 4, prefix=prefix)
    barrier = threading.Barrier(THREADS)
    tables: list[Any] = []

    def compute() -> None:
        with cache.open(range(31)) as sequence:
            barrier.wait(timeout=60)  # all are open before anything is published
            sequence.publish()
            tables.append(sequence.pages.tolist()[:7])
            barrier.wait(timeout=60)

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert len(tables) == THREADS
    assert all(table == tables[0] for table in tables)
    stats = cache.stats()
    assert stats.pages_used == stats.pages_cached == 7
    assert stats.duplicate_pages == 7 * (THREADS - 1)
    cache.check()
