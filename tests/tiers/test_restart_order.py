"""What was used last goes last, in the next process too, however late its place hears of it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tier_bench import PAGE, Bench, get, name, put, settle

from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def test_what_a_flush_tells_of_is_as_old_as_it_is(bench: Bench, tmp_path: Path) -> None:
    """A second use within seconds is told of by the flush alone, which may come hours later."""
    place = DiskBackend(tmp_path / "d", 8 * PAGE, sync="never")
    store = bench.store(32, place)
    start = time.time() - 3000

    def passed(seconds: float) -> None:
        store.tiers[0].catalogue._clock = lambda: start + seconds

    def written(numbers: Iterable[int], seconds: float) -> None:
        passed(seconds)
        put(store, numbers, wait=20)
        settle(store)
        for number in numbers:
            os.utime(place._directory.path(name(number)), (start + seconds, start + seconds))

    written(range(4), 0)
    passed(1)
    assert get(store, range(4)) == 4
    written(range(20, 24), 1000)
    passed(2000)
    assert get(store, range(20, 24)) == 4
    settle(store)
    passed(3000)
    assert store.close(20)
    again = bench.store(32, DiskBackend(tmp_path / "d", 8 * PAGE, sync="never"))
    put(again, range(30, 34), wait=20)
    settle(again)
    found = sorted(int.from_bytes(one.block[16:], "big") for one in again.tiers[0].backend.list())
    assert found == [*range(20, 24), *range(30, 34)], "the first four are older"
