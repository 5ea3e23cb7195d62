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


def test_some_blocks_are_in_a_tier_only(front: str, tmp_path: Path) -> None:
    """Neither those nor the blocks in memory are filled again."""
    with BlockStore("runs", tiers=[front, f"file://{tmp_path}/disk?size=8MiB"]) as store:
        chance = random.Random(3)
        known = [key for key in KEYS if chance.random() < 0.5]
        assert put(store, known) == len(known)
        assert store.flush()
        below = [store._space + key for key in known if chance.random() < 0.5]
        store._tiered.memory.remove(below)
        filled = []

        def fill(at: int, raw: memoryview) -> None:
            filled.append(KEYS[at])
            raw[:] = content(KEYS[at])

        assert store.write(KEYS, [SIZE] * 200, fill) == 200
        assert filled == [key for key in KEYS if key not in set(known)]
        assert store.flush()
        assert store.stats()[1].blocks == 200
        names: list[str] = []
        levels = store._tiered.locate([store._space + key for key in KEYS])
        assert levels == [int(store._space + key in set(below)) for key in KEYS]
        count = store._tiered.read(
            [store._space + key for key in KEYS], [SIZE] * 200,
            lambda at, raw: names.append(str(bytes(raw) == content(KEYS[at]))),
        )  # fmt: skip
        assert (count, set(names)) == (200, {"True"})
        assert held(store) == 0


