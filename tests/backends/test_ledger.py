"""The count of bytes in a place that does not count them itself, against the place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.backends import Listed
from kvkeep.backends.ledger import Ledger
from kvkeep.errors import OutOfRoom

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = [bytes([number]) * 48 for number in range(4)]
SIZES = st.integers(1, 60)


class Place:
    """Records of which only the sizes matter; a listing that fails when it is told to."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}
        self.listings = 0
        self.failing = False

    def list(self) -> Iterator[Listed]:
        if self.failing:
            raise ConnectionResetError("a test")
        self.listings += 1
        return iter([Listed(block, size, 0.0) for block, size in self.sizes.items()])


class LedgerWalk(RuleBasedStateMachine):
    """Puts and deletes that overlap, end in any order, and fail with or without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Place()
        self.ledger = Ledger(100, "a test", self.place.list)
        self.putting: list[tuple[bytes, int]] = []
        self.deleting: list[tuple[list[bytes], int]] = []

    @rule(block=st.sampled_from(BLOCKS), size=SIZES)
    def begin_put(self, block: bytes, size: int) -> None:
        if any(one == block for one, _ in self.putting):
            return
        try:
            self.ledger.reserve(block, size)
        except OutOfRoom:
            # In a place where nothing moves, this is so exactly when it does not fit.
            if not self.putting and not self.deleting:
                held = sum(self.place.sizes.values()) - self.place.sizes.get(block, 0)
                assert held + size > 100
            return
        self.putting.append((block, size))

    @precondition(lambda self: self.putting)
    @rule(which=st.integers(0, 9), arrived=st.booleans(), failed=st.booleans())
    def end_put(self, which: int, arrived: bool, failed: bool) -> None:
        block, size = self.putting.pop(which % len(self.putting))
        if arrived or not failed:
            self.place.sizes[block] = size
        if failed:
            self.ledger.unknown(size)
        else:
            self.ledger.settle(block, size)

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), unique=True))
    def begin_delete(self, blocks: list[bytes]) -> None:
        if any(one in blocks for one, _ in self.putting):
            return
        self.deleting.append((blocks, self.ledger.going(blocks)))

    @precondition(lambda self: self.deleting)
    @rule(which=st.integers(0, 9), failed=st.booleans())
    def end_delete(self, which: int, failed: bool) -> None:
        blocks, size = self.deleting.pop(which % len(self.deleting))
        moving = {block for block, _ in self.putting}
        if failed:
            self.ledger.unknown(size)
            return
        for block in blocks:
            if block not in moving:  # else it is put after this
                self.place.sizes.pop(block, None)
        self.ledger.gone(size)

    @invariant()
    def the_capacity_is_never_passed(self) -> None:
        assert sum(self.place.sizes.values()) <= 100

    def teardown(self) -> None:
        while self.deleting:
            self.end_delete(0, failed=True)
        while self.putting:
            self.end_put(0, arrived=True, failed=True)
        assert self.ledger.used() == sum(self.place.sizes.values())


TestLedgerWalk = LedgerWalk.TestCase
TestLedgerWalk.settings = settings(max_examples=200, deadline=None)


def test_it_lists_once_and_again_after_a_failure() -> None:
    place = Place()
    place.sizes[BLOCKS[0]] = 30
    ledger = Ledger(100, "a test", place.list)
    assert place.listings == 0
    ledger.reserve(BLOCKS[1], 70)
    ledger.settle(BLOCKS[1], 70)
    assert (ledger.used(), place.listings) == (100, 1)
    ledger.reserve(BLOCKS[1], 10)
    assert ledger.used() == 110, "the old one is there until the new one has come"
    ledger.unknown(10)
    place.sizes[BLOCKS[2]] = 5
    assert (ledger.used(), place.listings) == (35, 2)


def test_a_listing_that_fails_is_tried_again() -> None:
    place = Place()
    place.failing = True
    ledger = Ledger(100, "a test", place.list)
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            ledger.reserve(BLOCKS[0], 1)
    place.failing = False
    ledger.reserve(BLOCKS[0], 100)
    assert ledger.used() == 100


def test_what_changes_while_it_lists_counts() -> None:
    """A put that ended, a delete, and a failure, all behind the listing's back."""
    place = Place()
    place.sizes = dict.fromkeys(BLOCKS[:3], 10)
    ledger = Ledger(100, "a test", place.list)
    ledger.reserve(BLOCKS[3], 40)
    ledger.reserve(BLOCKS[2], 1)
    ledger.unknown(1)  # so that it lists anew
    listed, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Listed]:
        yield from place.list()
        listed.set()
        assert go_on.wait(60)

    ledger._listing = slow
    used: list[int] = []
    lister = threading.Thread(target=lambda: used.append(ledger.used()))
    lister.start()
    assert listed.wait(60)
    ledger.settle(BLOCKS[3], 40)
    ledger.gone(ledger.going(BLOCKS[:2]))
    go_on.set()
    lister.join(60)
    assert used == [50]
