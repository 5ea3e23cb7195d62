"""Real tiers behind faults that are switched on and off, and blocks whose bytes follow from names.

Every store that a bench made is checked when it ends: nothing leased, held, queued or on its way,
books that agree, and no thread that outlives `close`.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from faults import FaultyBackend
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import BlockShape, codec_of, make_codec
from kvkeep.store.tiers import MemorySpec, Tier, TieredStore, TierOptions, TierSpec
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kvkeep.store.backends import Backend
    from kvkeep.store.tiers import TieringPolicy, Written

PAGE = 4096
RAW = PAGE - HEADER_BYTES
"""Bytes of a block whose raw record takes one page of any place."""
SHORT = 0.2
"""Seconds: the timeout of tiers that are going to hang."""
SHAPE = BlockShape("bfloat16", "NHD", ((2, 8),))


def name(number: int, space: int = 0) -> bytes:
    """The id of block ``number`` of a namespace."""
    return bytes([space + 1]) * 16 + number.to_bytes(32, "big")


@lru_cache(maxsize=4096)
def content(block: bytes, size: int = RAW) -> bytes:
    """The raw bytes of a block: of no two the same."""
    return random.Random(block).randbytes(size)


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for what comes by itself; AssertionError if it does not."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


class Got:
    """A sink that proves each block to be right, in order, and remembers when it came."""

    def __init__(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.blocks, self.sizes = blocks, sizes
        self.count = 0

    def __call__(self, at: int, raw: memoryview) -> None:
        assert at == self.count
        assert bytes(raw) == content(self.blocks[at], self.sizes[at]), "another block's bytes"
        self.count += 1


def put(
    store: TieredStore, numbers: Iterable[int], *, space: int = 0, size: int = RAW, **more: Any
) -> Written:
    """Put blocks with what belongs into them."""
    blocks = [name(number, space) for number in numbers]

    def fill(at: int, raw: memoryview) -> None:
        raw[:] = content(blocks[at], size)

    return store.write(blocks, [size] * len(blocks), fill, **more)


def save(tier: Tier, number: int, record: memoryview) -> str:
    """Write a block to a tier alone; return why it was dropped, or ""."""
    operations = tier.states.queue([name(number)], lambda _block, _saved: None)
    drops = tier.counters.drops
    tier.write(operations, [record])
    loss = tier.losses.of(name(number))
    return "" if tier.counters.drops == drops or loss is None else loss.detail


def get(
    store: TieredStore, numbers: Iterable[int], *, space: int = 0, size: int = RAW, **more: Any
) -> int:
    """Read blocks and prove each byte of them; how many came."""
    blocks = [name(number, space) for number in numbers]
    got = Got(blocks, [size] * len(blocks))
    count = store.read(blocks, got.sizes, got, **more).blocks
    assert count == got.count
    return count


def threads_of(*tiers: str) -> list[str]:
    """Living threads of these tiers."""
    begins = tuple(f"kvkeep {tier} " for tier in tiers)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(begins)]


class Bench:
    """Makes places, tiers and stores, and takes them apart again."""

    _numbers = itertools.count(1)  # what a test that failed left behind is nobody else's

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: list[FaultyBackend] = []
        self._stores: list[TieredStore] = []

    def memory(self, blocks: int) -> FaultyBackend:
        """Memory for so many blocks, known to us alone."""
        return self._faulty(MemoryBackend(blocks * PAGE))

    def disk(self, blocks: int | None = 256, at: str = "d") -> FaultyBackend:
        """A directory for so many blocks; None: it has no budget."""
        size = None if blocks is None else blocks * PAGE
        return self._faulty(DiskBackend(self._path / at, size, sync="never"))

    def _faulty(self, inner: Backend) -> FaultyBackend:
        place = FaultyBackend(inner, seed=4)
        self._places.append(place)
        return place

    def tier(self, place: Backend, codec: str = "raw", **more: Any) -> Tier:
        """A tier alone, in no store; see `spec`."""
        return Tier(self.spec(place, codec, **more))

    def spec(
        self,
        place: Backend,
        codec: str = "raw",
        *,
        key: bytes | None = None,
        timeout: float | None = None,
        pause: float = 1.0,
        **options: Any,
    ) -> TierSpec:
        """A tier with a name of its own; its breakers try again ``pause`` seconds later."""
        if timeout is not None:
            place.timeout = timeout
        return TierSpec(
            f"t{next(self._numbers)}",
            place,
            make_codec(codec, SHAPE, key),
            partial(codec_of, shape=SHAPE, key=key),
            TierOptions(breaker_pause=pause, **options),
        )

    def store(
        self,
        front: int | MemorySpec,
        *tiers: TierSpec | FaultyBackend,
        policy: TieringPolicy | None = None,
        **more: Any,
    ) -> TieredStore:
        """A store with memory for ``front`` blocks above ``tiers``."""
        if not isinstance(front, MemorySpec):
            front = MemorySpec(MemoryBackend(front * PAGE))
        below = [tier if isinstance(tier, TierSpec) else self.spec(tier) for tier in tiers]
        store = TieredStore(front, below, policy, **more)
        self._stores.append(store)
        return store

    def end(self) -> None:
        """Heal everything; check, close and check again."""
        for place in self._places:
            place.heal()
        for store in self._stores:
            if not store._closed:
                settle(store)
                checked(store)
                store.close(20)
            until(lambda store=store: store.memory.backend.leased == 0)  # what hung goes on
            until(lambda store=store: not threads_of(*(tier.name for tier in store.tiers)))
        for place in self._places:
            place.close()


def settle(store: TieredStore) -> None:
    """Wait until nothing is on its way."""
    assert store._reader.prefetching.wait(20)
    until(lambda: not any(tier.states.deleting for tier in store.tiers), 20)
    for _ in range(3):  # what lands may be written, and what is written may demote
        for tier in store.tiers:
            assert tier.reading.wait(20)
            assert tier.writing.wait(20)


def checked(store: TieredStore) -> None:
    """Of a store that is at rest: its books agree, and it holds on to nothing."""
    store.check()
    assert store.memory.backend.leased == 0, "a lease was not given back"
    assert store.memory.leaving_bytes == 0
    for tier in [store.memory, *store.tiers]:
        held = [one.block for one in tier.catalogue._blocks.values() if one.held]
        assert not held, "a block is held for ever"
        assert not tier.catalogue._ahead, "a block that never came is held for ever"
    for tier in store.tiers:
        assert tier.writing.wait(0.0)
        assert tier.reading.wait(0.0)
        assert tier.writing.cost == 0
        inner = tier.backend.inner if isinstance(tier.backend, FaultyBackend) else tier.backend
        if isinstance(inner, MemoryBackend):
            inner.check()
            assert inner.leased == 0
            there = {item.block for item in inner.list()}
            assert there >= {*tier.catalogue.blocks()}
            assert there <= {*tier.catalogue.blocks(), *tier.states.undeleted()}


def there(tier: Tier) -> list[int]:
    """Numbers of the blocks that lie in the tier's place, by its own word."""
    assert isinstance(tier.backend, FaultyBackend)
    return sorted(int.from_bytes(item.block[16:], "big") for item in tier.backend.inner.list())


def above(store: TieredStore) -> list[int]:
    """Numbers of the blocks in memory."""
    return sorted(int.from_bytes(item.block[16:], "big") for item in store.memory.backend.list())
