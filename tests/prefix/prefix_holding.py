"""Holds: each protects its path and nothing else, until it is moved or ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prefix_hooks import PrefixHooks, pages_of

if TYPE_CHECKING:
    from prefix_driver import IndexDriver

__all__ = ["HoldingTests"]


class HoldingTests(PrefixHooks):
    """`hold`, `protects`, `again`, `shorten`, `move`, `release`, `length`, `covered`."""

    def test_what_is_held_stays(self, driver: IndexDriver) -> None:
        """Evicting everything leaves exactly the paths that are held."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        pages = driver.store(tokens)
        driver.store(pages_of(driver, 1, 2, 8))
        driver.store(pages_of(driver, 9))
        held = driver.open(tokens[: 3 * size])
        driver.check()
        assert driver.index.num_evictable == 3
        assert len(driver.evict(100)) == 3
        assert driver.found(tokens) == pages[:3] == held.pages
        assert driver.evict(1) == []
        driver.close(held)
        assert sorted(driver.evict(100)) == sorted(pages[:3])

    def test_protects_says_what_hold_will_protect(self, driver: IndexDriver) -> None:
        """To the page, at every length of prompt, with other holds about."""
        tokens = pages_of(driver, 1, 2, 3, 4, 5)
        size = driver.index.page_size
        driver.store(tokens)
        driver.store(pages_of(driver, 1, 2, 8, 9))
        for others in (0, size, 3 * size, 5 * size):
            neighbour = driver.open(tokens[:others])
            for keep in range(len(tokens) + 1):
                prompt = [*tokens[:keep], 6, 6]
                evictable = driver.index.num_evictable
                protects = driver.index.protects(driver.match(prompt))
                held = driver.open(prompt)
                assert evictable - driver.index.num_evictable == protects
                driver.check()
                driver.close(held)
            driver.close(neighbour)
        assert driver.index.protects(None) == 0

    def test_a_page_to_copy_from_is_held(self) -> None:
        """The hold on a partial match keeps that page, whatever is evicted; it ends by itself."""
        driver = self.make_driver(4)
        tokens = pages_of(driver, 1, 2, 3)
        pages = driver.store(tokens)
        held = driver.open([*tokens[:6], 99])
        if not self.exact:
            assert held.source is None
            return
        assert held.source_pages == pages[:2]
        driver.evict(100)
        assert driver.match(tokens[:6]).partial_page == pages[1]  # type: ignore[union-attr]
        driver.index.release(held.source)
        held.source = None
        assert driver.evict(100) == [pages[1]]
        assert driver.found(tokens) == pages[:1]

    def test_each_hold_counts(self, driver: IndexDriver) -> None:
        """A path stays until the last of its holds has ended, in whatever order they do."""
        tokens = pages_of(driver, 1, 2)
        first = driver.keep(tokens)
        second, third = driver.fork(first), driver.open(tokens)
        for held in (second, first, third):
            assert driver.evict(9) == []
            driver.check()
            driver.close(held)
        assert sorted(driver.evict(9)) == sorted(third.pages)

    def test_ending_a_hold_twice_is_noticed(self, driver: IndexDriver) -> None:
        """It is a fault of the caller that would free pages in use: an AssertionError."""
        held = driver.keep(pages_of(driver, 1))
        driver.close(held)
        with pytest.raises(AssertionError):
            driver.index.release(held.hold)

    def test_shorten_gives_up_the_end(self, driver: IndexDriver) -> None:
        """To the page, down to none."""
        tokens = pages_of(driver, 1, 2, 3, 4, 5)
        held = driver.keep(tokens)
        pages = held.pages
        for keep in (5, 4, 2, 0):
            driver.shorten(held, keep)
            driver.check()
            assert driver.index.num_evictable == 5 - keep
            assert driver.found(tokens) == pages
        driver.shorten(held, 0)
        driver.close(held)
        driver.check()

    def test_shorten_spares_the_holds_of_others(self, driver: IndexDriver) -> None:
        """Another hold on the same path keeps what this one gives up."""
        first = driver.keep(pages_of(driver, 1, 2, 3))
        second = driver.fork(first)
        driver.shorten(first, 1)
        assert driver.evict(9) == []
        last = second.pages[2]
        driver.shorten(second, 2)
        assert driver.evict(9) == [last]
        driver.check()

    def test_move_follows_another_path(self, driver: IndexDriver) -> None:
        """A hold moved along another's path protects so many pages of it."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        first = driver.keep(tokens[:size])
        second = driver.fork(first)
        driver.publish(second, tokens)
        driver.shorten(first, 0)
        for keep in (1, 3, 2, 4):
            third = driver.fork(first)
            third.hold = driver.index.move(third.hold, second.hold, keep)
            third.pages = second.pages[:keep]
            driver.check()
            driver.close(second)
            assert driver.index.num_evictable == 4 - keep
            second = driver.open(tokens)
            driver.close(third)
        assert driver.index.move(second.hold, second.hold, 4) is second.hold
        driver.check()

    def test_a_released_path_was_used(self, driver: IndexDriver) -> None:
        """`release` is a use, and with ``used=False`` it is none."""
        one, two = pages_of(driver, 1), pages_of(driver, 2)
        first, second = driver.store(one), driver.store(two)
        held = driver.open(one)
        driver.close(driver.open(two))
        driver.close(held)  # later than the other, though it was opened before
        assert driver.evict(1) == second
        second = driver.store(two)
        held = driver.open(one)
        driver.close(driver.open(two))
        driver.close(held, used=False)
        assert driver.evict(1) == first
        assert driver.evict(1) == second

    def test_a_hold_that_is_no_use(self, driver: IndexDriver) -> None:
        """`hold` and `release` with ``used=False`` leave the order of eviction as it was."""
        one, two = pages_of(driver, 1), pages_of(driver, 2)
        first, second = driver.store(one), driver.store(two)
        driver.close(driver.open(one, used=False), used=False)
        assert [driver.evict(1), driver.evict(1)] == [first, second]

    def test_the_length_of_a_hold(self, driver: IndexDriver) -> None:
        """Each is as long as its own path, whatever others share of it."""
        holds = [
            driver.keep(pages_of(driver, *path)).hold
            for path in ([1, 2, 3], [1, 2, 4, 5], [1], [8])
        ]
        assert [hold.end for hold in holds] == [3, 4, 1, 1]

    def test_check_finds_a_hold_too_many_or_too_few(self, driver: IndexDriver) -> None:
        """It recounts with the holds it is given: a leaked one does not pass."""
        held = driver.keep(pages_of(driver, 1, 2))
        for wrong in ([], [held.hold, held.hold]):
            with pytest.raises(AssertionError):
                driver.index.check(wrong)
        driver.check()
