"""Soft pins: last to go, never in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.testing.prefix_hooks import PrefixHooks, pages_of

if TYPE_CHECKING:
    from kvkeep.testing.prefix_driver import IndexDriver

__all__ = ["PinTests"]


def pin(driver: IndexDriver, tokens: list[int]) -> Any:
    """Pin a stored path as a cache does: while it is held; then the hold ends."""
    held = driver.open(tokens, used=False)
    driver.index.pin(held.hold)
    driver.close(held, used=False)
    return held.hold


class PinTests(PrefixHooks):
    """`pin` and `unpin`."""

    def test_a_pinned_path_goes_last(self, driver: IndexDriver) -> None:
        """Everything else is evicted before it, and still it counts as evictable."""
        tokens = pages_of(driver, 1, 2)
        pages = driver.store(tokens)
        pin(driver, tokens)
        for prompt in ([1, 3], [4, 5, 6], [1, 2, 7]):
            driver.store(pages_of(driver, *prompt))
        driver.check()
        assert driver.index.num_evictable == 7
        assert not set(driver.evict(5)) & set(pages)
        assert driver.found(tokens) == pages
        driver.check()

    def test_a_pin_gives_way_tail_first(self, driver: IndexDriver) -> None:
        """When nothing else is left it goes, page by page, and is counted once it is gone."""
        tokens = pages_of(driver, 1, 2, 3)
        pages = driver.store(tokens)
        hold = pin(driver, tokens)
        assert driver.index.length(hold) == 3
        assert driver.evict(1) == pages[2:]
        assert driver.index.length(hold) == 2
        assert driver.index.pins_broken == 0
        driver.check()
        assert sorted(driver.evict(9)) == sorted(pages[:2])
        assert driver.index.length(hold) == 0
        assert driver.index.pins_broken == 1
        driver.index.unpin(hold)  # of what has gone: nothing happens
        driver.check()

    def test_a_pin_that_lost_its_end_keeps_the_rest(self, driver: IndexDriver) -> None:
        """Whether the path was stored in one piece or in several."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        driver.store(tokens[: 2 * size])
        driver.store(pages_of(driver, 1, 2, 8))
        pages = driver.store(tokens)
        hold = pin(driver, tokens)
        assert len(driver.evict(3)) == 3  # the other branch, and the end of this one
        assert driver.index.length(hold) == 2
        others = driver.store(pages_of(driver, 9, 9))
        assert sorted(driver.evict(2)) == sorted(others)
        assert driver.found(tokens) == pages[:2]
        driver.check()
        driver.index.unpin(hold)
        others = driver.store(pages_of(driver, 9, 9))
        driver.check()
        assert sorted(driver.evict(2)) == sorted(pages[:2])

    def test_a_pin_that_ended_protects_no_more(self, driver: IndexDriver) -> None:
        """Least recently used goes first again."""
        one, two = pages_of(driver, 1), pages_of(driver, 2)
        pages = driver.store(one)
        hold = pin(driver, one)
        driver.store(two)
        driver.store(two)
        driver.index.unpin(hold)
        driver.check()
        assert driver.evict(1) == pages

    def test_pins_are_counted(self, driver: IndexDriver) -> None:
        """Two pins need two ends."""
        one, two = pages_of(driver, 1), pages_of(driver, 2)
        pages = driver.store(one)
        first, second = pin(driver, one), pin(driver, one)
        others = driver.store(two)
        driver.index.unpin(first)
        assert driver.evict(1) == others
        driver.index.unpin(second)
        driver.store(two)
        assert driver.evict(1) == pages

    def test_a_pin_in_the_middle_of_a_path(self, driver: IndexDriver) -> None:
        """It keeps the pages up to there; what follows them goes as if there were no pin."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        pages = driver.store(tokens)
        pin(driver, tokens[: 2 * size])
        driver.store(pages_of(driver, 9, 9))
        assert sorted(driver.evict(4)) == sorted({*pages[2:], *range(4, 6)})
        assert driver.found(tokens) == pages[:2]
        driver.check()

    def test_a_pin_stays_with_its_end(self, driver: IndexDriver) -> None:
        """Whether its path is divided, extended, or held and released."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        pages = driver.store(tokens)
        hold = pin(driver, tokens)
        driver.store(pages_of(driver, 1, 2, 8))
        driver.store([*tokens, *pages_of(driver, 5)])
        driver.close(driver.open(tokens[:size]))
        driver.close(driver.open(tokens))
        assert driver.index.length(hold) == 4
        assert not set(driver.evict(2)) & set(pages)
        assert driver.found(tokens) == pages
        driver.check()

    def test_clear_ends_pins(self, driver: IndexDriver) -> None:
        """What is pinned and not held is forgotten like all else."""
        tokens = pages_of(driver, 1, 2)
        for space in (None, ""):
            driver.store(tokens)
            hold = pin(driver, tokens)
            assert len(driver.clear(space)) == 2
            assert driver.index.length(hold) == 0
            driver.check()
