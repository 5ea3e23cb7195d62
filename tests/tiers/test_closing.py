"""Close: what it promises, how long it takes, and that nothing outlives it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tier_bench import RAW, SHORT, Bench, above, get, name, put, settle, there, threads_of, until

from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers import TieredStore

LONG = 20.0


def plan() -> tuple[Sequence[bytes], Sequence[int]]:
    return [name(number) for number in range(30)], [RAW] * 30


def names_of(store: TieredStore) -> list[str]:
    return [tier.name for tier in store.tiers]


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_no_thread_outlives_the_close_of_healthy_tiers(
    policy: type[Inclusive], bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads that nobody waits for any more, questions and a prefetch are on their way."""
    caplog.set_level(logging.INFO, "kvkeep.tiers")
    for number in range(5):
        places = [bench.memory(64), bench.disk(at=f"d{number}")]
        store = bench.store(64, *places, policy=policy())
        put(store, range(12))
        assert store.flush(LONG)
        store.memory.remove([name(number) for number in range(12)])
        for place in places:
            place.slow(0.03, "get", "sizes")
        handle = store.prefetch(plan)
        get(store, range(12), deadline=0.01)
        assert threads_of(*names_of(store))
        assert store.close()
        assert threads_of(*names_of(store)) == []
        assert store._reader.prefetching.wait(0.0)
        assert handle.done
        assert not store._reader._reads
    assert not caplog.records, caplog.text


def test_idle_threads_end_too(bench: Bench) -> None:
    before = {*threading.enumerate()}  # of other tests some may still end
    for _ in range(20):
        store = bench.store(16, bench.disk())
        put(store, range(4), wait=LONG)
        store.prefetch(plan).wait(LONG)
        assert store.close()
        ours = {one for one in threading.enumerate() if one.name.startswith("kvkeep")}
        assert not ours - before


def test_close_is_a_flush(bench: Bench) -> None:
    upper, lower = bench.memory(64), bench.disk()
    store = bench.store(64, upper, lower)
    for place in (upper, lower):
        place.slow(0.003, "put")
    put(store, range(40))
    assert store.close()
    assert [upper.calls["put"], lower.calls["put"]] == [40, 40]
    assert lower.calls["flush"] == lower.calls["close"] == 1
    assert len([*lower.inner.list()]) == 40


def test_close_copies_down_what_lies_in_memory_alone(bench: Bench) -> None:
    store = bench.store(32, bench.disk(), policy=Exclusive())
    put(store, range(20))
    assert above(store) == list(range(20))
    assert store.close()
    assert there(store.tiers[0]) == list(range(20))
    again = bench.store(32, bench.disk(), policy=Exclusive())
    assert get(again, range(20)) == 20


def test_a_second_close_does_nothing(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(8, place)
    assert store.close()
    assert store.close()
    assert place.calls["close"] == 1


@pytest.mark.parametrize("calls", [("put",), ("get",), ("sizes",), ("flush",), ("close",), ()])
def test_close_is_bounded_whatever_hangs(calls: tuple[str, ...], bench: Bench) -> None:
    place = bench.disk()
    fine = calls in {("get",), ("close",)}  # for what is to be written
    store = bench.store(32, bench.spec(place))
    put(store, range(4), wait=LONG)
    store.memory.remove([name(number) for number in range(4)])
    settle(store)
    place.timeout = 2.0 if fine else SHORT
    place.hang(*calls)
    handle = store.prefetch(plan)
    get(store, range(4), deadline=0.01)
    put(store, range(10, 14), wait=LONG if fine else 0.0)
    started = time.monotonic()
    good = store.close(2.0 if fine else 1.0)
    assert time.monotonic() - started < 5.0
    assert good == fine
    until(lambda: handle.done)


def test_what_could_not_be_written_is_said(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(32, bench.spec(place, writers=1, timeout=SHORT))
    place.hang("put")
    put(store, range(6))
    place.wait_inside("put")
    assert not store.close(0.5)
    place.heal()
    settle(store)
    assert place.calls["put"] == 1, "what waited was given up"
    assert store.tiers[0].counters.drops == 5


def test_who_reads_while_it_is_closed_hears_of_it(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(32, place)
    put(store, range(8), wait=LONG)
    store.memory.remove([name(number) for number in range(8)])
    place.slow(0.02, "get")
    results: list[int | str] = []

    def read() -> None:
        try:
            results.append(get(store, range(8)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at below
            results.append(type(error).__name__)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    place.wait_inside("get")
    store.close()
    for reader in readers:
        reader.join(LONG)
    assert len(results) == 4
    heard = {"IllegalStep", "BackendFailed"}
    assert all(result == 8 or result in heard for result in results), results


def test_a_flush_waits_for_what_is_written_behind_a_deletion(bench: Bench) -> None:
    """Also if the deletion ends while another tier makes its writes durable."""
    first, second = bench.disk(), bench.disk(at="e")
    store = bench.store(16, first, second)
    put(store, [0], wait=LONG)
    first.hang("delete", times=1)
    removal = threading.Thread(target=store.remove, args=([name(0)],))
    removal.start()
    until(lambda: store.tiers[0].states.deleting and 0 not in above(store))
    put(store, [0])
    second.slow(0.5, "flush", times=1)
    first.slow(1.0, "put", times=1)
    heal = threading.Timer(0.1, first.heal, ["hang"])
    heal.start()
    assert store.flush(LONG)
    assert there(store.tiers[0]) == there(store.tiers[1]) == [0]
    removal.join()
    heal.join()


def test_a_flush_says_what_waits_for_a_deletion_that_hangs(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, bench.spec(place, timeout=SHORT))
    put(store, [0], wait=LONG)
    place.hang("delete", times=1)
    store.remove([name(0)])
    put(store, [0])
    assert not store.flush()
    place.heal()
    assert store.flush(LONG)
    assert there(store.tiers[0]) == [0]
