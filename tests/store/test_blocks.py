"""BlockStore: bytes under keys, in order, over the same tiers as KVStore."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from store_kv import disk, quiet, records

from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import Namespace, chain_keys, root_key
from kvkeep.store import BlockStore
from kvkeep.store.tiers import Exclusive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZES = (1, 127, 4096, 4097, 70_000, 3, 640, 4096)
KEYS = chain_keys(root_key(Namespace(tenant="a")), np.arange(32, dtype="<i4").tobytes(), 16)
BLOCKS = [np.random.default_rng(n).bytes(size) for n, size in enumerate(SIZES)]


def opened(*tiers: Any, namespace: Any = "a", **more: Any) -> BlockStore:
    return BlockStore(namespace, tiers=tiers or ("memory://1MiB",), **more)


def get(store: BlockStore, keys: list[bytes] = KEYS, sizes: Any = SIZES, **more: Any) -> int:
    """Get them, compare those that came with what was put; how many."""
    room = [bytearray(b"\xa5" * size) for size in sizes]
    count = store.get(keys, [memoryview(buffer) for buffer in room], **more)
    for key, buffer in zip(keys[:count], room, strict=False):
        assert buffer == BLOCKS[KEYS.index(key)]
    return count


def test_bytes_of_different_sizes_come_back_in_order(tmp_path: Path) -> None:
    urls = ("memory://1MiB", disk(tmp_path / "d"))
    with opened(*urls) as store:
        assert store.put(KEYS, BLOCKS) == 8
        assert store.lookup(KEYS) == 8
        assert get(store) == 8
    with opened(*urls) as store:
        assert store.lookup(KEYS) == 8
        assert get(store) == 8
        back = list(reversed(range(8)))
        assert get(store, [KEYS[n] for n in back], [SIZES[n] for n in back]) == 8
        quiet(store)  # type: ignore[arg-type]
        store.check()


def test_it_ends_at_the_first_that_is_missing() -> None:
    with opened() as store:
        some = [0, 1, 2, 4, 5]
        assert store.put([KEYS[n] for n in some], [BLOCKS[n] for n in some]) == 5
        assert store.lookup(KEYS) == 3
        assert get(store) == 3
        assert get(store, KEYS[3:], SIZES[3:]) == 0
        assert get(store, KEYS[4:], SIZES[4:]) == 2
        assert store.lookup([]) == store.put([], []) == store.get([], []) == 0


def test_what_is_behind_the_last_that_came_is_not_written() -> None:
    with opened() as store:
        store.put(KEYS[:2], BLOCKS[:2])
        room = [bytearray(b"\xa5" * size) for size in SIZES]
        assert store.get(KEYS, [memoryview(buffer) for buffer in room]) == 2
        assert all(set(buffer) == {0xA5} for buffer in room[2:])


def test_any_buffer_in_one_piece_will_do() -> None:
    given = [
        np.arange(12, dtype=np.int32).reshape(3, 4),
        bytes(range(48)),
        bytearray(range(48)),
        memoryview(np.arange(6.0)),
    ]
    with opened() as store:
        assert store.put(KEYS[:4], given) == 4  # type: ignore[arg-type]
        room = [np.zeros((4, 3), np.int32), bytearray(48), np.zeros(48, "u1"), np.zeros(6)]
        assert store.get(KEYS[:4], room) == 4  # type: ignore[arg-type]
        for one, other in zip(given, room, strict=True):
            assert bytes(memoryview(one)) == bytes(memoryview(other))


def test_what_is_stored_is_not_replaced() -> None:
    with opened() as store:
        assert store.put(KEYS[:1], [b"first"]) == 1
        assert store.put(KEYS[:1], [b"other"]) == 1
        room = bytearray(5)
        assert store.get(KEYS[:1], [memoryview(room)]) == 1
        assert room == b"first"
        assert store.put([KEYS[1], KEYS[1]], [b"one", b"two"]) == 2
        both = [bytearray(3), bytearray(3)]
        assert store.get([KEYS[1]] * 2, [memoryview(buffer) for buffer in both]) == 2
        assert both == [b"one", b"one"]
        store.check()


def test_namespaces_in_one_directory_know_nothing_of_each_other(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with opened(url) as one, opened(url, namespace=Namespace(tenant="b", lora="x")) as two:
        assert one.put(KEYS, BLOCKS, wait=10) == 8
        assert two.lookup(KEYS) == 0
        assert get(two) == 0
        assert two.clear().bytes == 0
        assert two.put(KEYS[:1], [b"theirs"], wait=10) == 1
        assert len(records(tmp_path / "d")) == 9
        assert one.clear().bytes >= sum(SIZES)
        assert one.lookup(KEYS) == 0
        room = bytearray(6)
        assert two.get(KEYS[:1], [memoryview(room)]) == 1
        assert room == b"theirs"


def test_two_stores_of_one_namespace_see_what_the_other_puts(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with opened(url) as one, opened(url, namespace=Namespace(tenant="a")) as two:
        assert two.lookup(KEYS) == 0
        one.put(KEYS, BLOCKS, wait=10)
        assert two.lookup(KEYS) == 8
        assert get(two) == 8
        one.remove(KEYS[2:3])
        assert get(one) == 2


def test_remove_takes_those_that_are_named(tmp_path: Path) -> None:
    urls = ("memory://1MiB", disk(tmp_path / "d"))
    with opened(*urls) as store:
        store.put(KEYS, BLOCKS, wait=10)
        assert store.remove(KEYS[3:5]).bytes >= SIZES[3] + SIZES[4]
        assert store.remove(KEYS[3:5]).bytes == 0
        assert store.lookup(KEYS) == 3
        assert get(store, KEYS[5:], SIZES[5:]) == 3
        assert store.put(KEYS, BLOCKS, wait=10) == 8
        assert get(store) == 8
        store.check()
    with opened(*urls) as store:
        assert get(store) == 8


def test_pinned_blocks_outlive_pressure() -> None:
    blocks = [bytes([n]) * 4000 for n in range(8)]
    with opened("memory://48KiB") as store:
        assert store.put(KEYS[:2], blocks[:2]) == 2
        assert store.pin(KEYS[:2], 60) == 2
        for n in range(100):
            store.put([bytes([n]) * 32], [blocks[n % 8]])
        assert store.lookup(KEYS[:2]) == 2
        store.check()


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("size", [4000, 4095, 4097, 5000])
def test_a_record_of_another_length_is_a_miss_that_the_next_put_replaces(
    size: int, codec: str, tmp_path: Path
) -> None:
    key, other = KEYS[2:3], [bytes(range(250)) * 20]
    urls = ("memory://1MiB", disk(tmp_path / "d", codec=codec))
    with opened(*urls) as store:
        store.put(key, BLOCKS[2:3])
    with opened(*urls) as store:
        assert store.get(key, [memoryview(bytearray(size))]) == 0
        counters = store.stats()[1].counters
        assert (counters["damaged"], counters["refused"]) == (0, 1)
        assert store.lookup(key) == 0
        (loss,) = store._tiered.losses_of(store._named(key))
        assert loss is not None
        assert (loss.tier, loss.what) == ("file", "refused")
        assert f"another length: it has 4096 bytes, and the block {size}" in loss.detail
        assert store.put(key, [other[0][:size]], wait=20) == 1
    with opened(*urls) as store:
        room = bytearray(size)
        assert store.get(key, [memoryview(room)]) == 1
        assert room == other[0][:size]
        store.check()


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_much_longer_record_is_not_taken_for_a_damaged_one(codec: str, tmp_path: Path) -> None:
    """It cannot be read into the room for this block, and stays for those that ask for it."""
    key, long = KEYS[:1], random.Random(codec).randbytes(200_000)
    urls = ("memory://4MiB", disk(tmp_path / "d", codec=codec))
    with opened(*urls) as store:
        store.put(key, [long])
    with opened(*urls) as store:
        assert store.get(key, [memoryview(bytearray(1000))]) == 0
        counters = store.stats()[1].counters
        assert (counters["damaged"], counters["refused"]) == (0, 1)
    with opened(*urls) as store:
        room = bytearray(len(long))
        assert store.get(key, [memoryview(room)]) == 1
        assert room == long
        assert store.get(key, [memoryview(bytearray(1000))]) == 0
        assert store.put(key, [long[:1000]], wait=20) == 1
    with opened(*urls) as store:
        room = bytearray(1000)
        assert store.get(key, [memoryview(room)]) == 1
        assert room == long[:1000]


def test_a_put_of_another_length_replaces_what_is_stored(tmp_path: Path) -> None:
    """It need not be read before; memory and tier agree, whichever of them had it."""
    key = KEYS[:1]
    for size in (1000, 2000, 500):
        with opened("memory://1MiB", disk(tmp_path / "d")) as store:
            assert store.put(key, [bytes([size % 251]) * size], wait=20) == 1
            room = bytearray(size)
            assert store.get(key, [memoryview(room)]) == 1
            assert room == bytes([size % 251]) * size
            store.check()
    assert len(records(tmp_path / "d")) == 1


def test_memory_gives_no_record_of_another_length() -> None:
    with opened() as store:
        for size in (4095, 4097):
            assert store.put(KEYS[2:3], BLOCKS[2:3]) == 1
            room = bytearray(size)
            assert store.get(KEYS[2:3], [memoryview(room)]) == 0
            assert not any(room)
            assert store.lookup(KEYS[2:3]) == 0
            (loss,) = store._tiered.losses_of(store._named(KEYS[2:3]))
            assert loss is not None
            assert loss.what == "refused"
        assert store.put(KEYS[2:3], BLOCKS[2:3]) == 1
        assert get(store, KEYS[2:3], SIZES[2:3]) == 1
        store.check()


def readonly() -> memoryview:
    return memoryview(bytes(4))


CALLS: dict[str, tuple[Callable[[BlockStore], object], str]] = {
    "a short key": (lambda s: s.put([b"a"], [b"x"]), "32 bytes, got b'a'"),
    "a key of text": (lambda s: s.lookup(["a" * 32]), "32 bytes"),
    "a key of a number": (lambda s: s.remove([7]), "32 bytes, got 7"),
    "a key of a bytearray": (lambda s: s.pin([bytearray(32)], 1), "32 bytes"),
    "fewer buffers": (lambda s: s.put(KEYS[:2], [b"x"]), "1 buffers are given for 2 keys"),
    "more buffers": (lambda s: s.get([], [memoryview(bytearray(1))]), "1 buffers .* 0 keys"),
    "an empty buffer": (lambda s: s.put(KEYS[:1], [b""]), "at least one byte"),
    "an empty array": (lambda s: s.put(KEYS[:1], [np.zeros((2, 0))]), "at least one byte"),
    "no buffer": (lambda s: s.put(KEYS[:1], ["text"]), "a buffer is str"),
    "a buffer of nothing": (lambda s: s.put(KEYS[:1], [None]), "a buffer is NoneType"),
    "a buffer in pieces": (
        lambda s: s.put(KEYS[:1], [np.zeros((4, 4))[:, 1]]),
        "one piece of memory",
    ),
    "a read-only buffer": (lambda s: s.get(KEYS[:1], [readonly()]), "read-only"),
    "a deadline of text": (lambda s: s.get([], [], deadline="1"), "deadline is '1'"),
    "a wait that is a bool": (lambda s: s.put([], [], wait=True), "wait is True"),
    "fewer sizes": (lambda s: s.read(KEYS[:2], [1], print), "1 sizes are given for 2 keys"),
    "a size of nothing": (lambda s: s.read(KEYS[:1], [0], print), "size of a block is 0"),
    "a pin for ever": (lambda s: s.pin(KEYS, float("inf")), "seconds is inf"),
}


@pytest.fixture(scope="module")
def store() -> Iterator[BlockStore]:
    with opened() as store:
        store.put(KEYS, BLOCKS)
        yield store


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_and_nothing_changes(name: str, store: BlockStore) -> None:
    call, words = CALLS[name]
    before = store.stats()
    with pytest.raises(InvalidValue, match=words):
        call(store)
    assert store.stats() == before
    assert get(store) == 8
    store.check()


def test_a_wrong_store_is_refused() -> None:
    with pytest.raises(InvalidValue, match="namespace"):
        BlockStore(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="policy is 'lru'"):
        BlockStore("a", policy="lru")  # type: ignore[arg-type]


def test_what_was_only_fetched_ahead_outlives_the_process(tmp_path: Path) -> None:
    """Moved up into memory and never read, it goes down again, though nobody asked for it since."""
    tiers = "memory://1MiB", disk(tmp_path)
    with opened(*tiers, policy=Exclusive()) as store:
        assert store.put(KEYS, BLOCKS) == 8
    for _ in range(2):
        with opened(*tiers, policy=Exclusive()) as store:
            blocks = store._tiered.prefetch(lambda s=store: (s._named(KEYS), SIZES))
            assert blocks.wait(5) == 8
            quiet(store)
    with opened(*tiers, policy=Exclusive()) as store:
        assert get(store) == 8
