"""A breaker for each kind of call and each part of a place: only what fails is not asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tier_bench import PAGE, SHORT, Bench, get, name, put, settle, there, until

from kvkeep.store.backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.base import Room
    from kvkeep.store.tiers import TieredStore

LONG = 20.0


def emptied(store: TieredStore) -> None:
    settle(store)
    store.memory.remove([item.block for item in store.memory.backend.list()])


class Halves(MemoryBackend):
    """Two parts, even and odd blocks; the odd one can be out of order. Others may write here."""

    shared = True
    down = ""

    def describe(self) -> str:
        return "halves://"

    def part(self, block: bytes) -> str:
        return "odd" if block[-1] % 2 else "even"

    def _reach(self, blocks: Sequence[bytes]) -> None:
        if self.down and any(self.part(block) == "odd" for block in blocks):
            if self.down == "hang":
                time.sleep(SHORT * 1.5)
            raise OSError("the odd part is down")

    def put(self, block: bytes, record: memoryview) -> None:
        self._reach([block])
        super().put(block, record)

    def get(self, block: bytes, room: Room) -> memoryview | None:
        self._reach([block])
        return super().get(block, room)

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        self._reach(blocks)
        return super().sizes(blocks)

    def delete(self, blocks: Sequence[bytes]) -> int:
        self._reach(blocks)
        return super().delete(blocks)


# --- kinds of call ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "hang"])
@pytest.mark.parametrize("deadline", [None, SHORT / 4])
def test_reads_that_fail_are_left_alone_while_questions_are_answered(
    how: str, deadline: float | None, bench: Bench
) -> None:
    """A short deadline of the caller does not hide that the place hangs."""
    place = bench.disk(None)  # without a budget it is asked for everything
    tier = bench.spec(place, pause=LONG)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(8), wait=LONG)
    emptied(store)
    place.timeout = SHORT
    place.hang("get") if how == "hang" else place.fail("get")
    until(lambda: [get(store, [0], deadline=deadline), tier.stats().breakers["read"]][1] == "open")
    asked = place.calls["get"], place.calls["sizes"]
    place.timeout = LONG  # of who waits for it
    started = time.monotonic()
    for _ in range(20):
        assert get(store, range(8)) == 0
    assert time.monotonic() - started < LONG / 4
    assert (place.calls["get"], place.calls["sizes"]) == asked, "nothing is asked for in vain"
    stats = tier.stats()
    assert (stats.breaker, stats.breakers["write"], stats.parts) == ("open", "closed", {})
    assert tier.counters.skipped_calls >= 20
    put(store, range(8, 12), wait=LONG)
    assert there(tier) == list(range(12)), "it is written all the same"
    place.heal()


def test_a_read_that_succeeds_again_closes_it(bench: Bench) -> None:
    place = bench.disk(None)
    tier = bench.spec(place, pause=0.05)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(4), wait=LONG)
    emptied(store)
    place.fail("get", times=3)
    for _ in range(3):
        assert get(store, [0]) == 0
    assert tier.calls.state == "open"
    until(lambda: get(store, range(4)) == 4)
    assert tier.calls.state == "closed"
    assert tier.calls.opened == 1


def test_writes_that_fail_are_not_made_and_reads_go_on(bench: Bench) -> None:
    place = bench.disk()
    tier = bench.spec(place, pause=LONG)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(4), wait=LONG)
    place.fail("put")
    for number in range(4, 12):
        put(store, [number], wait=LONG)
        emptied(store)
        assert get(store, range(4)) == 4
    assert place.calls["put"] == 4 + 3
    assert tier.stats().breakers["write"] == "open"
    assert tier.counters.drops == 8
    assert not store.flush(1.0), "what was dropped is not there"


def test_a_question_before_a_write_does_not_hide_that_writes_fail(bench: Bench) -> None:
    """What is there already is asked for, and is no write that succeeded."""
    inner = bench.disk()
    with_others = bench.spec(inner, pause=LONG)
    store = bench.store(64, with_others)
    with_others = store.tiers[0]
    put(store, range(2), wait=LONG)
    inner.fail("put")
    for number in range(2, 8):
        with_others.catalogue.forget(name(0))  # as if another process had written it
        put(store, [0], wait=LONG)
        put(store, [number], wait=LONG)
    assert with_others.stats().breakers["write"] == "open"
    assert inner.calls["put"] == 2 + 3


def test_where_deleting_fails_nothing_more_is_evicted(bench: Bench) -> None:
    """It would be forgotten, and lie there all the same."""
    place = bench.memory(8)
    tier = bench.spec(place, pause=LONG)
    store = bench.store(64, tier)
    tier = store.tiers[0]
    put(store, range(8), wait=LONG)
    place.fail("delete")
    put(store, range(8, 20), wait=LONG)
    assert place.calls["delete"] <= 3
    assert len(tier.catalogue) >= 8 - 3
    assert tier.counters.drops == 12
    place.heal()
    tier.calls.succeeded("delete")
    for item in place.inner.list():
        if item.block not in tier.catalogue:
            tier.catalogue.add(item.block, item.size)


def test_what_cannot_be_read_below_is_kept_in_memory_again(bench: Bench) -> None:
    """Else a prompt would be computed each time for as long as reads fail."""
    place = bench.disk()
    tier = bench.spec(place, pause=LONG)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(4), wait=LONG)
    emptied(store)
    place.fail("get")
    for _ in range(3):
        get(store, range(4))
    assert tier.calls.state == "open"
    assert put(store, range(4)).kept == [0, 1, 2, 3]
    assert get(store, range(4)) == 4
    assert place.calls["put"] == 4, "and not written twice"


# --- parts of a place ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_a_part_that_is_down_does_not_stop_the_other(how: str, bench: Bench) -> None:
    place = Halves(64 * PAGE)
    place.capacity = None  # as with a server that has its own rules
    store = bench.store(16, bench.spec(place, pause=LONG))
    tier = store.tiers[0]
    put(store, range(10), wait=LONG)
    emptied(store)
    place.timeout, place.down = SHORT, how
    until(lambda: [get(store, [1]), place.part(name(1)) in tier.stats().parts][1])
    place.timeout = LONG  # the part that works may be as slow as a busy machine
    started = time.monotonic()
    for _ in range(5):
        for even in range(0, 10, 2):
            assert get(store, [even]) == 1
            assert get(store, [even + 1]) == 0
            emptied(store)
    assert time.monotonic() - started < 5 * 5 * SHORT, "the other part is not waited for"
    stats = tier.stats()
    assert stats.parts == {"odd": "open"}
    assert stats.breaker == "open"
    put(store, range(20, 30, 2), wait=LONG)
    emptied(store)
    assert [get(store, [number]) for number in range(20, 30, 2)] == [1] * 5, "written and read"
    fates = store.losses_of([name(1), name(100)])
    assert [(fate.what, fate.detail) for fate in fates if fate] == [
        ("unavailable", "breaker"), ("never", "")
    ]  # fmt: skip
    removed = store.remove([name(2)])
    assert removed.complete
    store.close(1.0)
