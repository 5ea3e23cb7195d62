"""The contract suite of backends: a third party's backend passes, and it finds planted faults."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import Phase, settings

from kvkeep.core.errors import BackendFailed, KVKeepError, OutOfRoom
from kvkeep.store.backends import Backend, Listed, Room, TierURL
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class DictBackend(Backend):
    """A third party's backend: complete, and as short as possible."""

    scheme = "dict"

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._records: dict[bytes, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_url(cls, url: TierURL) -> DictBackend:
        return cls(url.size("size"))

    def put(self, block: bytes, record: memoryview) -> None:
        with self._lock:
            held = sum(len(kept) for one, (kept, _) in self._records.items() if one != block)
            if self.capacity is not None and held + len(record) > self.capacity:
                raise OutOfRoom(len(record), self.describe())
            self._records[block] = (bytes(record), time.time())

    def get(self, block: bytes, room: Room) -> memoryview | None:
        record, _ = self._records.get(block, (None, 0.0))
        if record is None:
            return None
        into = room(len(record))
        into[:] = record
        return into

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        found = [self._records.get(block) for block in blocks]
        return [None if one is None else len(one[0]) for one in found]

    def delete(self, blocks: Sequence[bytes]) -> int:
        with self._lock:
            return sum(len(self._records.pop(block, (b"", 0.0))[0]) for block in blocks)

    def list(self) -> Iterator[Listed]:
        with self._lock:
            records = list(self._records.items())
        return iter([Listed(block, len(record), used) for block, (record, used) in records])


class KeptDict(DictBackend):
    """A backend whose place can be opened again."""

    places: ClassVar[dict[Path, dict[bytes, tuple[bytes, float]]]] = {}

    def __init__(self, place: Path) -> None:
        super().__init__()
        self._records = self.places.setdefault(place, self._records)


class TestDictBackend(BackendTests):
    def make_backend(self, tmp_path: Path) -> Backend:
        return DictBackend()

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        return DictBackend(capacity)


class TestKeptDict(BackendTests):
    persistent = True
    secrets = ("hidden",)

    def make_backend(self, tmp_path: Path) -> Backend:
        return KeptDict(tmp_path)


class TestTheOneInTheDocuments(BackendTests):
    persistent = True

    def make_backend(self, tmp_path: Path) -> Backend:
        backend = documented()(tmp_path / "kv.db")
        assert isinstance(backend, Backend)
        return backend


@functools.cache
def documented() -> Any:
    """The class that docs/backends.md shows."""
    text = (Path(__file__).parents[2] / "docs" / "backends.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("\n\n\nwith ")[0]
    shown: dict[str, Any] = {}
    exec(code, shown)
    return shown["SQLiteBackend"]


def test_a_url_opens_it() -> None:
    assert DictBackend.from_url(TierURL("dict://?size=1KiB")).capacity == 1024


# -- faults, each found by a test of the suite -----------------------------------------------------


class KeepsTheBuffer(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        self._records[block] = (record, time.time())  # type: ignore[assignment]


class WritesIntoTheBuffer(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        super().put(block, record)
        record[0] ^= 1


class KeepsThePadding(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        super().put(block, memoryview(bytes(record) + bytes(-len(record) % 4096)))


class KeepsTheFirst(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        if block not in self._records:
            super().put(block, record)


class KeepsTheLonger(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        old, _ = self._records.get(block, (b"", 0.0))
        super().put(block, memoryview(bytes(record) + old[len(record) :]))


class GivesItsOwnMemory(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        found = super().get(block, room)
        return None if found is None else memoryview(bytearray(found))


class GivesWhatItKeeps(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        self._records[block] = (bytearray(record), time.time())  # type: ignore[assignment]

    def get(self, block: bytes, room: Room) -> memoryview | None:
        return None if super().get(block, room) is None else memoryview(self._records[block][0])


class AsksForRoomTwice(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        super().get(block, room)
        return super().get(block, room)


class AsksForTooMuch(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        return super().get(block, lambda size: room(size + 1)[:size])


class AsksWithoutNeed(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        found = super().get(block, room)
        if found is None:
            room(0)
        return found


class SwallowsTheRoomsError(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        try:
            return super().get(block, room)
        except OutOfRoom:
            return None


class TranslatesTheRoomsError(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        try:
            return super().get(block, room)
        except Exception as error:
            raise BackendFailed("get") from error


class RunsOutOfConnections(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        if self.__dict__.setdefault("lost", 0) == 32:
            raise BackendFailed("no connection is free")
        self.lost += 1
        found = super().get(block, room)
        self.lost -= 1  # not where the room has raised
        return found


class RaisesForAMiss(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        assert block in self._records, "that is no assertion for a backend"
        return super().get(block, room)


class CutsIdsAtZeros(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        super().put(block.rstrip(b"\0").ljust(len(block), b"\0"), record)

    def get(self, block: bytes, room: Room) -> memoryview | None:
        return super().get(block.rstrip(b"\n").ljust(len(block), b"\0"), room)


class IgnoresTheSpace(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        super().put(bytes(16) + block[16:], record)

    def get(self, block: bytes, room: Room) -> memoryview | None:
        return super().get(bytes(16) + block[16:], room)


class FreesTwice(DictBackend):
    def delete(self, blocks: Sequence[bytes]) -> int:
        freed = sum(size or 0 for size in self.sizes(blocks))
        super().delete(blocks)
        return freed


class CountsRecords(DictBackend):
    def delete(self, blocks: Sequence[bytes]) -> int:
        before = len(self._records)
        super().delete(blocks)
        return before - len(self._records)


class ForgetsTheOrder(DictBackend):
    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        return super().sizes(sorted(blocks))


class ListsAPage(DictBackend):
    def list(self) -> Iterator[Listed]:
        return itertools.islice(super().list(), 50)


class ListsTwice(DictBackend):
    def list(self) -> Iterator[Listed]:
        return itertools.chain(super().list(), itertools.islice(super().list(), 1))


class ListsMilliseconds(DictBackend):
    def list(self) -> Iterator[Listed]:
        return (one._replace(used=one.used * 1000) for one in super().list())


class ListsWhileItChanges(DictBackend):
    def list(self) -> Iterator[Listed]:
        for block, (record, used) in self._records.items():
            time.sleep(0.001)
            yield Listed(block, len(record), used)


class CountsTooLittle(DictBackend):
    def used(self) -> int | None:
        return len(self._records)


class KeepsTheBad(DictBackend):
    def quarantine(self, block: bytes, reason: str) -> None:
        """Keeps it."""


class ListsTheBad(DictBackend):
    def quarantine(self, block: bytes, reason: str) -> None:
        record = self._records.pop(block, (b"", 0.0))
        self._records[b"bad" + block] = record


class TouchBringsBack(DictBackend):
    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        for block in blocks:
            self._records.setdefault(block, (b"", 0.0))


class ClosesOnce(DictBackend):
    def close(self) -> None:
        del self._records


class TellsThePassword(DictBackend):
    def describe(self) -> str:
        return "dict://user:hidden@host"


class PutsInTwoSteps(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        half = len(record) // 2
        super().put(block, memoryview(bytes(record[:half]) + bytes(len(record) - half)))
        time.sleep(0.002)
        super().put(block, record)


class ReadsInTwoSteps(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        found = super().get(block, room)
        if found is not None:
            time.sleep(0.002)
            later, _ = self._records.get(block, (b"", 0.0))
            half = min(len(found), len(later)) // 2
            found[:half] = later[:half]
        return found


class ReadsWhatWas(DictBackend):
    def get(self, block: bytes, room: Room) -> memoryview | None:
        record = self.__dict__.setdefault("seen", {}).setdefault(
            block, self._records.get(block, (None, 0.0))[0]
        )
        if record is None:
            del self.seen[block]
            return None
        into = room(len(record))
        into[:] = record
        return into


class GoesBackInTime(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        before = self._records.get(block)
        super().put(block, record)
        if before is not None:
            time.sleep(0.002)
            self._records[block] = before
            time.sleep(0.002)
            super().put(block, record)


class MixesThreadsUp(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        self.scratch = bytes(record)
        time.sleep(0.001)
        super().put(block, memoryview(self.scratch))


class PassesTheCapacity(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        held = sum(one.size for one in self.list())
        if self.capacity is not None and held > self.capacity:
            raise OutOfRoom(len(record))
        self._records[block] = (bytes(record), time.time())


class HasLessThanItSays(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        held = sum(one.size for one in self.list()) * 4
        if self.capacity is not None and held > self.capacity:
            raise OutOfRoom(len(record))
        super().put(block, record)


class FailsWhenItIsFull(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        try:
            super().put(block, record)
        except OutOfRoom as error:
            raise BackendFailed("full") from error


class EvictsByItself(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        while True:
            try:
                return super().put(block, record)
            except OutOfRoom:
                if not self._records:
                    raise
                self._records.pop(next(iter(self._records)))


class LosesTheOldWhenItIsFull(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        try:
            super().put(block, record)
        except OutOfRoom:
            self.delete([block])
            raise


class LooksBeforeItPuts(DictBackend):
    def put(self, block: bytes, record: memoryview) -> None:
        held = sum(one.size for one in self.list())
        if self.capacity is not None and held + len(record) > self.capacity:
            raise OutOfRoom(len(record))
        time.sleep(0.002)
        self._records[block] = (bytes(record), time.time())


class ForgetsOnReopening(KeptDict):
    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._records.clear()


class RemembersTheBad(KeptDict):
    def quarantine(self, block: bytes, reason: str) -> None:
        self._records = dict(self._records)  # in this process alone
        del self._records[block]


WALK = "test_any_walk_agrees_with_a_dict"
ROUND_TRIP = "test_get_returns_what_was_put"
ROOM = "test_a_record_is_read_into_the_room"
NO_ROOM = "test_a_room_that_raises_stops_the_read"
CROWD = "test_eight_threads_never_mix_up_records"
READERS = "test_readers_of_a_block_being_written_get_one_whole_record"
CAPACITY = "test_the_capacity_is_never_exceeded"

FAULTS: list[tuple[type[DictBackend], str]] = [
    (KeepsTheBuffer, ROUND_TRIP),
    (WritesIntoTheBuffer, ROUND_TRIP),
    (KeepsThePadding, ROUND_TRIP),
    (KeepsTheFirst, "test_a_put_replaces_the_record"),
    (KeepsTheLonger, "test_a_put_replaces_the_record"),
    (GivesItsOwnMemory, ROOM),
    (GivesWhatItKeeps, "test_the_buffer_of_a_get_is_the_callers"),
    (AsksForRoomTwice, ROOM),
    (AsksForTooMuch, ROOM),
    (AsksWithoutNeed, "test_a_missing_record_is_none"),
    (SwallowsTheRoomsError, NO_ROOM),
    (TranslatesTheRoomsError, NO_ROOM),
    (TranslatesTheRoomsError, WALK),
    (RunsOutOfConnections, NO_ROOM),
    (RaisesForAMiss, "test_a_missing_record_is_none"),
    (CutsIdsAtZeros, "test_ids_are_any_bytes"),
    (IgnoresTheSpace, "test_a_missing_record_is_none"),
    (FreesTwice, "test_delete_returns_the_bytes_freed"),
    (FreesTwice, WALK),
    (CountsRecords, "test_delete_returns_the_bytes_freed"),
    (ForgetsTheOrder, "test_sizes_come_in_order"),
    (ListsAPage, "test_the_list_is_complete"),
    (ListsTwice, "test_the_list_is_complete"),
    (ListsMilliseconds, "test_the_list_is_complete"),
    (ListsWhileItChanges, CROWD),
    (CountsTooLittle, "test_the_list_is_complete"),
    (KeepsTheBad, "test_a_quarantined_record_is_not_found"),
    (ListsTheBad, "test_a_quarantined_record_is_not_found"),
    (TouchBringsBack, "test_touch_and_flush_change_no_record"),
    (ClosesOnce, "test_closing_twice_is_closing_once"),
    (TellsThePassword, "test_no_text_about_it_has_a_secret"),
    (PutsInTwoSteps, READERS),
    (ReadsInTwoSteps, READERS),
    (ReadsWhatWas, WALK),
    (GoesBackInTime, READERS),
    (MixesThreadsUp, CROWD),
    (PassesTheCapacity, CAPACITY),
    (HasLessThanItSays, CAPACITY),
    (FailsWhenItIsFull, CAPACITY),
    (EvictsByItself, CAPACITY),
    (LosesTheOldWhenItIsFull, CAPACITY),
    (LooksBeforeItPuts, "test_threads_cannot_exceed_the_capacity_together"),
    (ForgetsOnReopening, "test_flushed_records_survive_reopening"),
    (RemembersTheBad, "test_flushed_records_survive_reopening"),
]


FOUND = (
    AssertionError, KVKeepError, RuntimeError, AttributeError, ExceptionGroup,
    pytest.fail.Exception,
)  # fmt: skip


@pytest.fixture
def found_is_enough() -> Iterator[None]:
    """Do not shrink failing walks, which takes long."""
    before = settings.get_current_profile_name()
    settings.register_profile("found", settings(), phases=[Phase.generate])
    settings.load_profile("found")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("found_is_enough")
@pytest.mark.parametrize(
    ("fault", "test"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_suite_finds(fault: type[DictBackend], test: str, tmp_path: Path) -> None:
    kept = issubclass(fault, KeptDict)

    class Suite(BackendTests):
        persistent = kept
        examples = 300
        secrets = ("hidden",)

        def make_backend(self, tmp_path: Path) -> Backend:
            return fault(tmp_path) if kept else fault()  # type: ignore[arg-type]

        def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
            return fault(capacity)  # type: ignore[arg-type]

    given = {"tmp_path": tmp_path, "size": 5000, "error": OutOfRoom(1, "a test")}
    if "backend" in (wanted := inspect.signature(getattr(Suite, test)).parameters):
        given["backend"] = Suite().make_backend(tmp_path)
    arguments = {name: given[name] for name in wanted if name != "self"}
    with pytest.raises(FOUND):
        getattr(Suite(), test)(**arguments)
