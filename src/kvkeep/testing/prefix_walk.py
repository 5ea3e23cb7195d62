"""Everything at once, in any order, against the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.eviction import POLICIES
from kvkeep.testing.prefix_hooks import PrefixHooks
from kvkeep.testing.strategies import related_prompts

if TYPE_CHECKING:
    from typing import Any

    from kvkeep.testing.prefix_driver import Held, IndexDriver

__all__ = ["WalkTests"]

_STEPS = [
    "open", "publish", "publish", "store", "fork", "shorten", "close", "drop", "evict", "clear",
    "pin", "unpin",
]  # fmt: skip


class Walk:
    """One walk: prompts it may ask for again, and the pins it has set."""

    def __init__(self, driver: IndexDriver, data: st.DataObject) -> None:
        self.driver = driver
        self.data = data
        self.prompts: list[list[int]] = []
        self.pins: list[Any] = []

    def prompt(self) -> list[int]:
        """A new prompt, or one more like the earlier ones."""
        size = self.driver.index.page_size
        tokens = self.data.draw(related_prompts(self.prompts, size))
        self.prompts.append(tokens)
        return tokens

    def space(self) -> str:
        """One of two namespaces."""
        return self.data.draw(st.sampled_from(["", "tenant"]))

    def number(self, most: int) -> int:
        """From 0 to ``most``."""
        return self.data.draw(st.integers(0, most))

    def held(self) -> Held:
        """One of the holds."""
        return self.data.draw(st.sampled_from(self.driver.held))

    def step(self) -> None:
        """Do something that can be done now, and look at everything."""
        driver = self.driver
        name = self.data.draw(st.sampled_from(_STEPS))
        if name in {"open", "store"}:
            getattr(driver, name)(self.prompt(), self.space())
        elif name == "evict":
            count = self.number(9)
            expected = min(count, driver.index.num_evictable)
            assert len(driver.evict(count)) == expected
        elif name == "clear":
            driver.clear(self.data.draw(st.sampled_from([None, "", "tenant"])))
        elif name == "unpin" and self.pins:
            driver.index.unpin(self.pins.pop(self.number(len(self.pins) - 1)))
        elif driver.held:
            self.use(self.held(), name)
        driver.check()
        tokens, space = self.prompt(), self.space()
        assert driver.found(tokens, space) == driver.naive.match(tokens, space).pages

    def use(self, held: Held, name: str) -> None:
        """One of the steps that need a hold."""
        driver = self.driver
        pages = len(held.pages)
        if name == "publish":
            path = driver.naive.pages[held.pages[-1]].prefix if pages else ()
            tokens = [*path, *self.prompt()]
            held.encoder.cut(pages)  # what it was opened for may go on differently
            if len(tokens) // driver.index.page_size > pages:
                driver.publish(held, tokens, priority=self.number(2))
        elif name == "fork":
            driver.fork(held)
        elif name == "shorten":
            driver.shorten(held, self.number(pages))
        elif name == "drop":
            driver.drop(held, self.number(pages))
        elif name == "pin" and pages:
            driver.index.pin(held.hold)
            self.pins.append(held.hold)
        elif name == "close":
            driver.close(held, used=bool(self.number(1)))


class WalkTests(PrefixHooks):
    """All steps together."""

    def test_any_walk_agrees_with_the_model(self) -> None:
        """Counts, matches, and what is evicted, after any steps in any order."""

        @settings(max_examples=150, deadline=None)
        @given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from(sorted(POLICIES)))
        def run(data: st.DataObject, page_size: int, policy: str) -> None:
            driver = self.make_driver(page_size, POLICIES[policy]())
            walk = Walk(driver, data)
            for _ in range(data.draw(st.integers(1, 25))):
                walk.step()
            for held in driver.held.copy():
                driver.close(held)
            driver.check()
            stored = driver.index.num_pages
            assert len(driver.evict(stored + 1)) == stored
            assert driver.index.num_pages == driver.index.num_namespaces == 0

        run()
