"""`BackendTests`: one test for each sentence of the contract in `kvkeep.store.backends.base`."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends import Backend
from kvkeep.testing.backend_hooks import Rooms, block_id, content, get, put, sizes_listed
from kvkeep.testing.backend_threads import BackendThreadTests
from kvkeep.testing.backend_walk import BackendWalkTests

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BackendTests"]

_MiB = 1 << 20
_SIZES = [
    1, 2, 7, 128, 511, 4095, 4096, 4097, 65_536, 100_003, _MiB - 1, _MiB + 129, 5 * _MiB + 3,
    8 * _MiB,
]  # fmt: skip
_CLOCKS = 60.0
"""Seconds of tolerance for the clock of another machine, or a coarse one."""


class _RecordTests(BackendThreadTests, BackendWalkTests):
    """Tests of single records."""

    def test_it_is_a_backend(self, backend: Backend) -> None:
        """The backend is a `Backend`, has a scheme and a timeout, and describes itself."""
        assert isinstance(backend, Backend)
        assert backend.scheme
        assert backend.timeout > 0
        assert backend.describe().startswith(backend.scheme)
        assert backend.describe() in repr(backend)

    def test_no_text_about_it_has_a_secret(self, backend: Backend) -> None:
        """Neither repr nor URL contains a password, before or after the first use."""
        for _ in range(2):
            for secret in self.secrets:
                assert secret not in repr(backend)
                assert secret not in backend.describe()
            put(backend, block_id(1), b"x")

    @pytest.mark.parametrize("size", _SIZES)
    def test_get_returns_what_was_put(self, backend: Backend, size: int) -> None:
        """A record is returned byte for byte, at every size, and for no other block."""
        block, record = block_id(1), content(block_id(1), 1, size)
        put(backend, block, record)
        assert get(backend, block) == record
        assert get(backend, block_id(2)) is None
        assert backend.sizes([block, block_id(2)]) == [size, None]

    def test_a_put_replaces_the_record(self, backend: Backend) -> None:
        """A put replaces the older record, larger or smaller."""
        block = block_id(1)
        for number, size in enumerate([5000, 70_000, 70_000, 3, 4096]):
            put(backend, block, content(block, number, size))
            assert get(backend, block) == content(block, number, size)
            assert sizes_listed(backend) == {block: size}

    def test_a_missing_record_is_none(self, backend: Backend) -> None:
        """`get` of a missing block returns None and does not call ``room``."""
        put(backend, block_id(1), b"there")
        for block in (block_id(2), block_id(1, space=1)):
            rooms = Rooms()
            assert backend.get(block, rooms) is None
            assert rooms.asked == []

    def test_a_record_is_read_into_the_room(self, backend: Backend) -> None:
        """``room`` is called once, with the size; its buffer is filled and returned."""
        block, rooms = block_id(1), Rooms()
        record = content(block, 1, 5001)
        put(backend, block, record)
        found = backend.get(block, rooms)
        assert rooms.asked == [5001]
        assert found is not None
        assert found.nbytes == 5001
        assert found == record
        rooms.given[0][5000] ^= 0xFF
        assert found[5000] == rooms.given[0][5000], "the returned memory is not the room's"

    def test_the_buffer_of_a_get_is_the_callers(self, backend: Backend) -> None:
        """Overwriting the returned buffer changes nothing in the backend."""
        block = block_id(1)
        put(backend, block, content(block, 1, 5000))
        found = backend.get(block, Rooms())
        assert found is not None
        found[:] = bytes(5000)
        assert get(backend, block) == content(block, 1, 5000)

    @pytest.mark.parametrize("error", [OutOfRoom(1, "a test"), LookupError("a test")], ids=type)
    def test_a_room_that_raises_stops_the_read(self, backend: Backend, error: Exception) -> None:
        """An exception of ``room`` passes unchanged; afterwards everything works."""
        block = block_id(1)
        put(backend, block, content(block, 1, 300_000))
        for _ in range(40):  # more than there are connections
            rooms = Rooms(error)
            with pytest.raises(type(error)) as caught:
                backend.get(block, rooms)
            assert caught.value is error
            assert rooms.asked == [300_000]
        assert get(backend, block) == content(block, 1, 300_000)
        put(backend, block_id(2), b"after")
        assert get(backend, block_id(2)) == b"after"

    def test_ids_are_any_bytes(self, backend: Backend) -> None:
        """Ids with zeros, newlines, slashes and other special bytes are kept apart."""
        chance = random.Random(5)  # noqa: S311 - a test, not a secret
        blocks = {bytes([value]) * BLOCK_ID_BYTES for value in (0, 10, 13, 32, 42, 46, 47, 58, 255)}
        middle = chance.randbytes(BLOCK_ID_BYTES - 2)
        blocks |= {bytes([value]) + middle + bytes([255 - value]) for value in range(0, 256, 5)}
        blocks |= {middle[:23] + bytes([value]) + middle[22:] for value in range(0, 256, 5)}
        records = {block: b"record of " + block for block in blocks}
        assert len({len(block) for block in blocks}) == 1
        for block, record in records.items():
            put(backend, block, record)
        assert sizes_listed(backend) == {block: len(r) for block, r in records.items()}
        for block, record in records.items():
            assert get(backend, block) == record


class BackendTests(_RecordTests):
    """Subclass it, implement `make_backend`, and pytest runs all tests.

    Set ``persistent = True`` if records outlive the process, implement `make_bounded` if there is a
    capacity, and `reopen` if opening an existing place differs from creating one.
    """

    def test_a_new_one_is_empty(self, backend: Backend) -> None:
        """A new backend lists nothing and holds no bytes."""
        assert sizes_listed(backend) == {}
        assert backend.used() in {None, 0}

    def test_the_list_is_complete(self, backend: Backend) -> None:
        """Each block is listed once, with its size and the time of its last use."""
        before = time.time()
        expected = {}
        for number in range(70):
            block = block_id(number, space=number % 3)
            expected[block] = 100 + number
            put(backend, block, content(block, 1, 100 + number))
        listed = list(backend.list())
        after = time.time()
        assert sorted((one.block, one.size) for one in listed) == sorted(expected.items())
        for one in listed:
            assert isinstance(one.block, bytes)
            assert before - _CLOCKS <= one.used <= after + _CLOCKS, "Unix seconds are expected"
        used = backend.used()
        assert used is None or used >= sum(expected.values())

    def test_sizes_come_in_order(self, backend: Backend) -> None:
        """`sizes` returns one size per given block, also if a block is given twice."""
        blocks = [block_id(number) for number in range(40)]
        for number in range(0, 40, 3):
            put(backend, blocks[number], bytes(number + 1))
        expected = [number + 1 if number % 3 == 0 else None for number in range(40)]
        assert backend.sizes(blocks) == expected
        assert backend.sizes(blocks[::-1]) == expected[::-1]
        assert backend.sizes([blocks[3], blocks[3], blocks[1]]) == [4, 4, None]

    def test_delete_returns_the_bytes_freed(self, backend: Backend) -> None:
        """`delete` returns the bytes of existing records; 0 the second time."""
        blocks = [block_id(number) for number in range(5)]
        for number in range(4):
            put(backend, blocks[number], content(blocks[number], 1, 1000 + number))
        assert backend.delete([blocks[4]]) == 0
        assert backend.delete([blocks[4], blocks[0], blocks[2], blocks[0]]) == 2002
        assert backend.delete([blocks[0], blocks[2]]) == 0
        assert [get(backend, block) is None for block in blocks] == [True, False, True, False, True]
        assert sizes_listed(backend) == {blocks[1]: 1001, blocks[3]: 1003}
        put(backend, blocks[0], b"again")
        assert get(backend, blocks[0]) == b"again"

    def test_empty_lists_are_nothing(self, backend: Backend) -> None:
        """Calls with empty lists do nothing."""
        assert backend.sizes([]) == []
        assert backend.delete([]) == 0
        backend.touch([])
        backend.touch([], [])

    def test_a_quarantined_record_is_not_found(self, backend: Backend) -> None:
        """No call finds a quarantined record; others stay; the block can be put again."""
        block, other = block_id(1), block_id(2)
        for one in (block, other):
            put(backend, one, content(one, 1, 5000))
        for _ in range(2):
            backend.quarantine(block, "its checksum is wrong: \n/..")
            assert get(backend, block) is None
            assert backend.sizes([block, other]) == [None, 5000]
            assert sizes_listed(backend) == {other: 5000}
            assert backend.delete([block]) == 0
        put(backend, block, b"sound")
        assert get(backend, block) == b"sound"

    def test_touch_and_flush_change_no_record(self, backend: Backend) -> None:
        """`touch` and `flush` change no record, even if repeated, and accept missing blocks."""
        block = block_id(1)
        put(backend, block, content(block, 1, 5000))
        for _ in range(2):
            backend.touch([block, block_id(2), block])
            backend.touch([block_id(2), block], [time.time() - 1, time.time()])
            backend.flush()
        assert sizes_listed(backend) == {block: 5000}
        assert get(backend, block) == content(block, 1, 5000)
        assert get(backend, block_id(2)) is None

    def test_closing_twice_is_closing_once(self, tmp_path: Path) -> None:
        """A second `close` does nothing, whether the backend was used or not."""
        for name in ("unused", "used"):
            (tmp_path / name).mkdir()
        unused = self.make_backend(tmp_path / "unused")
        unused.close()
        unused.close()
        with self.make_backend(tmp_path / "used") as backend:
            put(backend, block_id(1), b"record")
            backend.close()

    def test_flushed_records_survive_reopening(self, tmp_path: Path) -> None:
        """Flushed records are found after reopening; deleted and quarantined ones are not."""
        if not self.persistent:
            pytest.skip("this backend is not persistent")
        records = {block_id(n, space=n % 2): content(block_id(n), 1, n * 777 + 1) for n in range(9)}
        with self.make_backend(tmp_path) as backend:
            for block, record in records.items():
                put(backend, block, record)
            backend.delete([block_id(0)])
            backend.quarantine(block_id(1, space=1), "a test says so")
            backend.flush()
        del records[block_id(0)], records[block_id(1, space=1)]
        for _ in range(2):
            now = time.time()
            with self.reopen(tmp_path) as backend:
                assert sizes_listed(backend) == {block: len(r) for block, r in records.items()}
                assert all(abs(one.used - now) < 2 * _CLOCKS for one in backend.list())
                for block, record in records.items():
                    assert get(backend, block) == record
                put(backend, block_id(20), b"new")
                backend.flush()
            records[block_id(20)] = b"new"

    def test_the_capacity_is_never_exceeded(self, tmp_path: Path) -> None:
        """A full backend raises `OutOfRoom`, and nothing changes."""
        backend = self.bounded(tmp_path, _MiB)
        with backend:
            assert backend.capacity == _MiB
            kept = self._fill(backend)
            assert len(kept) >= 4, "less than half of the capacity can be used"
            with pytest.raises(OutOfRoom):
                put(backend, block_id(98), content(block_id(98), 1, _MiB + 1))
            self._overwrite(backend, kept)
            first = next(iter(kept))
            assert backend.delete([first]) == len(kept.pop(first))
            put(backend, block_id(99), content(block_id(99), 1, 100_000))
            kept[block_id(99)] = content(block_id(99), 1, 100_000)
            self._compare(backend, kept)

    def _fill(self, backend: Backend) -> dict[bytes, bytes]:
        kept: dict[bytes, bytes] = {}
        for number in range(20):
            block = block_id(number)
            record = content(block, 1, 120_000)
            try:
                put(backend, block, record)
            except OutOfRoom:
                self._compare(backend, kept)
                return kept
            kept[block] = record
            self._compare(backend, kept)
        raise AssertionError("2.4 MB went into 1 MiB")

    def _overwrite(self, backend: Backend, kept: dict[bytes, bytes]) -> None:
        """Replace a record by a larger or smaller one; `OutOfRoom` must change nothing."""
        for size in (120_000, 300_000, 50_000):
            block = next(iter(kept))
            try:
                put(backend, block, content(block, 2, size))
            except OutOfRoom:
                pass
            else:
                kept[block] = content(block, 2, size)
            self._compare(backend, kept)

    def _compare(self, backend: Backend, kept: dict[bytes, bytes]) -> None:
        assert sum(map(len, kept.values())) <= _MiB
        assert sizes_listed(backend) == {block: len(record) for block, record in kept.items()}
        used = backend.used()
        assert used is None or used <= _MiB
        for block, record in kept.items():
            assert get(backend, block) == record
