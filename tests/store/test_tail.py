"""A prompt's KV read from its end: every delivered range holds the bytes that were put."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from store_kv import (
    GEOMETRIES,
    counter,
    disk,
    get,
    given,
    numbers,
    open_store,
    plain,
    put,
    quiet,
    records,
)

from faults import FaultyBackend
from kvkeep.core.errors import IllegalStep, InvalidValue, UnsupportedModel
from kvkeep.core.keys import chain_keys
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import PassThrough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvkeep.store import KVStore, Operation

TOKENS = list(range(100, 142))  # ten blocks of four tokens, and two more


class Taken:
    """A sink that compares each bit with what belongs to the tokens, and keeps the order."""

    def __init__(self, store: KVStore, tokens: Any) -> None:
        self.store = store
        self.want = numbers(store.geometry, tokens)
        self.order: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int, kv: Any) -> None:
        found = plain(self.store.geometry, kv, self.store.layout)
        assert np.array_equal(found, self.want[start:stop]), "another's KV"
        self.order.append((start, stop))


@pytest.mark.parametrize("start", [0, 3, 4, 39])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_all_is_delivered_from_the_end(name: str, start: int) -> None:
    more = {"rank": "tp0/2"} if name == "rank" else {}
    with open_store(shape=GEOMETRIES[name], layout="HND", **more) as store:
        put(store, TOKENS, tail=True)
        tail = store.load_tail(TOKENS, start)
        assert (tail.start, tail.stop, tail.unit) == (start, 42, 4)
        assert tail.runs == (("memory", 42 - start),)
        taken = Taken(store, TOKENS)
        assert tail.read(taken) == ((start, 42),) == tail.delivered
        assert taken.order == sorted(taken.order, reverse=True)
        assert tail.front == start
        assert tail.done
        assert tail.wait(0)
        assert tail.sources == (("memory", 42 - start),)
        store.check()


def test_nothing_stored_is_nothing_to_read() -> None:
    with open_store() as store:
        for tokens, start in ((TOKENS, 0), (TOKENS[:3], 3), ([], 0)):
            tail = store.load_tail(tokens, start)
            assert (tail.start, tail.stop, tail.runs) == (start, start, ())
            assert tail.read(Taken(store, tokens)) == ()
            assert tail.front == start
        put(store, TOKENS)
        assert store.load_tail(TOKENS, 41).stop == 41, "of the last tokens nothing is stored"


def test_what_each_tier_has(tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        put(store, TOKENS[:20], wait=True)
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        put(store, TOKENS, wait=True)
        quiet(store)
        tail = store.load_tail(TOKENS, 2)
        assert tail.runs == (("file", 18), ("memory", 20))
        size = store.geometry.bytes_per_token
        assert tail.tier_bytes(2, 40) == {"file": 18 * size, "memory": 20 * size}
        assert tail.tier_bytes(10, 22) == {"file": 10 * size, "memory": 2 * size}
        assert tail.tier_bytes(22, 22) == {}
        with pytest.raises(InvalidValue, match="tokens 1 … 40 are not within 2 … 40"):
            tail.tier_bytes(1, 40)
        assert tail.read(Taken(store, TOKENS)) == ((2, 40),)
        assert tail.sources == (("file", 18), ("memory", 20))


def test_where_computing_has_come_nothing_is_read(tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        put(store, TOKENS, wait=True)
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        tail = store.load_tail(TOKENS)
        tail.stop_before(18)  # in the middle of the fifth block
        tail.stop_before(9)  # earlier: changes nothing
        assert tail.read(Taken(store, TOKENS)) == ((16, 40),)
        quiet(store)
        assert counter(store, "hits") == 6, "no other block was read"
        other = store.load_tail(TOKENS)
        other.cancel()
        assert other.read(Taken(store, TOKENS)) == ()
        with pytest.raises(InvalidValue, match="token is -1"):
            other.stop_before(-1)
        store.check()


def test_a_damaged_block_is_passed_over(tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        put(store, TOKENS, wait=True)
        names = {key.hex(): at for at, key in enumerate(_keys(store, TOKENS))}
    for file in records(tmp_path):
        if names[file.name] in (3, 7):
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        tail = store.load_tail(TOKENS)
        assert tail.read(Taken(store, TOKENS)) == ((0, 12), (16, 28), (32, 40))
        assert tail.front == 32
        assert tail.sources == (("file", 32),)
        quiet(store)
        assert counter(store, "damaged") == 2
        assert get(store, TOKENS) == 12
        store.check()


def test_a_hanging_tier_holds_up_neither_thread() -> None:
    with _behind_faults() as (store, faulty):
        faulty.hang("get")
        tail, taken = store.load_tail(TOKENS), Taken(store, TOKENS)
        reading = threading.Thread(target=tail.read, args=(taken,))
        reading.start()
        faulty.wait_inside("get", 4)
        assert not tail.wait(0.01)
        tail.stop_before(40)  # all was computed meanwhile
        assert tail.wait(5), "the read must end at once"
        reading.join(5)
        late = store.load_tail(TOKENS)
        assert late.read(taken, deadline=0.05) == ()
        assert taken.order == []
        faulty.heal()
        quiet(store)
        assert get(store, TOKENS) == 40


def test_a_slow_block_does_not_keep_back_others() -> None:
    with _behind_faults() as (store, faulty):
        last, go_on, inner_get = _blocks(store, TOKENS)[-1], threading.Event(), faulty.inner.get

        def slow(block: bytes, room: Any) -> Any:  # whichever thread of the tier reads it
            if block == last:
                assert go_on.wait(10)
            return inner_get(block, room)

        faulty.inner.get = slow  # type: ignore[method-assign]
        tail, taken = store.load_tail(TOKENS), Taken(store, TOKENS)
        reading = threading.Thread(target=tail.read, args=(taken,))
        reading.start()
        _until(lambda: tail.delivered == ((0, 36),))
        assert len(taken.order) == 9
        assert tail.front == 40
        go_on.set()
        reading.join(5)
        assert tail.delivered == ((0, 40),)
        assert tail.front == 0


def test_blocks_on_their_way_are_dropped() -> None:
    with _behind_faults() as (store, faulty):
        faulty.hang("get")
        tail, taken = store.load_tail(TOKENS), Taken(store, TOKENS)
        reading = threading.Thread(target=tail.read, args=(taken,))
        reading.start()
        faulty.wait_inside("get", 4)  # of the last four blocks
        tail.stop_before(32)
        reads, begun = store.cost.reading("faulty"), 16 * store.geometry.bytes_per_token
        _until(lambda: reads.queued == begun)
        faulty.heal()
        reading.join(5)
        assert tail.delivered == ((32, 40),)
        quiet(store)
        assert faulty.calls["get"] <= 5, "blocks not begun stay unread"


def test_a_tier_that_fails_is_told_as_nothing() -> None:
    with _behind_faults() as (store, faulty):
        tail = store.load_tail(TOKENS)
        faulty.fail("get")
        assert tail.read(Taken(store, TOKENS)) == ()
        faulty.heal()


def test_what_was_removed_meanwhile_is_not_delivered() -> None:
    with _behind_faults() as (store, _):
        tail, taken = store.load_tail(TOKENS), Taken(store, TOKENS)
        store.remove(TOKENS, 20)
        assert tail.read(taken) == ((0, 20),)


def test_old_and_new_kv_are_not_mixed() -> None:
    """A replacement in the middle of the read: what comes is old, or nothing."""
    tokens = list(range(200))  # more blocks than are read ahead
    with open_store() as store:
        put(store, tokens)
        tail, taken = store.load_tail(tokens), Taken(store, tokens)

        def sink(start: int, stop: int, kv: Any) -> None:
            taken(start, stop, kv)
            if stop == 192:
                data = numbers(store.geometry, tokens) ^ 0xFF
                store.put(tokens, given(store.geometry, data), replace=True)

        assert tail.read(sink) == ((188, 200),)
        assert len(taken.order) == 3


def test_a_sink_that_raises_ends_the_read() -> None:
    with _behind_faults() as (store, _):
        tail = store.load_tail(TOKENS)

        def sink(start: int, stop: int, kv: object) -> None:
            if stop <= 32:
                raise ValueError("ours")

        with pytest.raises(ValueError, match="ours"):
            tail.read(sink)
        assert all(start >= 32 for start, _ in tail.delivered)
        assert tail.done
        with pytest.raises(IllegalStep, match="read was called before"):
            tail.read(sink)


def test_a_closed_store_delivers_nothing() -> None:
    store = open_store()
    put(store, TOKENS)
    tail = store.load_tail(TOKENS)
    store.close()
    with pytest.raises(IllegalStep):
        tail.read(Taken(store, TOKENS))
    with pytest.raises(IllegalStep):
        store.load_tail(TOKENS)
    assert tail.delivered == ()


def test_snapshots_are_loaded_whole() -> None:
    with (
        open_store(snapshots=True) as store,
        pytest.raises(UnsupportedModel, match="use get_snapshot instead of load_tail"),
    ):
        store.load_tail(TOKENS)


def test_a_read_counts_as_a_get_and_the_front_is_evicted_last(tmp_path: Path) -> None:
    told: list[Operation] = []
    with open_store("memory://4MiB", disk(tmp_path)) as store:
        put(store, TOKENS, wait=True)
        store.watch(told.append)
        tail = store.load_tail(TOKENS)
        tail.stop_before(20)
        tail.read(Taken(store, TOKENS))
        order = list(store._tiered.memory.catalogue.blocks())
        stats = store.stats()
    assert (stats.gets, stats.asked_tokens, stats.hit_tokens) == (1, 42, 20)
    assert [(one.what, one.asked, one.moved, one.tiers) for one in told] == [
        ("get", 42, 20, (("memory", 20),))
    ]
    assert len(order) == 10


@contextmanager
def _behind_faults() -> Iterator[tuple[KVStore, FaultyBackend]]:
    """A store whose blocks stay in the tier behind memory, which fails on demand."""
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    with open_store("memory://4MiB", faulty, policy=PassThrough()) as store:
        put(store, TOKENS, wait=True)
        quiet(store)
        store._tiered.memory.remove(_blocks(store, TOKENS))
        assert {name for name, _ in store.lookup(TOKENS).tiers} == {store.tiers[1]}
        try:
            yield store, faulty
        finally:
            faulty.heal()
        quiet(store)
        assert not store._tiered._reader._reads, "reads are left over"
        store.check()


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def _blocks(store: KVStore, tokens: Any) -> list[bytes]:
    return [store.root()[:-32] + key for key in _keys(store, tokens)]


def _keys(store: KVStore, tokens: Any) -> list[bytes]:
    row = np.asarray(tokens, np.uint32)
    return chain_keys(store.root()[-32:], row.tobytes(), store.block_tokens * 4)
