"""A bug of kvkeep is loud and charged to no backend; a backend's failure is a counted miss."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tier_bench import (
    PAGE,
    RAW,
    SHORT,
    Bench,
    checked,
    content,
    get,
    name,
    put,
    settle,
    there,
    until,
)

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.core.eviction import LRU
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, MemorySpec, Tier, TieredStore
from kvkeep.store.tiers.block_table import BlockTable
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.holds import Holds
from kvkeep.store.tiers.known import _DELETED_KEPT, KnownBlocks
from kvkeep.store.tiers.listing import Listing
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.record_codec import RecordCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends import Room


def broken(*_: object, **__: object) -> None:
    raise TypeError("planted")


def planted(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Log records at ERROR whose traceback has the planted fault."""
    return [
        record
        for record in caplog.records
        if record.levelno == logging.ERROR and record.exc_info and "planted" in str(record.exc_info)
    ]


WRITING: list[tuple[type, str]] = [
    (Catalogue, "add"),
    (Catalogue, "over_quota"),
    (RecordCodec, "encode"),
    (KnownBlocks, "is_hidden"),
]


@pytest.mark.parametrize("where", WRITING, ids=lambda where: f"{where[0].__name__}.{where[1]}")
def test_a_fault_of_ours_while_writing(
    where: tuple[type, str],
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged with its traceback, the block is dropped, and the breaker stays closed."""
    place = bench.disk()
    place.shared = True  # it is asked before each write
    store = bench.store(16, bench.spec(place, breaker_limit=1, pause=60.0))
    tier = store.tiers[0]
    owner, method = where
    real = getattr(owner, method)

    def only_in_the_tier(self: object, *args: object, **more: object) -> object:
        mine = (tier.catalogue, tier.records, tier._known)
        return broken() if any(self is one for one in mine) else real(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, only_in_the_tier)
        assert put(store, range(3)).kept == [0, 1, 2]
        settle(store)
    assert len(planted(caplog)) == 3
    assert tier.counters.drops == 3
    assert tier.counters.errors == tier.counters.skipped_calls == 0
    assert tier.breaker.opened == 0
    for number in range(3):
        loss = store.losses.of(name(number))
        assert loss is not None
        assert (loss.tier, loss.what, loss.detail) == (tier.name, "dropped", "fault")
    store.memory.remove([name(number) for number in range(3)])
    tier.relist()  # what the planted fault left unknown
    assert put(store, range(3), wait=20).kept in ([0, 1, 2], [])
    assert there(tier) == [0, 1, 2]
    assert get(store, range(3)) == 3


@pytest.mark.parametrize("method", ["verify", "decode"])
def test_a_fault_of_ours_while_reading(
    method: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.store(16, bench.spec(bench.disk(), breaker_limit=1, pause=60.0))
    tier = store.tiers[0]
    put(store, range(3), wait=20)
    store.memory.remove([name(number) for number in range(3)])
    with monkeypatch.context() as patch:
        patch.setattr(RecordCodec, method, broken)
        assert get(store, range(3)) == 0, "a miss, and nobody waits for ever"
        settle(store)
    assert planted(caplog)
    assert tier.counters.errors == tier.counters.damaged == 0
    assert tier.breaker.opened == 0
    assert get(store, range(3)) == 3


def test_a_fault_of_ours_in_the_place_of_a_record(bench: Bench) -> None:
    """A backend calls us back for the buffer: what is raised there is not the backend's."""
    tier = bench.tier(bench.disk(), breaker_limit=1, pause=60.0)
    record = memoryview(bytearray(PAGE))
    record[-RAW:] = content(name(0))
    assert tier.save(name(0), record)
    with pytest.raises(TypeError, match="planted"):
        tier.load(name(0), RAW, broken)  # type: ignore[arg-type]
    assert tier.breaker.opened == tier.counters.errors == 0


class Wraps(MemoryBackend):
    """Raises what its callback raised as a failure of its own."""

    def get(self, block: bytes, room: Room) -> memoryview | None:
        try:
            return super().get(block, room)
        except TypeError as error:
            raise BackendFailed("the room is broken") from error


def test_a_fault_of_ours_that_a_backend_wraps(bench: Bench) -> None:
    tier = bench.tier(Wraps(8 * PAGE), breaker_limit=1, pause=60.0)
    record = memoryview(bytearray(PAGE))
    record[-RAW:] = content(name(0))
    assert tier.save(name(0), record)
    with pytest.raises(TypeError, match="planted"):
        tier.load(name(0), RAW, broken)  # type: ignore[arg-type]
    assert tier.breaker.opened == tier.counters.errors == 0
    tier.backend.close()


def test_a_fault_of_ours_while_listing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = bench.disk()
    tier = bench.tier(place, breaker_limit=1, pause=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(Listing, "_records", broken)
        tier.reading.submit(tier.relist)
        assert tier.reading.wait(10)
    assert len(planted(caplog)) == 1
    assert tier.breaker.opened == tier.counters.errors == 0
    tier.relist()
    assert tier._listing.complete


def test_a_fault_of_ours_between_listed_records(bench: Bench) -> None:
    """The backend's own iterator is under way when it is raised."""
    place = bench.disk()
    tier = bench.tier(place, breaker_limit=1, pause=60.0)
    record = memoryview(bytearray(PAGE))
    for number in range(3):
        assert tier.save(name(number), record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockTable, "list", broken)
        with pytest.raises(TypeError, match="planted"):
            tier.relist()
    assert tier.breaker.opened == tier.counters.errors == 0
    assert not tier._calls.running
    tier.relist()
    assert len(tier.catalogue) == 3


@pytest.mark.parametrize(
    ("error", "level"), [(OSError("broken"), logging.INFO), (KeyError("a bug"), logging.ERROR)]
)
def test_what_a_backend_raises_is_charged_to_it(
    error: Exception, level: int, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures that the contract names are noted; any other is a bug in the backend, and loud."""
    caplog.set_level(logging.INFO, "kvkeep.tiers")
    place = bench.disk()
    tier = bench.tier(place, breaker_limit=1, pause=60.0)
    place.fail("put", error=error)
    assert not tier.save(name(0), memoryview(bytearray(PAGE)))
    assert (tier.counters.errors, tier.counters.drops) == (1, 1)
    assert tier.breaker.of("write").state == "open"
    told = [record for record in caplog.records if "put" in record.getMessage()]
    assert level in {record.levelno for record in told}
    assert any(record.exc_info for record in told) == (level == logging.ERROR)


def test_ctrl_c_in_a_call_closes_and_charges_nothing(bench: Bench) -> None:
    tier = bench.tier(bench.memory(8), breaker_limit=1, pause=60.0)
    calls = tier._calls
    interrupt: Callable[[], None] = lambda: (_ for _ in ()).throw(KeyboardInterrupt())  # noqa: E731
    with pytest.raises(KeyboardInterrupt), calls.to("get", "read") as call:
        interrupt()
    assert call.failed
    assert tier.breaker.opened == tier.counters.errors == 0
    assert not calls.running


def test_a_fault_of_ours_while_demoting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The victims are deleted, their demotions counted as dropped, and nothing stays pending."""
    store = bench.store(20, bench.memory(4), bench.memory(64), policy=Exclusive())
    upper, lower = store.tiers
    for number in range(22):
        put(store, [number], wait=20)
    settle(store)
    before = len(lower.catalogue)
    with monkeypatch.context() as patch:
        patch.setattr(RecordCodec, "decode_alone", broken)
        for number in range(22, 26):
            put(store, [number], wait=20)
        settle(store)
    assert planted(caplog)
    assert len(lower.catalogue) == before
    assert upper.counters.demotions_dropped == len(planted(caplog))
    assert sorted(item.block for item in upper.backend.list()) == sorted(upper.catalogue.blocks())
    assert not len(store._queue)
    assert upper.breaker.opened == lower.breaker.opened == 0


def test_a_block_that_moves_up_while_memory_evicts_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier deletes it just when memory asks whether the tier has it: one of them keeps it."""
    store = bench.store(20, bench.disk(), policy=Exclusive())
    tier = store.tiers[0]
    put(store, [0])
    assert store.flush(10)
    begun, go_on = threading.Event(), threading.Event()
    remove, knows = Tier.remove, Tier.knows

    def slowly(self: Tier, blocks: Sequence[bytes]) -> tuple[int, list[bytes]]:
        begun.set()
        assert go_on.wait(10)
        return remove(self, blocks)

    mover = threading.Thread(target=store._queue.move_out, args=(tier, name(0)))

    def at_the_wrong_moment(self: Tier, block: bytes) -> bool:
        answer = knows(self, block)
        if threading.current_thread() is not mover:
            go_on.set()
            mover.join(10)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Tier, "remove", slowly)
        mover.start()
        assert begun.wait(10)
        patch.setattr(Tier, "knows", at_the_wrong_moment)
        for block in store.memory.leave(PAGE):
            store._demoter._from_memory(block)
        go_on.set()
        mover.join(10)
    settle(store)
    assert get(store, [0]) == 1


def test_no_room_is_a_failure_where_nothing_is_put(bench: Bench) -> None:
    """A backend that has no room for a note failed; the block before it was written."""
    place = bench.disk()

    def no_room(space: bytes, note: bytes) -> None:
        raise OutOfRoom(100, "the directory")

    place.note_space = no_room  # type: ignore[method-assign]
    notes = {name(0)[:16]: b"{}"}
    store = TieredStore(MemorySpec(MemoryBackend(16 * PAGE)), [bench.spec(place)], notes=notes)
    tier = store.tiers[0]
    put(store, [0], wait=20)
    settle(store)
    assert there(tier) == [0]
    assert (tier.counters.drops, tier.counters.errors) == (0, 1)
    checked(store)
    store.close(20)


def test_a_record_of_another_shape_is_not_demoted_and_stays_known(bench: Bench) -> None:
    place = bench.memory(16)
    assert bench.tier(place, "int8").save(name(0), memoryview(bytearray(HEADER_BYTES + 32)))
    tier = bench.tier(place)
    tier.open()
    assert tier.knows(name(0))
    assert tier.fetch(name(0)) is None
    assert not tier.is_hidden(name(0))
    assert tier.counters.refused == 0


def test_an_empty_prompt_waits_for_writes_before_it(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place)
    place.hang("put")
    put(store, [0])
    assert there(store.tiers[0]) == []
    place.go_on_slowly(0.2, "put")
    put(store, [], wait=20)
    assert there(store.tiers[0]) == [0]


# --- deletions beside writes and reads -------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_block_that_is_evicted_and_written_again_stays(bench: Bench, kind: str) -> None:
    """A slow deletion must not take the record that was written meanwhile."""
    place = bench.disk(8) if kind == "disk" else bench.memory(8)
    store = bench.store(32, bench.spec(place, writers=2))
    tier = store.tiers[0]
    put(store, range(8), wait=20)
    store.memory.remove([name(number) for number in range(8)])
    place.hang("delete", times=1)
    put(store, [20])  # evicts block 7
    place.wait_inside("delete")
    put(store, [7])
    until(lambda: len(tier.writing._running) == 2)  # both writes have begun
    time.sleep(0.2)
    place.heal()
    settle(store)
    assert there(tier) == sorted(block[-1] for block in tier.catalogue.blocks())
    assert 7 in there(tier)


def test_a_block_that_is_read_while_it_is_evicted_is_not_known_afterwards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store(32, bench.spec(bench.memory(8), writers=2))
    tier = store.tiers[0]
    put(store, range(8), wait=20)
    settle(store)
    store.memory.remove([name(number) for number in range(8)])
    inside, go_on = threading.Event(), threading.Event()
    verify = RecordCodec.verify

    def slowly(self: RecordCodec, block: bytes, record: memoryview) -> object:
        if block == name(7):
            inside.set()
            assert go_on.wait(10)
        return verify(self, block, record)

    monkeypatch.setattr(RecordCodec, "verify", slowly)
    reader = threading.Thread(target=get, args=(store, [7]))
    reader.start()
    assert inside.wait(10)
    put(store, range(50, 54), wait=20)
    assert not tier.knows(name(7))
    go_on.set()
    reader.join(10)
    settle(store)
    assert sorted(block[-1] for block in tier.catalogue.blocks()) == there(tier)


def test_many_deletions_later_old_answers_are_not_believed() -> None:
    """Deletions are remembered one by one up to a bound, and beyond it by their number."""
    known = KnownBlocks(Catalogue(LRU, budget=1 << 20), indexed=True)
    old = known.before_query()
    for number in range(_DELETED_KEPT + 10):
        with known.removal([name(number)]):
            pass
    new = known.before_query()
    for number in (0, _DELETED_KEPT + 9, _DELETED_KEPT + 100):
        known.learn(name(number), 10, old)
        assert name(number) not in known
        known.learn(name(number), 10, new)
        assert name(number) in known
    assert len(known._deleted) == _DELETED_KEPT
    assert not known._deleting


def test_a_write_waits_for_no_deletion_that_hangs(bench: Bench) -> None:
    place = bench.disk(8)
    tier = bench.tier(place, timeout=SHORT)
    record = memoryview(bytearray(PAGE))
    with tier._known.removal([name(0)]):
        assert not tier.save(name(0), record)
    assert tier.counters.drops == 1
    assert tier.save(name(0), record)


def test_ctrl_c_while_a_prompt_begins_leaves_nothing_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store(32, bench.disk(), bench.disk(at="e"))
    put(store, range(4), wait=20)
    settle(store)
    hold_all = Holds.hold_all

    def interrupted(self: Holds, blocks: Sequence[bytes], held: list[bytes]) -> None:
        hold_all(self, blocks, held)
        if self is store.tiers[1].catalogue.holds:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Holds, "hold_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(store, range(8))
    settle(store)
    assert not any(tier.order.prompts for tier in store.tiers)
    checked(store)
