"""Blocks that are placed and read several at a time, in memory of a process and of the node."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import pytest

from kvkeep.store.blocks import BlockStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.store.backends.shm import ShmBackend

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
KEYS = [bytes([number]) * 32 for number in range(200)]
SIZE = 8000


def content(key: bytes) -> bytes:
    return random.Random(key).randbytes(SIZE)


@pytest.fixture(params=["memory", pytest.param("shm", marks=LINUX)])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://4MiB" if request.param == "memory" else f"shm://4MiB?dir={tmp_path}"


@pytest.fixture
def store(front: str) -> Iterator[BlockStore]:
    with BlockStore("runs", tiers=[front]) as store:
        yield store
        store.check()
        assert held(store) == 0, "a lease was not released"


def held(store: BlockStore) -> int:
    """Bytes in use after everything was removed: of leases that were left."""
    store.clear()
    return store._tiered.memory.backend.used()


def put(store: BlockStore, keys: list[bytes]) -> int:
    return store.put(keys, [content(key) for key in keys])


def read(store: BlockStore, keys: list[bytes]) -> dict[bytes, bytes]:
    """Read ``keys``; return what came."""
    came: dict[bytes, bytes] = {}
    count = store.read(
        keys, [SIZE] * len(keys), lambda at, raw: came.update({keys[at]: bytes(raw)})
    )
    assert count == len(came)
    return came


def test_some_blocks_of_a_prompt_are_there(store: BlockStore) -> None:
    """Only the missing ones are filled, each once, whatever runs they form."""
    for seed in range(30):
        chance = random.Random(seed)
        known = [key for key in KEYS if chance.random() < chance.choice((0.1, 0.5, 0.95))]
        assert put(store, known) == len(known)
        filled = []

        def fill(at: int, raw: memoryview, filled: list[bytes] = filled) -> None:
            filled.append(KEYS[at])
            raw[:] = content(KEYS[at])

        assert store.write(KEYS, [SIZE] * 200, fill) == 200
        assert filled == [key for key in KEYS if key not in set(known)]
        assert read(store, KEYS) == {key: content(key) for key in KEYS}
        store.remove(KEYS)


def test_blocks_of_other_sizes(store: BlockStore) -> None:
    chance = random.Random(1)
    sizes = [chance.choice((1, 100, 5000, 70_000, 200_000)) for _ in range(30)]
    blocks = [random.Random(at).randbytes(size) for at, size in enumerate(sizes)]
    assert store.put(KEYS[:30], blocks) == 30
    rooms = [bytearray(size) for size in sizes]
    assert store.get(KEYS[:30], [memoryview(room) for room in rooms]) == 30
    assert rooms == blocks
    sizes[17] += 1
    assert store.read(KEYS[:30], sizes, lambda at, raw: None) == 17, "another length is a miss"


@pytest.mark.parametrize("at_block", [0, 5, 40])
def test_fill_raises_in_the_middle(front: str, tmp_path: Path, at_block: int) -> None:
    """The blocks before it are stored, also in the tier; it and those behind it are not."""
    with BlockStore("runs", tiers=[front, f"file://{tmp_path}/disk?size=8MiB"]) as store:
        filled: list[int] = []

        def fill(at: int, raw: memoryview) -> None:
            filled.append(at)
            if at == at_block:
                raise KeyError("the caller's mistake")
            raw[:] = content(KEYS[at])

        with pytest.raises(KeyError, match="the caller's mistake"):
            store.write(KEYS[:50], [SIZE] * 50, fill)
        assert filled == list(range(at_block + 1))
        assert store.knows(KEYS) == at_block
        assert store.unknown(KEYS) == list(range(at_block, 200))
        assert store.flush()
        assert [tier.blocks for tier in store.stats()] == [at_block] * 2
        assert read(store, KEYS) == {key: content(key) for key in KEYS[:at_block]}
        counters = store.stats()[0].counters
        assert (counters["writes"], counters["drops"]) == (at_block, 0)
        assert held(store) == 0


def test_memory_is_full(front: str) -> None:
    """New prompts push out the oldest, block by block as many as they need."""
    with BlockStore("runs", tiers=[front]) as store:
        prompts = [[bytes([number]) * 16 + key[:16] for key in KEYS[:100]] for number in range(12)]
        for prompt in prompts:
            assert put(store, prompt) == 100
            assert read(store, prompt) == {key: content(key) for key in prompt}
        there = [store.knows(prompt) for prompt in prompts]
        assert there[0] == there[1] == 0
        assert there[-3:] == [100] * 3
        assert store.stats()[0].used_bytes > 3_500_000, "more went than had to"
        long = [bytes(16) + number.to_bytes(16) for number in range(600)]
        count = put(store, long)
        assert 400 < count < 600, "the rest of a prompt does not push out its beginning"
        assert read(store, long) == {key: content(key) for key in long[:count]}
        store.check()
        assert held(store) == 0


@LINUX
def test_a_run_takes_the_lock_of_the_node_once_a_step(tmp_path: Path) -> None:
    """The cost of a block of a prompt is its copy, not the lock."""
    with BlockStore("runs", tiers=[f"shm://64MiB?dir={tmp_path}"]) as store:
        backend: ShmBackend = store._tiered.memory.backend  # type: ignore[assignment]
        lock, taken = backend._rows.lock, 0
        acquire = lock.acquire

        def counted() -> None:
            nonlocal taken
            taken += 1
            acquire()

        lock.acquire = counted  # type: ignore[method-assign]
        assert put(store, KEYS[:128]) == 128
        assert taken <= 8, "two runs: reserve, commit, and the end of the holds"
        taken = 0
        assert len(read(store, KEYS[:128])) == 128
        assert taken <= 4, "two runs: lease and release"
