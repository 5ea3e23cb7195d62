"""Eviction, pins, looks and mistakes, as rules: what is done to the cache as a whole."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from paged_base import NAMESPACES, PICK, PagedBase, some_live, some_stored
from paged_model import Live, Pinned

from kvkeep import IllegalStep, InvalidValue, NotCached
from prompt_recipes import Recipe, recipes

if TYPE_CHECKING:
    from kvkeep import Sequence


class Memory(PagedBase):
    @precondition(some_stored)
    @rule(what=st.sampled_from([1, 2, 3, 1, 2, 5, 0, "stranger", "tenant", "", None]))
    def forget(self, what: int | str | None) -> None:
        """Evict so many pages, or clear a namespace or all of them."""
        model = self.model
        model.begin()
        gone = model.evictable()
        if isinstance(what, int):
            assert self.cache.evict(what) == len(self.evicted()) == min(what, len(gone))
            return
        if what is not None:
            gone &= {page.page for page in model.naive.of(what)}
        assert self.cache.clear(what) == len(gone)
        assert set(self.evicted()) == gone

    @precondition(some_stored)
    @rule(
        recipe=recipes(),
        namespace=NAMESPACES,
        ttl=st.sampled_from([None, None, 1, 3]),
        hard=st.booleans(),
    )
    def pin(self, recipe: Recipe, namespace: str, ttl: float | None, hard: bool) -> None:
        model = self.model
        prompt = self.prompt(recipe)
        path = model.naive.match(prompt, namespace).pages
        kept = {p for o in model.pins if o.hard and o.until > model.clock.now for p in o.path}
        refused = NotCached if not path else None
        if path and hard and len(kept | set(path)) > model.budget:
            refused = InvalidValue
        if refused is not None:
            before = model.unchanged()
            model.begin()
            with pytest.raises(refused):
                self.cache.pin(prompt, namespace, ttl=ttl, hard=hard)
            self.nothing_happened(before, runs=False)
            return
        model.begin()
        pin = self.cache.pin(prompt, namespace, ttl=ttl, hard=hard)
        assert pin.num_tokens == len(path) * self.page_size
        until = float("inf") if ttl is None else model.clock.now + ttl
        model.pins.append(Pinned(pin, path, hard, until))

    @precondition(lambda self: bool(self.model.pins))
    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        model = self.model
        pinned = model.pins[number % len(model.pins)]
        model.begin()
        if pinned.pin.num_tokens:
            self.cache.unpin(pinned.pin)
        else:
            with pytest.raises(NotCached):
                self.cache.unpin(pinned.pin)
        assert not pinned.pin.active
        model.pins.remove(pinned)

    @precondition(lambda self: bool(self.model.pins))
    @rule(seconds=st.sampled_from([0.5, 1, 3]))
    def wait(self, seconds: float) -> None:
        self.model.begin()
        self.model.clock.now += seconds

    # --- looks and mistakes ------------------------------------------------------------------

    @precondition(some_live)
    @rule(
        what=st.sampled_from(["match", "stats", "mistake"]),
        recipe=recipes(),
        namespace=NAMESPACES,
        number=PICK,
    )
    def look(self, what: str, recipe: Recipe, namespace: str, number: int) -> None:
        """What changes nothing."""
        if what == "stats":
            self.model.begin()
            self.stats()
            return
        before = self.model.snapshot()
        self.model.begin()
        if what == "match":
            self.match(self.prompt(recipe), namespace)
        else:
            self.make_mistakes(self.pick(number), number + 1)
        self.nothing_happened(before)

    def match(self, prompt: list[int], namespace: str) -> None:
        expected = self.model.naive.match(prompt, namespace)
        found = self.cache.match(prompt, namespace)
        assert found.pages.tolist() == expected.pages
        assert found.partial_tokens == expected.partial_tokens
        assert found.num_tokens == len(expected.pages) * self.page_size + found.partial_tokens
        assert found.partial_page in (expected.partial_pages or {-1})

    def stats(self) -> None:
        model = self.model
        stats = self.cache.stats()
        tables = [page for live in model.live for page in live.table]
        counted = {page: tables.count(page) for page in tables}
        evictable = len(model.evictable())
        assert stats.sequences == len(model.live)
        assert stats.pages_total == model.num_pages
        assert stats.pages_used == model.num_pages - stats.pages_free
        assert stats.pages_free == model.free
        assert stats.pages_cached == len(model.naive)
        assert stats.pages_evictable == evictable
        assert stats.pages_protected == len(model.naive) - evictable
        assert stats.pages_shared == sum(n > 1 for n in counted.values())
        assert stats.shares == len(tables) - len(counted)
        assert stats.references == len(tables) + len(model.naive) + len(model.claims())
        spaces = {page.namespace for page in model.naive.pages.values()}
        assert stats.namespaces == len(spaces | {live.seq.namespace for live in model.live})
        for name, count in model.expect.items():
            assert getattr(stats, name) == count, name
        assert stats.hook_errors == 0
        running = [pinned for pinned in model.pins if pinned.pin.num_tokens]
        hard = {page for pinned in running if pinned.hard for page in pinned.path}
        assert stats.pins == len(running)
        assert stats.hard_pinned_pages == len(hard) <= model.budget
        assert stats.pinned_pages == len(hard | model.soft_pinned())

    def make_mistakes(self, live: Live, beyond: int) -> None:
        for tokens in ([-beyond], [2**31], [[1, 2]], [1.5], "text", ["1"], None):
            for take in (live.seq.append, self.cache.open, self.cache.match, self.cache.pin):
                with pytest.raises(InvalidValue):
                    take(tokens)
        for length in (-beyond, len(live.tokens) + beyond, 0.5):
            with pytest.raises(InvalidValue):
                live.seq.truncate(length)
            if not live.copying:
                with pytest.raises(InvalidValue):
                    live.seq.publish(length)
        for other in self.model.live:
            if other.copying:
                with pytest.raises(IllegalStep, match="copies"):
                    other.seq.publish()
        with pytest.raises(InvalidValue):
            self.cache.evict(-beyond)
        with pytest.raises(InvalidValue):
            self.cache.open([])
        for closed in self.model.closed[-2:]:
            self.use_what_is_closed(closed.seq)

    def use_what_is_closed(self, seq: Sequence) -> None:
        steps = [seq.copies, seq.fork, seq.publish, seq.close]
        for step in (*steps, partial(seq.append, [1]), partial(seq.truncate, 0)):
            with pytest.raises(IllegalStep, match="closed"):
                step()
        assert seq.closed
