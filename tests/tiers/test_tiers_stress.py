"""Eight threads on one small store, over places that break and mend: no wrong byte, no leak."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tier_bench import PAGE, RAW, Bench, content, name, settle, threads_of, until

from faults import FaultyBackend
from kvkeep.core.errors import BackendFailed, IllegalStep
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, Inclusive, MemorySpec
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.tiers import Tier, TieredStore, TieringPolicy

LONG = os.environ.get("KVKEEP_FUZZ") == "long"
SECONDS = 10.0 if LONG else 1.8
SEED = int(os.environ.get("KVKEEP_SEED") or (time.time_ns() % 10**6 if LONG else 7))
THREADS = 8
BLOCKS = 150
SPACES = 3
TIMEOUT = 0.15
"""Seconds: of the places below, so that many calls are given up."""


class Interrupt(BaseException):
    """What a caller's own code raises in the middle."""


def size_of(block: bytes) -> int:
    """Raw bytes of a block: one page or two, so that room comes in pieces."""
    return RAW if block[-1] % 5 else RAW + PAGE


@dataclass(frozen=True)
class Setting:
    """One store: what moves, where to, and what limits it."""

    policy: Callable[[], TieringPolicy]
    places: tuple[int | str | None, ...]
    """Blocks of a disk, None: without a budget; text: blocks of a memory."""
    codec: str = "raw"
    quota: int | None = None
    ttl: float | None = None
    evicts: str = "lru"


SETTINGS = {
    "inclusive, two disks": Setting(Inclusive, (60, None), quota=12),
    "exclusive, two disks": Setting(Exclusive, (40, 90), "lossless", ttl=0.4),
    "inclusive, memory and a disk": Setting(
        lambda: Inclusive(admit_after=2), ("40", 90), quota=9, ttl=0.3, evicts="2q"
    ),
    "exclusive, memory and a disk": Setting(Exclusive, ("30", 60), evicts="returns"),
    "exclusive, a memory": Setting(lambda: Exclusive(admit_after=2), ("20",), quota=12),
}


