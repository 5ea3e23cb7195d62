"""`BlockStore` where the caller copies, and what it knows without asking."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.store import BlockStore

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [bytes([i]) * 32 for i in range(12)]


def fill(at: int, raw: memoryview) -> None:
    raw[:] = bytes([at]) * len(raw)


def test_scattered_out_and_in() -> None:
    got: dict[int, bytes] = {}
    with BlockStore("a", tiers=["memory://1MiB"]) as store:
        sizes = [10 + i for i in range(12)]
        assert store.write(KEYS, sizes, fill) == 12
        assert store.read(KEYS, sizes, lambda i, raw: got.__setitem__(i, bytes(raw))) == 12
        assert got == {i: bytes([i]) * (10 + i) for i in range(12)}
        filled: list[int] = []
        assert store.write(KEYS, sizes, lambda at, _: filled.append(at)) == 12
        assert filled == []  # what is here is not copied again
        got.clear()
        called = iter([False, False, True])
        stop = store.read(
            KEYS, sizes, lambda i, raw: got.__setitem__(i, b""), cancelled=lambda: next(called)
        )
        assert stop == len(got) == 2


def test_what_filling_raises_is_raised_and_not_kept() -> None:
    def fails(at: int, raw: memoryview) -> None:
        raw[:] = bytes(len(raw))
        if at == 1:
            raise KeyError(at)

    with BlockStore("a", tiers=["memory://1MiB"]) as store:
        with pytest.raises(KeyError):
            store.write(KEYS[:3], [8] * 3, fails)
        assert store.unknown(KEYS[:3]) == [1, 2]
        store.check()


@pytest.mark.parametrize("sizes", [[8], [8, 0], [8, "8"]])
def test_sizes_that_are_none(sizes: list[int]) -> None:
    with BlockStore("a", tiers=["memory://1MiB"]) as store:
        with pytest.raises(InvalidValue):
            store.write(KEYS[:2], sizes, fill)
        with pytest.raises(InvalidValue):
            store.read(KEYS[:2], sizes, lambda _, __: None)


def test_known_without_asking(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/kv?size=1MiB"
    blocks = [os.urandom(4096)] * 12
    with BlockStore("a", tiers=["memory://1MiB"]) as store:
        assert not store.must_ask
        store.put(KEYS[:5] + KEYS[7:], [*blocks[:5], *blocks[7:]])
        assert store.knows(KEYS) == 5
        assert store.knows(KEYS[7:]) == 5
        assert store.knows([]) == 0
        assert store.unknown(KEYS) == [5, 6]
    # In a small memory and on a disk: runs here and there, and all of it known.
    with BlockStore("a", tiers=["memory://32KiB", place]) as store:
        store.put(KEYS[:6], blocks[:6], wait=30)
        store.put(KEYS[7:9], blocks[7:9], wait=30)
        assert store.stats()[0].blocks < 8
        store.get(KEYS[1:2], [memoryview(bytearray(4096))])
        assert store.knows(KEYS) == 6
        assert store.unknown(KEYS) == [6, 9, 10, 11]
        assert store.must_ask  # others may write to the directory
    with BlockStore("a", tiers=["memory://32KiB", place]) as store:
        assert store.knows(KEYS) == 6
    with BlockStore("b", tiers=["memory://32KiB", place]) as store:
        assert store.knows(KEYS) == 0


def test_a_question_that_has_no_time_is_answered_by_what_is_known(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/kv?size=1MiB"
    with (
        BlockStore("a", tiers=["memory://1MiB", place]) as mine,
        BlockStore("a", tiers=["memory://1MiB", place]) as other,
    ):
        other.put(KEYS[:3], [b"x" * 4096] * 3, wait=30)
        assert mine.knows(KEYS) == 0
        assert mine.lookup(KEYS, deadline=0.0) == 0
        assert mine.lookup(KEYS, deadline=30) == 3
        with pytest.raises(InvalidValue):
            mine.lookup(KEYS, deadline=float("nan"))
