"""Eviction: as many pages as requested, tails first, in the order of the policy."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from prefix_hooks import PrefixHooks, pages_of

from kvkeep.core.eviction import LRU, Priority

if TYPE_CHECKING:
    from prefix_driver import IndexDriver

__all__ = ["ForgettingTests"]


def fill(driver: IndexDriver, prompts: int, seed: int = 5) -> None:
    """Store prompts of 1 … 8 pages that often begin alike."""
    chance = random.Random(seed)
    for _ in range(prompts):
        pages = [chance.randrange(3) for _ in range(chance.randrange(1, 9))]
        driver.store(pages_of(driver, *pages))


class ForgettingTests(PrefixHooks):
    """`evict`, `drop` and `clear`."""

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 20, 1000])
    def test_eviction_is_exact_to_the_page(self, driver: IndexDriver, count: int) -> None:
        """So many pages go, each once, or all that may go if they are fewer."""
        fill(driver, 20)
        driver.open(pages_of(driver, 0, 1))
        may_go = driver.index.num_evictable
        gone = driver.evict(count)
        assert len(gone) == len(set(gone)) == min(count, may_go)
        driver.check()

    def test_one_by_one_all_that_is_evictable_goes(self, driver: IndexDriver) -> None:
        """``num_evictable`` is exact: evicting page by page gets just so many."""
        fill(driver, 30)
        driver.open(pages_of(driver, 0, 1, 2))
        driver.open(pages_of(driver, 2, 2))
        may_go = driver.index.num_evictable
        for left in range(may_go, 0, -1):
            assert driver.index.num_evictable == left
            assert len(driver.evict(1)) == 1  # the driver sees that the rest stays reachable
            driver.check()
        assert driver.evict(1) == []

    def test_the_tail_goes_first(self, driver: IndexDriver) -> None:
        """Of one prompt, every eviction leaves its beginning."""
        tokens = pages_of(driver, *range(1, 41))
        pages = driver.store(tokens)
        left = 40
        for count in (1, 1, 3, 10, 1, 20, 3, 1):
            left -= count
            assert sorted(driver.evict(count)) == sorted(pages[left : left + count])
            assert driver.found(tokens) == pages[:left]
            driver.check()

    def test_what_was_cut_short_grows_again(self, driver: IndexDriver) -> None:
        """A path that lost its tail takes a new one, and is divided like any other."""
        tokens = pages_of(driver, *range(1, 11))
        size = driver.index.page_size
        driver.store(tokens)
        driver.evict(4)
        assert len(driver.store(tokens)) == 10
        driver.evict(5)
        other = pages_of(driver, 1, 2, 3, 77)
        driver.store(other)
        driver.check()
        assert driver.found(tokens) == driver.found(tokens[: 5 * size])
        assert driver.found(other)[:3] == driver.found(tokens)[:3]

    def test_least_recently_used_goes_first(self, driver: IndexDriver) -> None:
        """A use of a prompt is a use of all its prefixes."""
        for prompt in ([1, 2, 3], [4], [1, 2, 5], [6]):
            driver.store(pages_of(driver, *prompt))
        driver.close(driver.open(pages_of(driver, 4)))
        driver.close(driver.open(pages_of(driver, 1, 2)))
        order = [driver.naive.pages[page].prefix for page in driver.naive.pages]
        last = [prefix[-1] for prefix in order]
        gone = [last[driver.evict(1)[0]] for _ in range(6)]
        assert gone == [3, 5, 6, 4, 2, 1]

    def test_the_policy_decides(self) -> None:
        """Whatever orders the entries: age, reuse, or what the caller asked for."""
        for policy, expected in ((LRU(), [2, 3, 1]), (Priority(), [3, 1, 2])):
            driver = self.make_driver(2, policy)
            number = {
                driver.store(pages_of(driver, prompt), priority=priority)[0]: prompt
                for prompt, priority in ((1, 4), (2, 5), (3, -6))
            }
            driver.close(driver.open(pages_of(driver, 1)))
            assert [number[driver.evict(1)[0]] for _ in range(3)] == expected, policy.name

    def test_a_prefix_has_the_highest_priority_published_through_it(self) -> None:
        """So a careless prompt does not take an important one's beginning with it."""
        driver = self.make_driver(2, Priority())
        driver.store(pages_of(driver, 1, 2), priority=5)
        driver.store(pages_of(driver, 1, 3), priority=0)
        driver.store(pages_of(driver, 4), priority=3)
        driver.store(pages_of(driver, 6), priority=1)
        driver.publish(driver.open([]), pages_of(driver, 6), priority=9)  # there already
        driver.close(driver.held[0])
        tokens = {page.page: page.prefix[-1] for page in driver.naive.pages.values()}
        assert [tokens[driver.evict(1)[0]] for _ in range(5)] == [3, 4, 2, 1, 6]

    def test_a_run_that_goes_on_has_a_priority_of_its_own(self) -> None:
        """What follows an important beginning is as important as its own prompt."""
        driver = self.make_driver(2, Priority())
        driver.store(pages_of(driver, 1), priority=5)
        driver.store(pages_of(driver, 2), priority=3)
        driver.store(pages_of(driver, 1, 4), priority=0)
        tokens = {page.page: page.prefix[-1] for page in driver.naive.pages.values()}
        assert [tokens[driver.evict(1)[0]] for _ in range(3)] == [4, 2, 1]

    def test_drop_forgets_the_end_of_a_path(self, driver: IndexDriver) -> None:
        """What is behind ``keep`` pages goes at once, and the hold ends."""
        tokens = pages_of(driver, 1, 2, 3, 4, 5)
        for keep in (5, 3, 1, 0):
            held = driver.keep(tokens)
            assert sorted(driver.drop(held, keep)) == sorted(held.pages[keep:])
            assert driver.found(tokens) == held.pages[:keep]
            assert driver.index.num_evictable == keep
            driver.check()

    def test_drop_spares_what_others_need(self, driver: IndexDriver) -> None:
        """Pages that are held, or that lead to others, stay."""
        stem, tokens = pages_of(driver, 1, 2), pages_of(driver, 1, 2, 3, 4)
        for needed in ("held", "followed"):
            held = driver.keep(tokens)
            other = driver.open(stem)
            if needed == "followed":
                driver.store(pages_of(driver, 1, 2, 9))
            if needed != "held":
                driver.close(other)
            assert sorted(driver.drop(held, 0)) == sorted(held.pages[2:])
            assert driver.found(tokens) == held.pages[:2]
            driver.check()
            if needed == "held":
                driver.close(other)
            driver.clear()

    def test_drop_of_another_hold_on_the_path(self, driver: IndexDriver) -> None:
        """Two holds on one path: the first to drop forgets nothing, the last all."""
        held = driver.keep(pages_of(driver, 1, 2, 3))
        other = driver.fork(held)
        assert driver.drop(held, 0) == []
        assert sorted(driver.drop(other, 0)) == sorted(held.pages)
        assert len(driver.index.roots) == 0

    def test_clear_forgets_what_nobody_holds(self, driver: IndexDriver) -> None:
        """In one namespace or in all; a stranger's namespace has nothing to clear."""
        for space in ("one", "other"):
            for prompt in ([1, 2, 3], [1, 4], [5]):
                driver.store(pages_of(driver, *prompt), space)
        held = driver.open(pages_of(driver, 1, 2), "one")
        assert driver.clear("stranger") == []
        assert len(driver.clear("one")) == 3
        assert driver.found(pages_of(driver, 1, 2, 3), "one") == held.pages
        driver.check()
        assert len(driver.clear()) == 5
        driver.check()
        driver.close(held)
        assert len(driver.clear()) == 2
        assert len(driver.index.roots) == driver.index.num_pages == 0
