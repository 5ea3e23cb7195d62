"""A bug of kvkeep is loud and charged to no backend; a backend's failure is a counted miss."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tier_bench import (
    PAGE,
    RAW,
    Bench,
    content,
    get,
    name,
    put,
    save,
    settle,
    there,
)

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.record_codec import RecordCodec
from kvkeep.store.tiers.states import BlockStates

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
    (Index, "add"),
    (Index, "quota"),
    (RecordCodec, "encode"),
    (BlockStates, "start"),
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
        mine = (tier.catalogue, tier.records, tier.states)
        return broken() if any(self is one for one in mine) else real(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, only_in_the_tier)
        assert put(store, range(3)).kept == [0, 1, 2]
        settle(store)
    assert len(planted(caplog)) == 3
    assert tier.counters.drops == 3
    assert tier.counters.errors == tier.counters.skipped_calls == 0
    assert tier.calls.opened == 0
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
    assert tier.calls.opened == 0
    assert get(store, range(3)) == 3


def test_a_fault_of_ours_in_the_place_of_a_record(bench: Bench) -> None:
    """A backend calls us back for the buffer: what is raised there is not the backend's."""
    tier = bench.tier(bench.disk(), breaker_limit=1, pause=60.0)
    record = memoryview(bytearray(PAGE))
    record[-RAW:] = content(name(0))
    assert not save(tier, 0, record)
    with pytest.raises(TypeError, match="planted"):
        tier.load(name(0), RAW, broken)  # type: ignore[arg-type]
    assert tier.calls.opened == tier.counters.errors == 0


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
    assert not save(tier, 0, record)
    with pytest.raises(TypeError, match="planted"):
        tier.load(name(0), RAW, broken)  # type: ignore[arg-type]
    assert tier.calls.opened == tier.counters.errors == 0
    tier.backend.close()


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
    assert save(tier, 0, memoryview(bytearray(PAGE)))
    assert (tier.counters.errors, tier.counters.drops) == (1, 1)
    assert tier.stats().breakers["write"] == "open"
    told = [record for record in caplog.records if "put" in record.getMessage()]
    assert level in {record.levelno for record in told}
    assert any(record.exc_info for record in told) == (level == logging.ERROR)


def test_ctrl_c_in_a_call_closes_and_charges_nothing(bench: Bench) -> None:
    tier = bench.tier(bench.memory(8), breaker_limit=1, pause=60.0)
    calls = tier.calls
    interrupt: Callable[[], None] = lambda: (_ for _ in ()).throw(KeyboardInterrupt())  # noqa: E731
    with pytest.raises(KeyboardInterrupt), calls.to("get", "read") as call:
        interrupt()
    assert call.failed
    assert tier.calls.opened == tier.counters.errors == 0
    assert not calls.running


class Miscounts(MemoryBackend):
    """Answers a question about fewer blocks than it was asked."""

    right = False

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        return super().sizes(blocks if self.right else blocks[1:])


def test_a_backend_that_answers_about_too_few(bench: Bench) -> None:
    """What is not written for that can be written later, and is held by nobody."""
    place = Miscounts(8 * PAGE)
    place.shared = True
    store = bench.store(16, bench.spec(place))
    tier = store.tiers[0]
    assert put(store, range(3), wait=20).kept == [0, 1, 2]
    settle(store)
    assert tier.counters.drops == 3
    assert len(tier.states) == 0
    place.right = True
    store.memory.remove([name(number) for number in range(3)])
    assert put(store, range(3), wait=20).kept == [0, 1, 2]
    assert tier.catalogue.among([name(number) for number in range(3)])
