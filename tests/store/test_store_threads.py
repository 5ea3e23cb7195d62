"""Eight threads on one small store: nothing wrong, nothing lost for good, nobody waits for ever.

``KVKEEP_FUZZ=long`` runs each for a minute.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from store_kv import GQA, disk, given, numbers, open_store, plain, quiet, room

from kvkeep.core.errors import IllegalStep
from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.store import KVStore

THREADS = 8
SECONDS = 60.0 if os.environ.get("KVKEEP_FUZZ") == "long" else 2.5
TENANTS = ("", "a", "b")


@pytest.fixture(autouse=True)
def _deadlocks_show_where() -> Iterator[None]:
    faulthandler.dump_traceback_later(4 * SECONDS + 120, exit=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many switches in the middle of a step as can be had
    yield
    sys.setswitchinterval(interval)
    faulthandler.cancel_dump_traceback_later()


def prompts() -> list[list[int]]:
    """Prompts that share beginnings, of none to sixteen blocks with and without tails."""
    chance = random.Random(5)
    made: list[list[int]] = [[]]
    for _ in range(40):
        base = chance.choice(made)
        made.append(base[: chance.randrange(len(base) + 1)] + _more(chance))
    return [tokens[:64] for tokens in made]


def _more(chance: random.Random) -> list[int]:
    return [chance.randrange(1000) for _ in range(chance.randrange(1, 30))]


PROMPTS = prompts()
KV = {(at, who): numbers(GQA, tokens, who) for at, tokens in enumerate(PROMPTS) for who in TENANTS}


class Worker(threading.Thread):
    """Uses the store at random until told to stop; keeps what went wrong."""

    def __init__(self, store: KVStore, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.chance = random.Random(seed)
        self.stop = stop
        self.steps = self.got = self.put = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        steps = (
            [self.puts] * 4
            + [self.gets] * 6
            + [self.streams] * 3
            + [self.pins, self.prefetches, self.looks]
        )
        try:
            while not self.stop.is_set():
                at = self.chance.randrange(len(PROMPTS))
                who = self.chance.choice(TENANTS)
                self.chance.choice(steps)(at, who)
                self.steps += 1
                if self.chance.random() < 0.01:
                    self.rarely(who)
        except BaseException as error:  # noqa: BLE001 - the test raises it again
            self.error = error

    def puts(self, at: int, who: str) -> None:
        tokens = PROMPTS[at]
        start = self.chance.randrange(len(tokens) + 1) if self.chance.random() < 0.3 else 0
        kv = given(GQA, KV[at, who][start:])
        done = self.store.put(
            tokens, kv, start, tenant=who, tail=self.chance.random() < 0.5,
            wait=self.chance.random() < 0.05,
        )  # fmt: skip
        assert done.tokens + done.skipped + done.dropped + done.partial == len(tokens) - start
        self.put += done.tokens

    def gets(self, at: int, who: str) -> None:
        tokens = PROMPTS[at]
        start = self.chance.randrange(len(tokens) + 1) if self.chance.random() < 0.3 else 0
        more: dict[str, Any] = {}
        if self.chance.random() < 0.5:
            more["out"] = room(GQA, len(tokens) - start, "tuples")
        if self.chance.random() < 0.3:
            more["deadline"] = self.chance.random() * 0.002
        kv, count = self.store.get(tokens, start, tenant=who, **more)
        if count:
            want = KV[at, who][start : start + count]
            assert np.array_equal(plain(GQA, kv), want), "another's KV"
            self.got += count

    def streams(self, at: int, who: str) -> None:
        tokens = PROMPTS[at]
        start = self.chance.randrange(len(tokens) + 1) if self.chance.random() < 0.3 else 0
        after = self.chance.randrange(1, 8) if self.chance.random() < 0.3 else 0
        ends = [start]

        def take(begin: int, stop: int, kv: Any, source: str) -> bool:
            assert begin == ends[-1]
            assert np.array_equal(plain(GQA, kv), KV[at, who][begin:stop]), "another's KV"
            ends.append(stop)
            return len(ends) - 1 != after

        deadline = self.chance.random() * 0.002 if self.chance.random() < 0.3 else None
        kv, count = self.store.get(tokens, start, tenant=who, sink=take, deadline=deadline)
        assert kv is None
        assert count == ends[-1] - start
        self.got += count

    def pins(self, at: int, who: str) -> None:
        self.store.pin(PROMPTS[at], self.chance.random() / 10, tenant=who)
        if self.chance.random() < 0.3:
            self.store.unpin(PROMPTS[self.chance.randrange(len(PROMPTS))], tenant=who)

    def prefetches(self, at: int, who: str) -> None:
        coming = self.store.prefetch(PROMPTS[at], tenant=who)
        if self.chance.random() < 0.5:
            coming.cancel()
        assert coming.wait(0.01) <= len(PROMPTS[at])

    def looks(self, at: int, who: str) -> None:
        assert self.store.lookup(PROMPTS[at], tenant=who).tokens <= len(PROMPTS[at])
        self.store.stats()

    def rarely(self, who: str) -> None:
        if self.chance.random() < 0.3:
            self.store.clear(tenant=who)
        else:
            self.store.flush(5)


def joined(workers: list[Worker]) -> None:
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a thread is stuck"


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
@pytest.mark.parametrize("quotas", [None, {"a": "16KiB"}])
def test_eight_threads_on_a_small_store(policy: Any, quotas: Any, tmp_path: Path) -> None:
    urls = ("memory://160KiB", disk(tmp_path / "d", size="400KiB"))
    store = open_store(*urls, policy=policy(), quotas=quotas)
    stop = threading.Event()
    workers = [Worker(store, seed, stop) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    time.sleep(SECONDS)
    stop.set()
    joined(workers)
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    assert all(worker.steps for worker in workers)
    assert sum(worker.got for worker in workers) > 0
    stats = store.stats()
    assert stats.hit_tokens == sum(worker.got for worker in workers)
    assert stats.put_tokens == sum(worker.put for worker in workers)
    assert stats.tiers[0].counters["evictions"] > 0, "the store was too large for this test"
    assert all(tier.breaker == "closed" for tier in stats.tiers)
    assert all(tier.counters["damaged"] == 0 for tier in stats.tiers)
    store._tiered._reader.prefetching.wait(20)
    quiet(store)
    store.check()
    assert store._tiered.memory.backend.leased == 0, "a lease was not given back"
    assert not store._tiered._reader._reads
    assert not any(len(tier.states) for tier in store._tiered.tiers)
    before = time.monotonic()
    assert store.close()
    assert time.monotonic() - before < 10
    with open_store(*urls) as again:
        last = Worker(again, 0, stop)
        for at in range(len(PROMPTS)):
            for who in TENANTS:
                last.gets(at, who)
        quiet(again)
        again.check()


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_a_store_is_closed_under_those_who_use_it(policy: Any, tmp_path: Path) -> None:
    """They are told, by one error, or had their answer before; and what was kept is right."""
    urls = ("memory://160KiB", disk(tmp_path / "d", size="400KiB"))
    for again in range(8):
        store = open_store(*urls, policy=policy())
        stop = threading.Event()
        workers = [Worker(store, 100 * again + seed, stop) for seed in range(THREADS)]
        for worker in workers:
            worker.start()
        time.sleep(0.05)
        store.close()
        time.sleep(0.01)
        stop.set()
        joined(workers)
        for worker in workers:
            if worker.error is not None and not isinstance(worker.error, IllegalStep):
                raise worker.error


def test_many_who_want_the_same_read_it_once(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    tokens = list(range(64))
    data = numbers(GQA, tokens)
    with open_store("memory://1MiB", url) as store:
        store.put(tokens, given(GQA, data))
    with open_store("memory://1MiB", url) as store:
        ready = threading.Barrier(THREADS)
        wrong: list[int] = []

        def read() -> None:
            ready.wait()
            kv, count = store.get(tokens)
            if count != 64 or not np.array_equal(plain(GQA, kv), data):
                wrong.append(count)

        threads = [threading.Thread(target=read) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert store.stats().tiers[1].counters["hits"] == 16
        store.check()