def test_a_read_that_cannot_begin_leaves_no_lease(
    front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlockStore("runs", tiers=[front, f"file://{tmp_path}/disk?size=8MiB"]) as store:
        put(store, KEYS[:8])
        assert store.flush()
        store._tiered.memory.remove([store._space + key for key in KEYS[4:8]])

        def failing(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(store._tiered._reader, "start", failing)
        with pytest.raises(KeyboardInterrupt):
            read(store, KEYS[:8])
        assert held(store) == 0


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


@pytest.mark.parametrize("at_block", [0, 5, 70])
def test_a_read_ends_in_the_middle(store: BlockStore, at_block: int) -> None:
    put(store, KEYS)
    came: list[int] = []

    def sink(at: int, raw: memoryview) -> None:
        came.append(at)
        if at == at_block and ends is raises:
            raise KeyError("the caller's mistake")
        if at == at_block and ends is replaced:
            store._tiered.supersede([store._space + KEYS[150]])

    def raises() -> None:
        with pytest.raises(KeyError):
            store.read(KEYS, [SIZE] * 200, sink)

    def cancelled() -> None:
        count = store.read(KEYS, [SIZE] * 200, sink, cancelled=lambda: len(came) > at_block)
        assert count == at_block + 1

    def replaced() -> None:
        assert store.read(KEYS, [SIZE] * 200, sink) == at_block + 1

    for ends in (raises, cancelled, replaced):
        came.clear()
        ends()
        assert came == list(range(at_block + 1))
    hits = store.stats()[0].counters["hits"]
    assert hits == 3 * (at_block + 1) - 1, "all but the one whose sink raised"


@pytest.mark.parametrize("in_memory", [200, 100, 20])
@pytest.mark.parametrize("at_block", [1, 20, 64, 100])
def test_a_replacement_between_two_runs(
    front: str, tmp_path: Path, in_memory: int, at_block: int
) -> None:
    """A read delivers the old bytes or the new ones, also if it leases behind the replacement."""
    with BlockStore("runs", tiers=[front, f"file://{tmp_path}/disk?size=8MiB"]) as store:
        blocks = [store._space + key for key in KEYS]
        assert store.put(KEYS, [b"old" * 1000] * 200) == 200
        assert store.flush()
        store._tiered.memory.remove(blocks[in_memory:])
        came: list[bytes] = []

        def cancelled() -> bool:
            if len(came) == at_block and not store._tiered._reader.replacements:
                assert not store._tiered.supersede(blocks).failed
                assert store.put(KEYS, [b"new" * 1000] * 200) == 200
            return False

        store.read(KEYS, [3000] * 200, lambda at, raw: came.append(bytes(raw)), cancelled=cancelled)
        assert store._tiered._reader.replacements == 1
        assert at_block <= len(came) <= at_block + 1
        assert set(came) == {b"old" * 1000}
        came.clear()
        store.read(KEYS, [3000] * 200, lambda at, raw: came.append(bytes(raw)))
        assert came == [b"new" * 1000] * 200


@pytest.mark.parametrize("sizes", [[30_000] * 60, [100] + [64_000] * 63])
def test_a_read_leaves_memory_to_others(store: BlockStore, sizes: list[int]) -> None:
    """What a run has leased makes no room, so it is little; the rest of memory does."""
    keys = [number.to_bytes(32, "big") for number in range(len(sizes))]
    assert store.put(keys, [bytes(size) for size in sizes]) == len(sizes)
    memory = store._tiered.memory
    room = (memory.capacity - memory.backend.used()) // 32_768
    store.put(KEYS[50 : 50 + room], [bytes(30_000)] * room)  # used later
    before = memory.counters.evictions
    stored: list[int] = []

    def sink(at: int, raw: memoryview) -> None:
        if not at:
            stored.append(store.put(KEYS[1:6], [bytes(60_000)] * 5))

    store.read(keys, sizes, sink)
    assert stored == [5]
    assert memory.counters.evictions - before <= 14


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


def test_a_quota_that_is_near(front: str) -> None:
    """Blocks of the namespace go; a prompt longer than its quota keeps its beginning."""
    with BlockStore("runs", tiers=[front]) as store:
        store._tiered.set_quota(store._space, 20 * (SIZE + 128))
        assert put(store, KEYS[:15]) == 15
        assert put(store, KEYS[15:30]) == 15
        assert 15 <= len([key for key in KEYS[:30] if store.knows([key])]) <= 20
        assert store.knows(KEYS[15:30]) == 15
        assert 18 <= put(store, KEYS[30:100]) <= 20
        store.check()


def test_a_quota_holds_for_runs_at_once(store: BlockStore) -> None:
    """What a run has reserved counts to a quota only later: others must not pass it meanwhile."""
    store._tiered.set_quota(store._space, 20 * (SIZE + 128))

    def fill(at: int, raw: memoryview) -> None:
        if not at:
            assert put(store, KEYS[100:115]) == 15
        raw[:] = content(KEYS[at])

    assert store.write(KEYS[:15], [SIZE] * 15, fill) == 15
    assert len(store._tiered.memory.catalogue) <= 21
    assert read(store, KEYS[:15]) == {key: content(key) for key in KEYS[:15]}


def test_two_requests_put_the_same_block(store: BlockStore) -> None:
    """The end of the first does not end what the second holds: the record that replaced its own."""
    assert put(store, KEYS[:1]) == 1
    memory, block = store._tiered.memory, store._space + KEYS[0]
    assert memory.catalogue.holds.hold(block)
    draft = memory.reserve(block, SIZE)
    assert draft is not None
    draft.view[-SIZE:] = content(KEYS[0])
    lease = memory.commit(draft, block)
    assert lease is not None
    lease.release()
    assert memory.catalogue.holds.hold(block)
    memory.catalogue.holds.free(block)
    assert put(store, KEYS[1:]) == 199
    assert store.put([bytes(31) + b"x"], [bytes(4_150_000)]) == 1
    assert read(store, KEYS[:1]) == {KEYS[0]: content(KEYS[0])}
    memory.catalogue.holds.free(block)
    assert store.put([bytes(31) + b"y"], [bytes(4_190_000)]) == 1  # all of memory
    assert store.knows(KEYS[:1]) == 0


@LINUX
def test_a_run_takes_the_lock_of_the_node_once_a_step(tmp_path: Path) -> None:
    """The cost of a block of a prompt is its copy, not the lock."""
    with BlockStore("runs", tiers=[f"shm://64MiB?dir={tmp_path}"]) as store:
        backend: ShmBackend = store._tiered.memory.backend  # type: ignore[assignment]
        lock, taken = backend.arena._lock, 0
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
