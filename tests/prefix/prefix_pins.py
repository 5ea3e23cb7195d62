"""Pins: paths with soft pins are evicted last, paths with hard pins never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_hooks import PrefixHooks, pages_of

if TYPE_CHECKING:
    from prefix_driver import IndexDriver

    from kvkeep.core.prefix.pinned import Pinned

__all__ = ["PinTests"]


def pin(driver: IndexDriver, tokens: list[int], *, hard: bool = False) -> Pinned:
    """Pin a stored path as a cache does: while it is held; then the hold ends."""
    held = driver.open(tokens, used=False)
    pinned = driver.pin(held, hard=hard)
    driver.close(held, used=False)
    return pinned


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
        pinned = pin(driver, tokens)
        assert pinned.num_pages == 3
        assert driver.evict(1) == pages[2:]
        assert pinned.num_pages == 2
        assert driver.index.pins.num_broken == 0
        driver.check()
        assert sorted(driver.evict(9)) == sorted(pages[:2])
        assert pinned.num_pages == 0
        assert driver.index.pins.num_broken == 1
        assert driver.index.pins.broken == [pinned]
        driver.unpin(pinned)  # of what has gone: nothing happens
        driver.check()

    def test_a_pin_that_lost_its_end_keeps_the_rest(self, driver: IndexDriver) -> None:
        """Whether the path was stored in one piece or in several."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        driver.store(tokens[: 2 * size])
        driver.store(pages_of(driver, 1, 2, 8))
        pages = driver.store(tokens)
        pinned = pin(driver, tokens)
        assert len(driver.evict(3)) == 3  # the other branch, and the end of this one
        assert pinned.num_pages == 2
        others = driver.store(pages_of(driver, 9, 9))
        assert sorted(driver.evict(2)) == sorted(others)
        assert driver.found(tokens) == pages[:2]
        driver.check()
        driver.unpin(pinned)
        others = driver.store(pages_of(driver, 9, 9))
        driver.check()
        assert sorted(driver.evict(2)) == sorted(pages[:2])

    def test_a_pin_that_ended_protects_no_more(self, driver: IndexDriver) -> None:
        """Least recently used goes first again."""
        one, two = pages_of(driver, 1), pages_of(driver, 2)
        pages = driver.store(one)
        pinned = pin(driver, one)
        driver.store(two)
        driver.store(two)
        driver.unpin(pinned)
        driver.check()
        assert driver.evict(1) == pages

    def test_pins_are_counted(self, driver: IndexDriver) -> None:
        """Two pins need two ends."""
        one, two = pages_of(driver, 1), pages_of(driver, 2)
        pages = driver.store(one)
        first, second = pin(driver, one), pin(driver, one)
        others = driver.store(two)
        driver.unpin(first)
        assert driver.evict(1) == others
        driver.unpin(second)
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
        pinned = pin(driver, tokens)
        driver.store(pages_of(driver, 1, 2, 8))
        driver.store([*tokens, *pages_of(driver, 5)])
        driver.close(driver.open(tokens[:size]))
        driver.close(driver.open(tokens))
        assert pinned.num_pages == 4
        assert not set(driver.evict(2)) & set(pages)
        assert driver.found(tokens) == pages
        driver.check()

    def test_clear_ends_pins(self, driver: IndexDriver) -> None:
        """What is pinned and not held is forgotten like all else."""
        tokens = pages_of(driver, 1, 2)
        for space in (None, ""):
            driver.store(tokens)
            pinned = pin(driver, tokens)
            assert len(driver.clear(space)) == 2
            assert pinned.num_pages == 0
            driver.check()

    def test_pins_that_come_together_are_all_known(self, driver: IndexDriver) -> None:
        """Whichever of two places has more pins when the run between them goes."""
        size = driver.index.page_size
        for at_end, before in ((1, 3), (3, 1), (2, 0), (0, 2)):
            tokens = pages_of(driver, 1, 2, 3)
            driver.store(tokens[:size])
            driver.store(tokens)
            pins = [pin(driver, tokens) for _ in range(at_end)]
            pins += [pin(driver, tokens[:size]) for _ in range(before)]
            driver.check()
            driver.evict(2)
            assert [each.num_pages for each in pins] == [1] * len(pins)
            driver.check()
            driver.unpin(pins.pop(0))
            driver.check()
            driver.index.pins.broken.clear()
            driver.evict(1)
            assert set(driver.index.pins.broken) == set(pins)
            assert [each.num_pages for each in pins] == [0] * len(pins)
            driver.check()

    def test_a_hard_pin_holds(self, driver: IndexDriver) -> None:
        """Its path is not evicted, and counted once with those of others."""
        size = driver.index.page_size
        tokens = pages_of(driver, 1, 2, 3)
        pages = driver.store(tokens)
        driver.store(pages_of(driver, 1, 9))
        hard = pin(driver, tokens[: 2 * size], hard=True)
        again = pin(driver, tokens[:size], hard=True)
        soft = pin(driver, tokens)
        driver.check()
        index = driver.index
        assert (index.pins.num_pages, index.pins.num_hard, index.num_evictable) == (3, 2, 2)
        held = driver.open(pages_of(driver, 1, 9))
        assert index.pins.would_keep(held.hold) == 3
        driver.close(held)
        assert len(driver.evict(9)) == 2
        assert driver.found(tokens) == pages[:2]
        assert (soft.num_pages, hard.num_pages) == (2, 2)
        driver.unpin(hard)
        driver.check()
        assert (index.pins.num_pages, index.pins.num_hard) == (2, 1)
        assert len(driver.evict(9)) == 1
        driver.unpin(again)
        assert len(driver.evict(9)) == 1
        assert index.pins.broken == [soft]
        driver.check()
