"""Matching: the longest stored prefix, in its namespace, and nothing else."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_hooks import PrefixHooks, pages_of

from kvkeep.core.cache.inspector import runs_of
from prompt_recipes import Recipe, recipes

if TYPE_CHECKING:
    from prefix_driver import IndexDriver

__all__ = ["FindingTests"]


def agree(driver: IndexDriver, tokens: list[int], namespace: str = "") -> None:
    """The index answers what the model answers."""
    expected = driver.naive.match(tokens, namespace)
    match = driver.match(tokens, namespace)
    if match is None:
        assert not expected.pages, f"{tokens} was not found"
        assert not expected.partial_tokens, f"{tokens} was not found"
        return
    assert match.pages.tolist() == expected.pages
    assert match.partial_tokens == expected.partial_tokens
    assert match.partial_page in (expected.partial_pages or {-1})


class FindingTests(PrefixHooks):
    """`match`, namespaces, and storing so that it is found."""

    def test_a_new_index_is_empty(self, driver: IndexDriver) -> None:
        """Nothing is stored, evictable, or found."""
        assert driver.match([1, 2, 3]) is None
        assert driver.match([]) is None
        assert driver.index.num_pages == driver.index.num_evictable == 0
        assert driver.evict(5) == driver.clear() == []
        driver.check()

    def test_match_finds_the_longest_prefix(self) -> None:
        """Whatever was stored, the answer is the longest prefix, token by token if ``exact``."""

        @settings(max_examples=300, deadline=None)
        @given(
            st.lists(recipes(), min_size=1, max_size=5),
            st.lists(recipes(), max_size=3),
            st.sampled_from([1, 2, 3, 4, 16]),
        )
        def run(stores: list[Recipe], looks: list[Recipe], page_size: int) -> None:
            driver = self.make_driver(page_size)
            stored: list[list[int]] = []
            for recipe in stores:
                stored.append(recipe.build(stored, page_size))
                driver.store(stored[-1])
            driver.check()
            others = [recipe.build(stored, page_size) for recipe in looks]
            for tokens in stored + others:
                for cut in range(len(tokens) + 1):
                    agree(driver, tokens[:cut])
                agree(driver, [*tokens, 0])

        run()

    def test_only_full_pages_are_stored(self, driver: IndexDriver) -> None:
        """A prompt shorter than a page leaves nothing; a longer one its full pages."""
        size = driver.index.page_size
        tokens = list(range(1, 3 * size))  # one token short of three pages
        assert len(driver.store(tokens)) == (len(tokens) // size)
        assert driver.store(tokens[: size - 1]) == []
        driver.check()

    def test_match_changes_nothing(self) -> None:
        """No order of eviction, no run, no count depends on what was looked up."""
        orders = []
        for lookups in (0, 30):
            driver = self.make_driver(2)
            chance, other = random.Random(7), random.Random(8)
            for _ in range(12):
                driver.store([chance.randrange(2) for _ in range(chance.randrange(2, 14))])
                for _ in range(lookups):
                    driver.match([other.randrange(2) for _ in range(other.randrange(14))])
            runs = [run.pages.tolist() for space in driver.index.namespaces()
                    for run in runs_of(driver.index, space)]  # fmt: skip
            order = [driver.evict(1) for _ in range(driver.index.num_evictable)]
            orders.append((runs, order))
        assert orders[0] == orders[1]

    def test_namespaces_share_nothing(self, driver: IndexDriver) -> None:
        """The same tokens in another namespace are other pages, or not there at all."""
        tokens = pages_of(driver, 1, 2, 3)
        pages = driver.store(tokens, "one")
        assert driver.match(tokens, "other") is None
        others = driver.store(tokens, "other")
        assert not set(pages) & set(others)
        assert driver.found(tokens, "one") == pages
        assert driver.found(tokens, "other") == others
        assert sorted(driver.index.namespaces().values()) == [3, 3]
        assert len(driver.index.roots) == 2
        assert sorted(driver.clear("one")) == sorted(pages)
        assert driver.found(tokens, "other") == others
        assert len(driver.index.roots) == 1
        driver.check()

    def test_an_empty_namespace_leaves_nothing_behind(self, driver: IndexDriver) -> None:
        """It is there while it is held, and gone with its last hold and page."""
        for at in range(20):
            driver.close(driver.open([1, 2, 3], f"tenant {at}"))
        assert len(driver.index.roots) == 0
        held = driver.open([1], "tenant")
        assert len(driver.index.roots) == 1
        driver.close(held)
        driver.store(pages_of(driver, 1), "tenant")
        driver.evict(1)
        assert len(driver.index.roots) == 0
        driver.check()

    def test_partial_matches_are_exact_or_none(self, driver: IndexDriver) -> None:
        """``exact`` indices name the page and its matching tokens, others never any."""
        size = driver.index.page_size
        tokens = [token % 5 for token in range(4 * size)]
        pages = driver.store(tokens)
        for keep in range(4 * size):
            match = driver.match([*tokens[:keep], 9, 9])
            full, part = divmod(keep, size)
            if match is None or not self.exact:
                part = 0
            if match is not None:
                assert match.pages.tolist() == pages[:full]
                assert match.partial_tokens == part
                assert match.partial_page == (pages[full] if part else -1)
                bare = match.without_partial()
                assert bare.pages.tolist() == pages[:full]
                assert (bare.partial_page, bare.partial_tokens) == (-1, 0)

    def test_the_longest_head_among_many_siblings(self) -> None:
        """With hundreds of pages behind one place, removed and added again, the best is found."""
        size = 4
        driver = self.make_driver(size)
        chance = random.Random(11)
        stem = [5] * size
        stored: dict[tuple[int, ...], None] = {}

        def head() -> list[int]:
            # Most share all but the last token; some leave the others earlier.
            common = chance.choice([3, 3, 3, 2, 1, 0])
            return [8] * common + [chance.randrange(300) for _ in range(size - common)]

        for turn in range(900):
            if stored and chance.random() < 0.4:
                gone = chance.choice(list(stored))
                driver.drop(driver.open([*stem, *gone]), 1)
                del stored[gone]
            else:
                page = head()
                driver.store(stem + page)
                stored[tuple(page)] = None
            if turn % 9 == 0:
                for _ in range(3):
                    tokens = chance.choice([head(), [8, 8, 8, 999], [8, 8, 999], [8, 8, 8]])
                    agree(driver, stem + tokens)
                agree(driver, [*stem, *chance.choice([*stored, (8, 8, 8)])[:3], 999])
        driver.check()

    def test_storing_in_pieces_is_storing_at_once(self, driver: IndexDriver) -> None:
        """A path that grew page by page is found like one that was stored in one piece."""
        tokens = pages_of(driver, *range(1, 9))
        size = driver.index.page_size
        held = driver.open(tokens)
        for stop in range(size, len(tokens) + 1, size):
            assert driver.publish(held, tokens[:stop]) == []
            driver.check()
            assert driver.found(tokens) == held.pages
        driver.close(held)
        assert driver.store(tokens) == held.pages

    def test_insert_keeps_the_first_copy(self, driver: IndexDriver) -> None:
        """Pages that another stored before stand for those given; what is new follows them."""
        tokens = pages_of(driver, 1, 2, 3, 4)
        size = driver.index.page_size
        first, second = driver.open(tokens), driver.open(tokens)
        driver.publish(first, tokens[: 2 * size])
        assert driver.publish(second, tokens[: 2 * size]) == first.pages
        third = driver.open([])
        assert driver.publish(third, tokens) == first.pages
        assert third.pages[:2] == first.pages
        driver.check()
        assert driver.found(tokens) == third.pages

    def test_insert_divides_where_two_prompts_part(self, driver: IndexDriver) -> None:
        """A prompt that leaves a stored one at any page shares all pages before."""
        tokens = pages_of(driver, *range(1, 6))
        pages = driver.store(tokens)
        for keep in range(5):
            other = pages_of(driver, *range(1, keep + 1), 90 + keep, 99)
            path = driver.open([])
            assert driver.publish(path, other) == pages[:keep]
            driver.close(path)
            assert driver.found(other) == path.pages
            assert driver.found(tokens) == pages
            driver.check()

    def test_an_encoder_follows_its_sequence(self, driver: IndexDriver) -> None:
        """After `cut` its pages may be others; a fork goes its own way."""
        size = driver.index.page_size
        tokens = pages_of(driver, 1, 2, 3)
        held = driver.open(tokens)
        driver.publish(held, tokens)
        other = driver.fork(held)
        driver.shorten(held, 1)
        left = pages_of(driver, 1, 8, 9)
        assert driver.publish(held, left) == []
        assert driver.publish(other, [*tokens, *[4] * size]) == []
        driver.check()
        assert driver.found(left) == held.pages
        assert driver.found([*tokens, *[4] * size]) == other.pages

    def test_runs_show_everything(self) -> None:
        """The runs of a namespace are all its pages, in order, with their tokens if kept."""
        driver = self.make_driver(2)
        chance = random.Random(3)
        for _ in range(20):
            driver.store([chance.randrange(2) for _ in range(chance.randrange(2, 16))])
        (space,) = driver.index.namespaces()
        path: list[int] = []
        seen: list[int] = []
        runs = list(runs_of(driver.index, space))
        for run in runs:
            assert run.depth <= run.start
            del path[run.start :]
            assert len(path) == run.start, "a run begins where a run before it goes on"
            path += run.pages.tolist()
            assert driver.naive.path(path[-1]) == path
            prefix = driver.naive.pages[path[-1]].prefix
            if run.tokens is not None:
                assert tuple(run.tokens.tolist()) == prefix[run.start * 2 :]
            assert (run.holders, run.pins) == (0, 0)
            assert isinstance(run.state, str)
            seen += run.pages.tolist()
        assert sorted(seen) == sorted(driver.naive.pages)
        tops = sum(run.depth == 0 for run in runs)
        assert sum(run.children for run in runs) + tops == len(runs)
