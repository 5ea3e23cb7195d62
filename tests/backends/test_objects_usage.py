"""`UsageLedger` compared with the place it counts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.core.errors import OutOfRoom
from kvkeep.store.backends import Listed
from kvkeep.store.backends.objects.usage import PendingChange, UsageLedger

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = [bytes([number]) * 48 for number in range(4)]
SIZES = st.integers(1, 60)


class Place:
    """Sizes of records; a listing that fails on demand."""

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
        self.ledger = UsageLedger(100, "a test", self.place.list)
        self.moves: list[tuple[PendingChange, bool]] = []  # and whether it had its effect already

    @rule(block=st.sampled_from(BLOCKS), size=SIZES)
    def begin_put(self, block: bytes, size: int) -> None:
        try:
            self.moves.append((self.ledger.putting(block, size), False))
        except OutOfRoom:
            if not self.moves:  # where nothing moves, this is so exactly when it does not fit
                held = sum(self.place.sizes.values()) - self.place.sizes.get(block, 0)
                assert held + size > 100

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), unique=True, min_size=1, max_size=2))
    def begin_delete(self, blocks: list[bytes]) -> None:
        self.moves.append((self.ledger.deleting(blocks), False))

    @precondition(lambda self: self.moves)
    @rule(which=st.integers(0, 9))
    def has_its_effect(self, which: int) -> None:
        """The place makes the change; its answer has not arrived."""
        at = which % len(self.moves)
        move, did = self.moves[at]
        if not did:
            for block in move.blocks:
                self.place.sizes.pop(block, None)
                if move.new:
                    self.place.sizes[block] = move.new
        self.moves[at] = (move, True)

    @precondition(lambda self: self.moves)
    @rule(which=st.integers(0, 9), failed=st.sampled_from([False, False, False, True]))
    def end(self, which: int, failed: bool) -> None:
        if not failed:
            self.has_its_effect(which)
        move, _ = self.moves.pop(which % len(self.moves))
        (self.ledger.failed if failed else self.ledger.done)(move)

    @invariant()
    def the_capacity_is_never_passed(self) -> None:
        assert sum(self.place.sizes.values()) <= 100

    @rule()
    def count(self) -> None:
        if not self.moves:
            assert self.ledger.used() == sum(self.place.sizes.values())

    def teardown(self) -> None:
        while self.moves:
            self.end(0, failed=False)
        self.count()


TestLedgerWalk = LedgerWalk.TestCase
TestLedgerWalk.settings = settings(max_examples=300, deadline=None)


def test_it_lists_once_and_again_after_a_failure() -> None:
    place = Place()
    place.sizes[BLOCKS[0]] = 30
    ledger = UsageLedger(100, "a test", place.list)
    assert place.listings == 0
    ledger.done(ledger.putting(BLOCKS[1], 70))
    assert (ledger.used(), place.listings) == (100, 1)
    move = ledger.putting(BLOCKS[1], 10)
    assert ledger.used() == 110, "the old one is there until the new one has come"
    ledger.failed(move)
    place.sizes[BLOCKS[2]] = 5
    assert (ledger.used(), place.listings) == (35, 2)


def test_a_failed_listing_is_repeated() -> None:
    place = Place()
    place.failing = True
    ledger = UsageLedger(100, "a test", place.list)
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            ledger.putting(BLOCKS[0], 1)
    place.failing = False
    ledger.putting(BLOCKS[0], 100)
    assert ledger.used() == 100


def test_changes_during_a_listing_count() -> None:
    """A put, a delete and a failed put, all during the listing."""
    place = Place()
    place.sizes = dict.fromkeys(BLOCKS[:3], 10)
    ledger = UsageLedger(100, "a test", place.list)
    move = ledger.putting(BLOCKS[3], 40)
    ledger.failed(ledger.putting(BLOCKS[2], 1))  # so that it lists anew
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
    ledger.done(move)
    ledger.done(ledger.deleting(BLOCKS[:2]))
    go_on.set()
    lister.join(60)
    assert used == [50]