@pytest.fixture(autouse=True)
def _deadlocks_show_where() -> Iterator[None]:
    faulthandler.dump_traceback_later(SECONDS + 150, exit=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many switches in the middle of a step as can be had
    yield
    sys.setswitchinterval(interval)
    faulthandler.cancel_dump_traceback_later()


class Worker(threading.Thread):
    """Uses the store at random until told to stop; keeps what went wrong."""

    def __init__(self, store: TieredStore, seed: str, stop: threading.Event) -> None:
        super().__init__(daemon=True, name=f"worker {seed}")
        self.store, self.stop = store, stop
        self.chance = random.Random(seed)
        self.steps = self.got = self.interrupts = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        steps = [self.puts] * 8 + [self.gets] * 10 + [self.pins, self.prefetches, self.looks] * 2
        steps += [self.removes, self.flushes]
        try:
            while not self.stop.is_set():
                self.chance.choice(steps)()
                self.steps += 1
        except BaseException as error:  # noqa: BLE001 - the test raises it again
            self.error = error

    def prompt(self) -> tuple[list[bytes], list[int]]:
        """Neighbours, so that many share them: ids and sizes."""
        first = self.chance.randrange(BLOCKS)
        space = self.chance.randrange(SPACES)
        blocks = [name(at, space) for at in range(first, first + self.chance.randrange(1, 12))]
        return blocks, [size_of(block) for block in blocks]

    def breaks(self, blocks: list[bytes]) -> int | None:
        """Where the caller's code raises, if it does."""
        return self.chance.randrange(len(blocks)) if self.chance.random() < 0.04 else None

    def puts(self) -> None:
        blocks, sizes = self.prompt()
        last = self.breaks(blocks)

        def fill(at: int, raw: memoryview) -> None:
            if at == last:
                raw[:7] = b"garbage"
                raise Interrupt
            raw[:] = content(blocks[at], sizes[at])

        wait = self.chance.random() * 0.3 if self.chance.random() < 0.05 else None
        try:
            written = self.store.write(blocks, sizes, fill, wait=wait)
            found = sorted(written.kept + written.already)
            assert found == [*range(len(found))], "a hole"
        except Interrupt:
            self.interrupts += 1

    def gets(self) -> None:
        blocks, sizes = self.prompt()
        last, handed = self.breaks(blocks), 0
        if lies := self.chance.random() < 0.02:
            sizes = [size + self.chance.choice((-1, 1, PAGE)) for size in sizes]

        def sink(at: int, raw: memoryview) -> None:
            nonlocal handed
            if at == last:
                raise Interrupt
            assert at == handed, "not in order"
            assert len(raw) == sizes[at]
            assert bytes(raw) == content(blocks[at], sizes[at]), "another block's bytes"
            handed += 1

        more: dict[str, Any] = {}
        if self.chance.random() < 0.3:
            more["deadline"] = self.chance.choice((0.0, 0.001, 0.05))
        if self.chance.random() < 0.1:
            more["cancelled"] = lambda: self.chance.random() < 0.2
        try:
            count = self.store.read(blocks, sizes, sink, **more).blocks
            assert count == handed
            assert not (count and lies), "a block of another length than it has"
            self.got += count
        except Interrupt:
            self.interrupts += 1

    def pins(self) -> None:
        blocks, _ = self.prompt()
        assert self.store.pins.pin(blocks, self.chance.random() / 5) <= len(blocks)
        if self.chance.random() < 0.5:
            self.store.pins.unpin(self.prompt()[0])

    def prefetches(self) -> None:
        prompt = self.prompt()
        fails = self.chance.random() < 0.02

        def plan() -> tuple[list[bytes], list[int]]:
            if fails:
                raise Interrupt
            return prompt

        coming = self.store.prefetch(plan)
        if self.chance.random() < 0.3:
            coming.cancel()
        assert coming.wait(0.02) <= len(prompt[0])

    def looks(self) -> None:
        blocks, _ = self.prompt()
        soon = time.monotonic() + 0.01 if self.chance.random() < 0.5 else None
        assert len(self.store.locate(blocks, soon)) <= len(blocks)
        self.store.stats()

    def removes(self) -> None:
        if self.chance.random() < 0.1:
            self.store.clear(name(0, self.chance.randrange(SPACES))[:16])
        else:
            self.store.remove(self.prompt()[0])

    def flushes(self) -> None:
        self.store.flush(self.chance.random() * 0.3)


def trouble(
    places: list[FaultyBackend],
    chance: random.Random,
    seconds: float,
    enough: Callable[[], bool] = lambda: True,
) -> None:
    """Break and mend the places, each by itself or all at once.

    It takes up to a minute longer until ``enough()``, as on a loaded machine.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 or (left > -60 and not enough()):
        place = chance.choice(places)
        times = chance.choice((1, 3, 10, None))
        calls = chance.choice(
            (("put",), ("get",), ("room",), ("delete",), ("sizes", "list"), ("flush", "touch"), ())
        )
        match chance.randrange(9):
            case 0:
                place.fail(*calls, times=times)
            case 1:
                place.hang(*[call for call in calls if call != "close"] or ["put"], times=times)
            case 2:
                place.slow(chance.random() * 0.3, *calls or ("get", "put"), times=times)
            case 3:
                place.flip(times)
            case 4:
                place.truncate(times)
            case 5:
                place.lose(times)
            case 6:
                place.fill_up(times)
            case _:
                for one in places:
                    one.heal()
        time.sleep(chance.random() * 0.05)


def met_all(workers: Sequence[Worker]) -> bool:
    """Whether all have worked, some read blocks, and the caller's code raised."""
    together = sum(worker.got for worker in workers), sum(worker.interrupts for worker in workers)
    return all(worker.steps for worker in workers) and all(together)


@pytest.mark.parametrize("which", SETTINGS)
def test_eight_threads_over_places_that_break(which: str, bench: Bench) -> None:
    print(f"to see this again: KVKEEP_SEED={SEED}")  # pytest shows it where it fails
    setting, chance = SETTINGS[which], random.Random(SEED)
    store, places = built(setting, bench)
    stop = threading.Event()
    workers = [Worker(store, f"{SEED} {number}", stop) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    trouble(places, chance, SECONDS, lambda: met_all(workers))
    for place in places:
        place.heal()
    stop.set()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), f"{worker.name} is stuck"
        if worker.error is not None:
            raise worker.error
    assert met_all(workers)
    settle(store)
    at_rest(store)
    until(lambda: store.flush(5), 30)  # breakers let somebody try again
    settle(store)
    at_rest(store)
    for tier in [store.memory, *store.tiers]:
        held = tier.catalogue.spaces().get(name(0, 0)[:16], 0)
        # Threads that put at the same time may each pass it by one block.
        assert setting.quota is None or held <= (setting.quota + 2 * THREADS) * PAGE
    for tier in store.tiers:
        sound(tier)
    assert store.close(20)
    closed(store)


@pytest.mark.parametrize("which", SETTINGS)
def test_it_is_closed_under_eight_threads(which: str, bench: Bench) -> None:
    """They are told so by one error; with places that break at that time, too."""
    print(f"to see this again: KVKEEP_SEED={SEED}")
    chance = random.Random(SEED)
    for again in range(12 if LONG else 2):
        store, places = built(SETTINGS[which], bench, at=f"{again}")
        stop = threading.Event()
        workers = [Worker(store, f"{SEED} {again} {number}", stop) for number in range(THREADS)]
        for worker in workers:
            worker.start()
        trouble(places, chance, 0.1)
        store.close(0.2)
        time.sleep(0.01)
        stop.set()
        for place in places:  # who deletes waits for it
            place.heal()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive(), f"{worker.name} is stuck"
            if not isinstance(worker.error, IllegalStep | BackendFailed | None):
                raise worker.error
        closed(store)


def built(setting: Setting, bench: Bench, at: str = "") -> tuple[TieredStore, list[FaultyBackend]]:
    """A store that is much too small."""
    places: list[FaultyBackend] = []
    tiers = []
    for number, blocks in enumerate(setting.places):
        if isinstance(blocks, str):
            place = bench.memory(int(blocks))
        else:
            place = bench.disk(blocks, f"d{at}-{number}")
        bounded = place.capacity is not None
        codec = setting.codec if number == 0 else "raw"
        tiers.append(
            bench.spec(
                place,
                codec,
                timeout=TIMEOUT,
                pause=0.05,
                policy=tier_policies()[setting.evicts],
                ttl=setting.ttl if bounded else None,
            )
        )
        places.append(place)
    front = MemorySpec(MemoryBackend(24 * PAGE), tier_policies()[setting.evicts], ttl=setting.ttl)
    store = bench.store(front, *tiers, policy=setting.policy())
    if setting.quota is not None:
        store.set_quota(name(0, 0)[:16], setting.quota * PAGE)
    return store, places


def at_rest(store: TieredStore) -> None:
    """Its books agree, and it holds on to nothing."""
    store.check()
    assert store.memory.backend.leased == 0, "a lease was not given back"
    assert store.memory.leaving_bytes == 0
    assert not store._reader._reads, "a flight is on its way for ever"
    assert not any(len(tier.states) for tier in store.tiers), "a mark stays for ever"
    for tier in [store.memory, *store.tiers]:
        held = [one.block for one in tier.catalogue._blocks.values() if one.held]
        assert not held, "a block is held for ever"
    for tier in store.tiers:
        for work in (tier.reading, tier.writing):
            assert work.wait(0.0)
            assert work.cost == 0
        assert isinstance(tier.backend, FaultyBackend)
        inner = tier.backend.inner
        if isinstance(inner, MemoryBackend):
            inner.check()
            assert inner.leased == 0


def sound(tier: Tier) -> None:
    """Whatever lies in the place is what was put there: faults of a reader leave no trace."""
    assert isinstance(tier.backend, FaultyBackend)
    for item in list(tier.backend.inner.list()):
        until(lambda: not tier.calls.any_blocks("read"))
        record = tier.fetch(item.block)
        assert record is not None, "a record in the place that is none"
        raw = bytes(record[-size_of(item.block) :])
        assert raw == content(item.block, size_of(item.block))


def closed(store: TieredStore) -> None:
    """Nothing is leased, and no thread is left."""
    until(lambda: not threads_of("prefetch", *(tier.name for tier in store.tiers)))
    assert store.memory.backend.leased == 0
    assert not store._reader._reads
    assert not any(len(tier.states) for tier in store.tiers), "a mark stays for ever"
