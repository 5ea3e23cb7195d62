"""The contract suite of backends: a third party's backend passes it, and faults are found by it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvkeep.backends import Backend, Listed, Room, TierURL
from kvkeep.errors import OutOfRoom
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class DictBackend(Backend):
    """What somebody else's backend may look like: complete, and as short as can be."""

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


class TestDictBackend(BackendTests):
    def make_backend(self, tmp_path: Path) -> Backend:
        return DictBackend()

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        return DictBackend(capacity)
