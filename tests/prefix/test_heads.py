"""The sibling that begins most alike, against looking at all of them."""

from __future__ import annotations

import random
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.core.prefix import trails
from kvkeep.core.prefix.trails import Heads, common_bytes, common_head

WIDTH = 4


def naive_common(left: bytes, right: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right)))  # noqa: B905


few = st.binary(max_size=12) | st.text("ab", max_size=12).map(str.encode)


@given(few, few)
def test_common_head(left: bytes, right: bytes) -> None:
    assert common_head(left, right) == naive_common(left, right)
    assert common_head(left, left + right) == len(left)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 511, 512, 513, 4096, 5000])
def test_common_bytes_finds_the_one_place_that_differs(length: int) -> None:
    run = bytes(random.Random(length).randbytes(length))
    assert common_bytes(memoryview(b"zz" + run)[2:], run) == length
    assert common_bytes(memoryview(run), run + b"zz") == length
    for at in {0, 1, length // 2, length - 2, length - 1} & set(range(length)):
        other = bytearray(run)
        other[at] ^= 0x80
        assert common_bytes(memoryview(b"zz" + other)[2:], run) == at
        assert common_bytes(memoryview(run + b"zz"), bytes(other)) == at


class HeadsMachine(RuleBasedStateMachine):
    """Children come and go, as in a node; the answer must be as good as that of a full search."""

    keys = st.text("\x00\x01\x7f", min_size=WIDTH, max_size=WIDTH).map(str.encode)

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()
        self.alive: dict[bytes, None] = {}
        self.were: set[bytes] = set()

    @rule(key=keys)
    def add(self, key: bytes) -> None:
        if key not in self.alive:
            self.alive[key] = None
            self.heads.add(key, self.alive)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[key]  # and nobody is told
        self.were.add(key)

    @precondition(lambda self: self.were)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        self.add(data.draw(st.sampled_from(sorted(self.were))))

    @rule(key=keys | st.binary(max_size=WIDTH))
    def find(self, key: bytes) -> None:
        found = self.heads.closest(key, self.alive)
        if not self.alive:
            assert found is None
            return
        assert found is not None
        nearest, common = found
        assert nearest in self.alive
        assert common == naive_common(key, nearest)
        assert common == max(naive_common(key, other) for other in self.alive)

    @invariant()
    def is_in_order(self) -> None:
        check(self.heads, self.alive)


def check(order: Heads, alive: dict[bytes, None]) -> None:
    keys = [key for block in order._blocks for key in block]
    assert keys == sorted(set(keys))
    assert len(keys) == order._count
    assert set(alive) <= set(keys)
    assert len(order._blocks) == len(order._last)
    assert order._last == sorted(order._last)
    for block, last in zip(order._blocks, order._last, strict=True):
        assert all(key <= last for key in block)
        assert len(block) <= 2 * trails._BLOCK


class SmallBlocks(HeadsMachine):
    """The same with blocks of two keys: they are split and emptied all the time."""

    def __init__(self) -> None:
        super().__init__()
        self._block, trails._BLOCK = trails._BLOCK, 2

    def teardown(self) -> None:
        trails._BLOCK = self._block


TestHeads = HeadsMachine.TestCase
TestSmallBlocks = SmallBlocks.TestCase
for case in (TestHeads, TestSmallBlocks):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Counted(bytes):
    """A key that counts the comparisons made with it; a search makes few, whatever is there."""

    comparisons = 0

    def __lt__(self, other: Any) -> bool:
        Counted.comparisons += 1
        return bytes.__lt__(self, other)

    __hash__ = bytes.__hash__


def test_cost_does_not_grow_with_the_number_of_siblings() -> None:
    counts = []
    for siblings in (1_000, 64_000):
        rng = random.Random(siblings)
        order, alive = Heads(), {}
        for _ in range(siblings):
            key = Counted(rng.randbytes(16))
            alive[key] = None
            order.add(key, alive)
        check(order, alive)
        Counted.comparisons = 0
        for _ in range(100):
            order.closest(Counted(rng.randbytes(16)), alive)
        counts.append(Counted.comparisons / 100)
    assert counts[0] > 0
    assert counts[1] <= counts[0] + 7, f"comparisons for one search: {counts}"  # 64 is 2 to the 6
