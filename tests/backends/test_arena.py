"""The arena compared with a naive one: which extents are allocated, and that they tile it."""

from __future__ import annotations

import gc
import resource
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep import InvalidValue
from kvkeep.store.backends import ALIGNMENT
from kvkeep.store.backends.arena import Arena

UNIT = ALIGNMENT


def address(view: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("wrong", [0, 1, UNIT - 1, -UNIT, True, 8192.0, "1GiB", None])
def test_an_arena_has_a_size(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="size of an arena"):
        Arena(wrong)


@pytest.mark.parametrize("size", [1 << 62, 1 << 80])
def test_a_size_the_system_refuses_is_an_error(size: int) -> None:
    with pytest.raises(InvalidValue, match=r"more than the system gives .*take less"):
        Arena(size)


def test_it_is_aligned_and_its_size_is_rounded_down() -> None:
    arena = Arena(5 * UNIT - 1)
    assert arena.size == arena.buffer.nbytes == arena.largest == arena.free_bytes == 4 * UNIT
    assert address(arena.buffer) % UNIT == 0
    offset = arena.allocate(10)
    assert offset is not None
    assert address(arena.view(offset, 10)) % UNIT == 0
    assert arena.view(offset, 10).nbytes == 10
    arena.check()


def test_memory_is_resident_only_when_used() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena = Arena(1 << 30)
    offset = arena.allocate(1 << 29)
    assert offset is not None
    arena.view(offset, 1 << 29)[0] = 1
    # Even in huge pages the whole of it would be 512 faults.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 256


def test_the_smallest_fitting_extent_is_used() -> None:
    arena = Arena(64 * UNIT)
    taken = [arena.allocate(size * UNIT) for size in (3, 1, 5, 1, 4, 1)]
    for at, size in ((0, 3), (2, 5), (4, 4)):
        offset = taken[at]
        assert offset is not None
        arena.free(offset, size * UNIT)
    assert arena.allocate(4 * UNIT) == taken[4]
    assert arena.allocate(2 * UNIT) == taken[0]
    assert arena.allocate(5 * UNIT) == taken[2]
    assert arena.allocate(1) == 2 * UNIT  # what was left of the 3
    arena.check()


def test_adjacent_free_extents_merge() -> None:
    arena = Arena(8 * UNIT)
    offsets = [arena.allocate(UNIT) for _ in range(8)]
    assert None not in offsets
    assert (arena.largest, arena.free_bytes, arena.allocate(1)) == (0, 0, None)
    for at in (0, 2, 4, 6):
        arena.free(at * UNIT, UNIT)
    assert (arena.largest, arena.free_bytes) == (UNIT, 4 * UNIT)
    assert arena.allocate(UNIT + 1) is None
    for at in (1, 3, 5, 7):
        arena.free(at * UNIT, UNIT)
        arena.check()
    assert arena.largest == 8 * UNIT
    assert arena.allocate(8 * UNIT) == 0


def test_freeing_an_unallocated_extent_fails() -> None:
    arena = Arena(8 * UNIT)
    offset = arena.allocate(2 * UNIT)
    assert offset is not None
    with pytest.raises(AssertionError, match="not allocated"):
        arena.free(UNIT, UNIT)
    arena.free(offset, 2 * UNIT)
    with pytest.raises(AssertionError, match="not allocated"):
        arena.free(offset, 2 * UNIT)


def test_a_view_outlives_the_arena() -> None:
    arena = Arena(8 * UNIT)
    offset = arena.allocate(UNIT)
    assert offset is not None
    view = arena.view(offset, UNIT)
    view[:] = b"a" * UNIT
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert view == b"a" * UNIT


def test_check_finds_lost_memory() -> None:
    arena = Arena(8 * UNIT)
    arena.allocate(UNIT)
    arena._taken.clear()
    with pytest.raises(AssertionError, match="begins at 4096"):
        arena.check()


class ArenaMachine(RuleBasedStateMachine):
    """An arena of 24 units, and a list with the owner of each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[int | None] = [None] * 24
        self.arena = Arena(24 * UNIT)
        self.sizes: dict[int, int] = {}  # offset → bytes asked for

    def runs(self) -> list[tuple[int, int]]:
        """Free runs as (first unit, units)."""
        runs: list[tuple[int, int]] = []
        for at, owner in enumerate(self.units):
            if owner is not None:
                continue
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
        return runs

    @rule(size=st.one_of(st.integers(0, 5 * UNIT), st.integers(1, 25).map(lambda n: n * UNIT)))
    def allocate(self, size: int) -> None:
        wanted = max(-(-size // UNIT), 1)
        fitting = [(units, first) for first, units in self.runs() if units >= wanted]
        offset = self.arena.allocate(size)
        if not fitting:
            assert offset is None
            return
        assert offset is not None
        first = offset // UNIT
        assert (min(fitting)[0], first) in fitting, "it is not the smallest that fits"
        self.units[first : first + wanted] = [offset] * wanted
        self.sizes[offset] = size
        self.arena.view(offset, wanted * UNIT)[:] = bytes([first]) * (wanted * UNIT)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.sizes)))
        self.arena.free(offset, self.sizes.pop(offset))
        self.units = [None if owner == offset else owner for owner in self.units]

    @invariant()
    def agree(self) -> None:
        self.arena.check()
        assert self.arena.free_bytes == self.units.count(None) * UNIT
        assert self.arena.largest == max((units for _, units in self.runs()), default=0) * UNIT
        for at, owner in enumerate(self.units):
            if owner is not None:
                assert self.arena.buffer[at * UNIT] == owner // UNIT, "two extents in one place"


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
