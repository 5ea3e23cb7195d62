"""Ctrl-C, panics of libraries and unlucky instants: whatever is raised where, nothing is leaked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tier_bench import PAGE, RAW, Bench, above, checked, content, get, name, put, settle, there

from kvkeep.core.errors import IllegalStep
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import KVStore
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, MemorySpec, tiered
from kvkeep.store.tiers.buffer import SpareBuffers
from kvkeep.store.tiers.reading import SharedRead
from kvkeep.store.tiers.tiering import Planner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Panic(BaseException):
    """What a library written in another language raises when it is broken."""


def raises_at(last: int, error: BaseException) -> Callable[[int, memoryview], None]:
    """A sink or fill that does its work up to a block, and not that."""

    def copy(at: int, raw: memoryview) -> None:
        if at == last:
            raise error
        if not raw.readonly:
            raw[:] = content(name(at), len(raw))

    return copy


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Panic(), ValueError("no such tensor")])
def test_a_fill_that_raises(bench: Bench, error: BaseException) -> None:
    """What came before it is kept; its own room is free again, and the block can be put."""
    store = bench.store(8, bench.disk())
    blocks = [name(number) for number in range(6)]
    with pytest.raises(type(error)):
        store.write(blocks, [RAW] * 6, raises_at(3, error))
    settle(store)
    checked(store)
    assert above(store) == there(store.tiers[0]) == [0, 1, 2]
    assert put(store, range(6)).kept == [3, 4, 5]
    assert get(store, range(6)) == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Panic(), ValueError("no such tensor")])
def test_a_sink_that_raises(bench: Bench, error: BaseException) -> None:
    """What was read ahead is let go, from memory or on its way; it can be read again."""
    store = bench.store(8, bench.disk())
    put(store, range(16), wait=10)
    blocks = [name(number) for number in range(16)]
    for last in (0, 3, 15):
        with pytest.raises(type(error)):
            store.read(blocks, [RAW] * 16, raises_at(last, error))
        settle(store)
        checked(store)
    assert get(store, range(16)) == 16


def test_ctrl_c_while_a_full_queue_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the block's room nor its mark stays: it can be evicted, and written later."""
    place = bench.disk()
    tier = bench.spec(place, writers=1, queue_bytes=PAGE)
    store = bench.store(8, tier)
    tier = store.tiers[0]
    place.hang("put")
    put(store, [0])
    place.wait_inside("put")
    wait = threading.Condition.wait

    def interrupted(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(store, [1, 2], wait=10)
    monkeypatch.undo()
    assert tier.states.under_way() == [name(0)]
    place.heal()
    settle(store)
    checked(store)
    assert above(store) == [0, 1]
    assert put(store, [1, 2], wait=10).kept == [1]
    assert there(tier) == [0, 1, 2]


def test_a_place_that_panics_while_a_promoted_block_is_taken_away(bench: Bench) -> None:
    """The block can still be moved down again."""
    place = bench.disk()
    store = bench.store(8, place, policy=Exclusive())
    put(store, range(2))
    assert store.flush(10)
    store.memory.remove([name(number) for number in range(2)])
    panic: Any = Panic()
    place.fail("delete", error=panic)
    assert get(store, range(2)) == 2
    settle(store)
    assert place.calls["delete"]
    place.heal()
    checked(store)
    assert store.flush(10)
    assert there(store.tiers[0]) == [0, 1]


def test_who_joins_a_flight_that_nobody_can_make(bench: Bench) -> None:
    """It may wait before that one was started, of which there is nothing to wait for."""
    over: list[SharedRead] = []
    flight = SharedRead(MemorySpec(MemoryBackend(PAGE)), name(0), RAW, [], over.append,
        buffers=SpareBuffers(0))  # fmt: skip
    assert flight.join()
    assert flight.join()
    assert flight.wait(None) is None
    flight.start()
    assert flight.wait(None) is None
    assert over[0] is flight
    del bench


class Closing(Planner):
    """Memory is closed, by another thread say, at the instant when a block is to move down."""

    memory: MemoryBackend | None = None

    def below(self, block: bytes, source: int) -> tuple[int | None, int | None]:
        if self.memory is not None:
            self.memory.close()
        return super().below(block, source)


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> type[Closing]:
    monkeypatch.setattr(tiered, "Planner", Closing)
    monkeypatch.setattr(Closing, "memory", None)
    return Closing


def test_a_store_that_is_closed_in_the_middle_of_a_flush(
    tmp_path: Path, closing: type[Closing]
) -> None:
    tiers = ["memory://1MiB", f"file://{tmp_path}/d?size=1MiB"]
    with KVStore(KVGeometry(1, 1, 8), model="m@1", tiers=tiers, policy=Exclusive()) as store:
        store.put(list(range(256)), torch.zeros(1, 2, 256, 1, 8, dtype=torch.bfloat16))
        closing.memory = store._tiered.memory.backend
        with pytest.raises(IllegalStep, match="closed by another thread"):
            store.flush(10)


def no_start(error: BaseException) -> Callable[[threading.Thread], None]:
    """What starts no thread."""

    def start(_thread: threading.Thread) -> None:
        raise error

    return start


def test_ctrl_c_while_a_thread_starts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is dropped or done, not both; none waits for a thread that is not there."""
    store = bench.store(8, bench.disk(None))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_start(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            put(store, [0])
    assert store.tiers[0].writing.wait(0.0)
    settle(store)
    checked(store)
    assert store.tiers[0].counters.drops == 1
    put(store, range(1, 4), wait=10)
    assert there(store.tiers[0]) == [1, 2, 3]


def test_a_removal_without_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be deleted is said, is not found, and can be put again."""
    store = bench.store(8, bench.disk(), bench.disk(at="e"))
    put(store, range(3), wait=10)
    names = tuple(tier.name for tier in store.tiers)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_start(RuntimeError("no more threads")))
        assert store.remove([name(0)]).failed == names

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_start(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.remove([name(1)])
    assert not store._remover.running
    assert store.locate_each([name(number) for number in range(3)]) == [None, None, 0]
    put(store, range(3), wait=10)
    assert store.flush(1)
    assert all(len(there(tier)) == 3 and len(tier.states) == 0 for tier in store.tiers)
    assert store.remove([name(number) for number in range(3)]).complete


def test_a_put_without_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier is not written, and that is counted; the put does not fail."""
    store = bench.store(8, bench.disk(None))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_start(RuntimeError("no more threads")))
        assert put(store, [0]).kept == [0]
    assert store.tiers[0].counters.drops == 1
    put(store, range(1, 4), wait=10)
    assert there(store.tiers[0]) == [1, 2, 3]
