"""Random sequences of all operations, compared with the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_hooks import PrefixHooks

from kvkeep.core.eviction import POLICIES
from prompt_recipes import Recipe, recipes

if TYPE_CHECKING:
    from prefix_driver import HeldPath, IndexDriver

__all__ = ["WalkTests"]

_NAMES = [
    "open", "publish", "publish", "store", "fork", "shorten", "close", "drop", "evict", "clear",
]  # fmt: skip


class WalkStep(NamedTuple):
    """What to do; numbers are taken modulo what there is."""

    name: str
    recipe: Recipe
    which: int
    number: int
    space: str


STEPS = st.lists(
    st.builds(
        WalkStep,
        name=st.sampled_from(_NAMES),
        recipe=recipes(),
        which=st.integers(0, 7),
        number=st.integers(0, 9),
        space=st.sampled_from(["", "", "tenant"]),
    ),
    max_size=40,
)


class PrefixWalk:
    """One walk, and the prompts so far."""

    def __init__(self, driver: IndexDriver) -> None:
        self.driver = driver
        self.prompts: list[list[int]] = []

    def take(self, step: WalkStep) -> None:
        """Do what can be done now, and look at everything."""
        driver, index = self.driver, self.driver.index
        tokens = step.recipe.build(self.prompts, index.page_size)
        self.prompts.append(tokens)
        if step.name in {"open", "store"}:
            getattr(driver, step.name)(tokens, step.space)
        elif step.name == "evict":
            expected = min(step.number, index.num_evictable)
            assert len(driver.evict(step.number)) == expected
        elif step.name == "clear":
            driver.clear(step.space if step.number % 2 else None)
        elif driver.held:
            self.use(driver.held[step.which % len(driver.held)], step, tokens)
        driver.check()
        assert driver.found(tokens, step.space) == driver.naive.match(tokens, step.space).pages

    def use(self, held: HeldPath, step: WalkStep, tokens: list[int]) -> None:
        """One of the steps that need a hold."""
        driver = self.driver
        pages = len(held.pages)
        if step.name == "publish":
            path = driver.naive.pages[held.pages[-1]].prefix if pages else ()
            held.encoder.cut(pages)  # what it was opened for may go on differently
            if len(tokens) >= driver.index.page_size:
                driver.publish(held, [*path, *tokens], priority=step.number % 3)
        elif step.name == "fork":
            driver.fork(held)
        elif step.name == "shorten":
            driver.shorten(held, step.number % (pages + 1))
        elif step.name == "drop":
            driver.drop(held, step.number % (pages + 1))
        elif step.name == "close":
            driver.close(held, used=bool(step.number % 2))


class WalkTests(PrefixHooks):
    """All steps together."""

    def test_any_walk_agrees_with_the_model(self) -> None:
        """Counts, matches, and what is evicted, after any steps in any order."""

        @settings(max_examples=600, deadline=None)
        @given(STEPS, st.sampled_from([1, 2, 4]), st.sampled_from(sorted(POLICIES)))
        def run(steps: list[WalkStep], page_size: int, policy: str) -> None:
            driver = self.make_driver(page_size, POLICIES[policy]())
            walk = PrefixWalk(driver)
            for step in steps:
                walk.take(step)
            for held in driver.held.copy():
                driver.close(held)
            driver.check()
            stored = driver.index.num_pages
            assert len(driver.evict(stored + 1)) == stored
            assert driver.index.num_pages == len(driver.index.roots) == 0

        run()
