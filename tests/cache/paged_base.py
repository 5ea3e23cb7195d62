"""What the rules of the state machine stand on: how it begins, how it ends, and between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from paged_model import Live, PagedModel

from kvkeep.core.events import Evicted
from kvkeep.core.eviction import POLICIES

if TYPE_CHECKING:
    from kvkeep import OutOfPages
    from prompt_recipes import Recipe

PICK = st.integers(0, 11)
"""One of what there is: numbers are taken modulo that."""
NAMESPACES = st.sampled_from(["", "", "", "tenant"])


def some_live(self: PagedBase) -> bool:
    return bool(self.model.live)


def some_stored(self: PagedBase) -> bool:
    return bool(self.model.naive.pages)


class PagedBase(RuleBasedStateMachine):
    """Subclasses name the prefix index, and give the rules."""

    prefix: str
    model: PagedModel
    make_model = PagedModel

    @initialize(
        page_size=st.sampled_from([4, 3, 2, 4, 3, 2, 1, 16]),
        num_pages=st.sampled_from([6, 8, 12, 3, 4, 5]),
        eviction=st.sampled_from(["lru", *sorted(POLICIES)]),
        budget=st.integers(0, 5),
        most_live=st.sampled_from([1, 2, 3, 6]),
    )
    def make(
        self, page_size: int, num_pages: int, eviction: str, budget: int, most_live: int
    ) -> None:
        """``most_live``: with few sequences more is done to each."""
        budget = min(budget, num_pages - 1)
        self.model = self.make_model(num_pages, page_size, self.prefix, eviction, budget)
        self.cache = self.model.cache
        self.page_size = page_size
        self.most_live = most_live
        self.prompts: list[list[int]] = []

    def pick(self, number: int) -> Live:
        return self.model.live[number % len(self.model.live)]

    def prompt(self, recipe: Recipe) -> list[int]:
        """A prompt that has to do with what is stored, running, or was asked for lately."""
        earlier = [list(page.prefix) for page in self.model.naive.pages.values()]
        earlier += [live.tokens for live in self.model.live if live.tokens]
        earlier += self.prompts[-3:]
        pages = min(self.model.num_pages + 1, 4 + recipe.keep % 4)
        self.prompts.append(recipe.build(earlier, self.page_size, pages))
        return self.prompts[-1]

    def evicted(self) -> list[int]:
        """The pages that this step has evicted."""
        events = [event for event in self.model.events if isinstance(event, Evicted)]
        return [page for event in events for page in event.pages.tolist()]

    def refused(self, error: OutOfPages, needed: int, available: int, before: object) -> None:
        assert (error.needed, error.available) == (needed, available)
        self.model.expect["out_of_pages"] += 1
        self.nothing_happened(before)

    def nothing_happened(self, before: object, *, runs: bool = True) -> None:
        """``runs=False``: where a run is cut in two may have changed, all else may not."""
        after = self.model.snapshot()
        if not runs:
            before, after = _without_runs(before), _without_runs(after)
        assert before == after, "a refused step, or a look, changed something"

    @invariant()
    def everything_agrees(self) -> None:
        if self.model.step:
            self.model.end()

    def teardown(self) -> None:
        """Close all, clear all: not a page is left, whatever was done."""
        if not hasattr(self, "model") or self.model.failed:
            return
        model = self.model
        for live in list(model.live):
            model.make_copies(live)
            model.begin(closing=live)
            live.seq.close()
            model.live.remove(live)
            model.end()
        for pinned in model.pins:
            if pinned.pin.num_tokens:
                self.cache.unpin(pinned.pin)
        model.pins.clear()
        model.begin()
        self.cache.clear()
        model.end()
        assert not model.naive.pages
        assert self.cache.stats().pages_free == model.num_pages
        assert not self.cache.namespaces()


def _without_runs(snapshot: object) -> object:
    assert isinstance(snapshot, tuple)
    return snapshot[:1] + snapshot[2:]
