"""Every counter of docs/store.md is moved by what its line names, and by nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tier_bench import PAGE, RAW, SHORT, Bench, get, name, put, settle, until

from kvkeep.store.backends.buffers import aligned
from kvkeep.store.tiers import Exclusive, Inclusive, TierCounters, TieredStore
from kvkeep.store.tiers.record import HEADER_BYTES, seal

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).parents[2] / "docs" / "store.md"
TIMES = ("read_seconds", "write_seconds")


class Moved:
    """What counters changed by while this was open; times apart."""

    def __init__(self, store: TieredStore, level: int) -> None:
        self._store, self._level = store, level
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return self._store.stats()[self._level].counters

    def by(self) -> dict[str, float]:
        settle(self._store)
        now = self._now()
        return {
            what: now[what] - was
            for what, was in self._before.items()
            if now[what] != was and what not in TIMES
        }


def gone(store: TieredStore) -> None:
    """Nothing in memory."""
    settle(store)
    store.memory.remove([item.block for item in store.memory.backend.list()])


def test_the_documented_counters_are_those_there_are() -> None:
    text = DOCS.read_text()
    table = text[text.index("| counter | if it grows |") :].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert named == [field.name for field in fields(TierCounters)]


def test_stats_are_json_and_say_what_is_there(bench: Bench) -> None:
    place = bench.disk(32)
    tier = bench.spec(place, "lossless")
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(5), wait=20)
    store.pins.pin([name(0), name(1)], 100)
    above, below = store.stats()
    assert (above.name, above.codec, above.blocks, above.used_bytes) == (
        "memory", "raw", 5, 5 * PAGE,
    )  # fmt: skip
    assert (above.capacity, above.pinned_bytes, above.breaker) == (16 * PAGE, 2 * PAGE, "closed")
    assert (below.name, below.codec, below.blocks) == (tier.name, "lossless", 5)
    assert below.used_bytes == below.counters["written_bytes"]
    assert (below.capacity, below.queued_bytes, below.breaker_opened) == (32 * PAGE, 0, 0)
    assert json.loads(json.dumps([above.as_dict(), below.as_dict()]))[1]["blocks"] == 5
    unknown = bench.store(16, bench.disk(None, at="e")).stats()[1]
    assert (unknown.blocks, unknown.used_bytes, unknown.capacity) == (None, None, None)


def test_what_waits_is_seen(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    place.hang("put")
    put(store, range(5))
    assert store.stats()[1].queued_bytes == 5 * PAGE
    place.heal()
    settle(store)
    assert store.stats()[1].queued_bytes == 0


def test_hits_and_bytes_read(bench: Bench) -> None:
    store = bench.store(16, bench.disk())
    put(store, range(4), wait=20)
    memory, disk = Moved(store, 0), Moved(store, 1)
    get(store, range(4))
    assert memory.by() == {"hits": 4, "read_bytes": 4 * PAGE}
    assert disk.by() == {}
    gone(store)
    memory, disk = Moved(store, 0), Moved(store, 1)
    get(store, range(6))
    assert memory.by() == {}
    assert disk.by() == {"hits": 4, "read_bytes": 4 * PAGE}
    assert store.stats()[1].counters["read_seconds"] > 0


def test_misses(bench: Bench) -> None:
    place = bench.memory(64)
    store = bench.store(16, place)
    put(store, range(4), wait=20)
    gone(store)
    place.inner.delete([name(2)])
    moved = Moved(store, 1)
    assert get(store, range(4)) == 2
    counts = moved.by()
    assert counts["misses"] == 1
    assert {*counts} == {"misses", "hits", "read_bytes"}


def test_late_and_skipped_calls(bench: Bench) -> None:
    place = bench.memory(64)
    store = bench.store(16, bench.spec(place, breaker_limit=1, pause=20.0))
    put(store, range(1), wait=20)
    gone(store)
    place.timeout = SHORT
    moved = Moved(store, 1)
    place.hang("get")
    assert get(store, range(1)) == 0
    assert store.stats()[1].counters["late"] == 1
    place.heal()
    counts = moved.by()  # with what came too late
    assert counts == {"late": 1, "hits": 1, "read_bytes": PAGE}
    moved = Moved(store, 1)
    assert store.stats()[1].breaker == "open"
    assert store.stats()[1].breaker_opened == 1
    assert get(store, range(1)) == 0
    assert moved.by() == {"skipped_calls": 1}


def test_late_where_too_many_wait(bench: Bench) -> None:
    place = bench.memory(64)
    tier = bench.spec(place, readers=1)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(2), wait=20)
    gone(store)
    tier.reading.limit = 1
    moved = Moved(store, 1)
    place.hang("get")
    assert get(store, range(2), deadline=0.02) == 0
    place.heal()
    settle(store)
    assert moved.by()["late"] == 1


def test_damaged(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    put(store, range(1), wait=20)
    gone(store)
    place.flip(times=1)
    moved = Moved(store, 1)
    assert get(store, range(1)) == 0
    assert moved.by() == {"damaged": 1}


def test_refused(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    other = aligned(HEADER_BYTES + 50)
    seal(other, name(0), 99, RAW)
    place.inner.put(name(0), other)
    moved = Moved(store, 1)
    assert get(store, range(1)) == 0
    assert moved.by() == {"refused": 1}


@pytest.mark.parametrize("call", ["get", "room"])
def test_errors(call: str, bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    put(store, range(1), wait=20)
    gone(store)
    place.fail(call, times=1)
    moved = Moved(store, 1)
    assert get(store, range(1)) == 0
    assert moved.by() == {"errors": 1}


def test_writes_and_already(bench: Bench) -> None:
    place = bench.disk()
    store, other = bench.store(16, place), bench.store(16, place)
    memory, disk = Moved(store, 0), Moved(store, 1)
    put(store, range(3), wait=20)
    assert memory.by() == disk.by() == {"writes": 3, "written_bytes": 3 * PAGE}
    assert store.stats()[1].counters["write_seconds"] > 0
    memory, disk = Moved(store, 0), Moved(store, 1)
    put(store, range(3), wait=20)
    assert memory.by() == {"already": 3}
    assert disk.by() == {}
    memory, disk = Moved(other, 0), Moved(other, 1)
    put(other, range(3), wait=20)
    assert memory.by() == {"writes": 3, "written_bytes": 3 * PAGE}
    assert disk.by() == {"already": 3}


def faults() -> dict[str, Callable[[Any], None]]:
    return {
        "the write failed": lambda place: place.fail("put", times=1),
        "there was no room": lambda place: place.fill_up(),
    }


@pytest.mark.parametrize("why", faults())
def test_drops(why: str, bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    faults()[why](place)
    moved = Moved(store, 1)
    put(store, range(1), wait=20)
    counts = moved.by()
    assert counts.pop("drops") == 1
    assert counts == ({"errors": 1} if why == "the write failed" else {})


def test_drops_where_a_queue_is_full(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, bench.spec(place, queue_bytes=3 * PAGE))
    place.hang("put")
    moved = Moved(store, 1)
    assert put(store, range(8)).kept == list(range(8))
    assert store.stats()[1].counters["drops"] == 5
    place.heal()
    assert moved.by() == {"drops": 5, "writes": 3, "written_bytes": 3 * PAGE}


def test_drops_where_memory_has_no_room(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(8, place)
    place.hang("put")
    put(store, range(8))  # six wait to be written
    assert store.pins.pin([name(6), name(7)], 100) == 2
    moved = Moved(store, 0)
    assert put(store, range(10, 14)).kept == []
    assert store.stats()[0].counters["drops"] == 4
    place.heal()
    assert moved.by() == {"drops": 4}


def test_evictions(bench: Bench) -> None:
    # By one writer: of two, the second may come first, and its block make room for an earlier one.
    store = bench.store(8, bench.spec(bench.memory(4), writers=1), policy=Inclusive())
    memory, below = Moved(store, 0), Moved(store, 1)
    put(store, range(6), wait=20)
    put(store, range(6, 12), wait=20)
    assert memory.by()["evictions"] == 4
    assert below.by()["evictions"] == 4
    assert below.by()["drops"] == 4, "the ends of prompts that are too long"


def test_demotions_and_those_that_were_dropped(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(8, place, policy=Exclusive())
    moved = Moved(store, 0)
    put(store, range(8))
    until(lambda: store.stats()[0].counters["demotions"] == 1)
    settle(store)
    assert moved.by() == {
        "writes": 8, "written_bytes": 8 * PAGE, "demotions": 1, "evictions": 1,
    }  # fmt: skip
    moved = Moved(store, 0)
    place.fail("put")
    put(store, range(10, 14))
    counts = moved.by()
    assert counts["demotions_dropped"] == counts["evictions"] > 0
    assert "demotions" not in counts


def test_demotions_from_tier_to_tier(bench: Bench) -> None:
    upper, lower = bench.memory(4), bench.disk()
    store = bench.store(8, upper, lower, policy=Exclusive())
    for number in range(24):
        put(store, [number])
        settle(store)
    counts = store.stats()[1].counters
    assert counts["demotions"] == counts["evictions"] == store.stats()[2].counters["writes"] > 8
    assert counts["demotions_dropped"] == 0
    lower.fail("put")
    for number in range(30, 36):
        put(store, [number])
        settle(store)
    assert store.stats()[1].counters["demotions_dropped"] > 0
