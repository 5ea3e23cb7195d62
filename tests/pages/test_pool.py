"""The pool: all or nothing, refusals that change nothing, and the order of reuse."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep import InvalidValue, OutOfPages
from kvkeep.core.pages import PagePool

if TYPE_CHECKING:
    from collections.abc import Callable


def state(pool: PagePool) -> tuple[Any, ...]:
    """All that a caller can tell of a pool: counts, and the order in which pages come."""
    at = (pool._head + np.arange(pool.num_free)) % pool.num_pages
    return pool.references.tolist(), pool._ring[at].tolist(), pool.num_free, pool.num_used


@pytest.mark.parametrize("wrong", [0, -1, 2**31, True, 1.5, "16", None, [4]])
def test_a_pool_has_a_whole_number_of_pages(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="num_pages"):
        PagePool(wrong)


# --- allocate --------------------------------------------------------------------------------


def test_least_recently_freed_pages_come_first() -> None:
    pool = PagePool(4)
    pool.allocate(4)
    pool.release([2])
    pool.release([0, 3])
    pool.release([1])
    assert pool.allocate(4).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_the_order_holds_around_the_end_of_the_ring(size: int, batch: int) -> None:
    pool = PagePool(size)
    batch = min(batch, size)
    queue = deque(range(size))
    held: deque[list[int]] = deque()
    for step in range(6 * size):
        if held and (step % 3 == 2 or len(queue) < batch):
            pages = held.popleft()
            assert pool.release(pages) == len(pages)
            queue.extend(pages)
        else:
            expected = [queue.popleft() for _ in range(batch)]
            assert pool.allocate(batch).tolist() == expected
            held.append(expected[::-1])  # given back in another order than taken
        pool.check()


# --- retain and release ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "pages",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8),
     np.array([1, 2], ">i8"), np.array([0, 1, 0, 2])[1::2]],
    ids=str,
)  # fmt: skip
def test_forms_of_a_batch(pages: Any) -> None:
    pool = PagePool(4)
    pool.allocate(4)
    pool.retain(pages)
    assert pool.references.tolist() == [1, 2, 2, 1]
    assert pool.release(pages) == 0


REFUSED: dict[str, tuple[Any, str]] = {
    "free, never taken": ([3], "page 3 is free"),
    "free, in a batch of held ones": ([0, 1, 3], "page 3 is free"),
    "freed before": ([2], "page 2 is free: released already"),
    "foreign": ([4], "page 4 is not one of the pool's 0 … 3"),
    "far away": ([0, 2**40], f"page {2**40} is not"),
    "negative": ([0, -1], "page -1 is not"),
    "beyond int64": (np.array([2**64 - 1], np.uint64), "is not one of the pool's"),
    "twice": ([0, 1, 0], "page 0 is given twice"),
    "twice, side by side": ([1, 1], "page 1 is given twice"),
    "more than there are": ([0, 1, 0, 1, 0], "page 0 is given twice"),
    "floats": ([0.0, 1.0], "float64"),
    "bools": ([True], "bool"),
    "objects": (np.array([0, None]), "object"),
    "text": (["0"], "U1"),
    "two rows": ([[0], [1]], r"shape \(2, 1\)"),
    "no row": (0, r"shape \(\)"),
}


@pytest.mark.parametrize("step", [PagePool.retain, PagePool.release], ids=["retain", "release"])
@pytest.mark.parametrize(("pages", "said"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_changes_nothing(
    step: Callable[[PagePool, Any], object], pages: Any, said: str
) -> None:
    pool = PagePool(4)
    pool.allocate(3)
    pool.release([2])
    before = state(pool)
    with pytest.raises(InvalidValue, match=said):
        step(pool, pages)
    assert state(pool) == before
    pool.check()
    # The scratch that finds duplicates carries nothing over to the next batch.
    pool.retain([1, 0])
    assert pool.release([0, 1]) == 0
    assert pool.release([1, 0]) == 2


def test_a_double_free_does_not_hand_a_page_to_two_owners() -> None:
    pool = PagePool(2)
    pool.release(pool.allocate(1))
    with pytest.raises(InvalidValue):
        pool.release([0])
    assert sorted(pool.allocate(2).tolist()) == [0, 1]


def test_check_notices_what_is_wrong() -> None:
    def broken(change: Callable[[PagePool], object]) -> None:
        pool = PagePool(4)
        pool.allocate(2)
        change(pool)
        with pytest.raises(AssertionError):
            pool.check()

    broken(lambda pool: pool.references.__setitem__(0, -1))
    broken(lambda pool: pool.references.__setitem__(0, 0))
    broken(lambda pool: pool.references.__setitem__(3, 1))
    broken(lambda pool: pool._ring.__setitem__(2, 3))


# --- against a model -------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """A dict of counts and a deque of free pages, moved along with the pool."""

    @initialize(size=st.integers(1, 9))
    def make(self, size: int) -> None:
        self.pool = PagePool(size)
        self.counts = dict.fromkeys(range(size), 0)
        self.queue = deque(range(size))

    def held(self) -> list[int]:
        return [page for page, count in self.counts.items() if count]

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            return
        expected = [self.queue.popleft() for _ in range(count)]
        assert self.pool.allocate(count).tolist() == expected
        for page in expected:
            self.counts[page] = 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        self.pool.retain(pages)
        for page in pages:
            self.counts[page] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        freed = 0
        for page in pages:
            self.counts[page] -= 1
            if not self.counts[page]:
                self.queue.append(page)
                freed += 1
        assert self.pool.release(pages) == freed

    @rule(pages=st.lists(st.integers(-2, 11), min_size=1, max_size=12), keep=st.booleans())
    def anything(self, pages: list[int], keep: bool) -> None:
        fine = len(set(pages)) == len(pages) and all(self.counts.get(page) for page in pages)
        if not fine:
            with pytest.raises(InvalidValue):
                (self.pool.retain if keep else self.pool.release)(pages)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.references.tolist() == list(self.counts.values())
        assert self.pool.num_free == len(self.queue)
        assert state(self.pool)[1] == list(self.queue)
        self.pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
