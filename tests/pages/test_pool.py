"""The pool: all or nothing, and the order of reuse."""

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


# --- take ------------------------------------------------------------------------------------


def test_least_recently_freed_pages_come_first() -> None:
    pool = PagePool(4)
    pool.take(4)
    pool.release(np.array([2]))
    pool.release(np.array([0, 3]))
    pool.release(np.array([1]))
    assert pool.take(4).tolist() == [2, 0, 3, 1]


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
            assert pool.release(np.array(pages)) == len(pages)
            queue.extend(pages)
        else:
            expected = [queue.popleft() for _ in range(batch)]
            assert pool.take(batch).tolist() == expected
            held.append(expected[::-1])  # given back in another order than taken
        pool.check()


@pytest.mark.parametrize("count", [1, 20])
def test_a_page_that_is_free_is_not_given_back_again(count: int) -> None:
    pool = PagePool(40)
    pages = pool.take(count)
    assert pool.release(pages) == count
    for step in (pool.release, pool.retain):
        with pytest.raises(AssertionError, match="is free"):
            step(pages)
    assert sorted(pool.take(40).tolist()) == list(range(40))
    pool.check()


def test_check_notices_what_is_wrong() -> None:
    def broken(change: Callable[[PagePool], object]) -> None:
        pool = PagePool(4)
        pool.take(2)
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

    @initialize(size=st.integers(1, 20))
    def make(self, size: int) -> None:
        self.pool = PagePool(size)
        self.counts = dict.fromkeys(range(size), 0)
        self.queue = deque(range(size))

    def held(self) -> list[int]:
        return [page for page, count in self.counts.items() if count]

    @rule(count=st.integers(0, 12))
    def take(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(OutOfPages):
                self.pool.take(count)
            return
        expected = [self.queue.popleft() for _ in range(count)]
        assert self.pool.take(count).tolist() == expected
        for page in expected:
            self.counts[page] = 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        self.pool.retain(np.array(pages, np.int32))
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
        assert self.pool.release(np.array(pages, np.int32)) == freed

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
