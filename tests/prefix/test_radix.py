"""What is particular to the radix index: exact to the token, and how its runs are cut and grow.

The contract that it shares with the chain index is in `prefix_suite.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import Namespace
from kvkeep.core.cache.inspector import runs_of
from kvkeep.core.eviction import LRU
from kvkeep.core.prefix import Tree
from kvkeep.core.prefix.tree import _GROW_PAGES
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

SPACE = Namespace()


class Store:
    """A radix index with a counter for page ids; what is stored is let go of at once."""

    def __init__(self, page_size: int = 4) -> None:
        self.index = Tree(page_size, LRU())
        self.size = page_size
        self.next_page = 0

    def symbols(self, tokens: Iterable[int]) -> bytes:
        return as_tokens(list(tokens)).tobytes()

    def match(self, *tokens: int) -> tuple[list[int], int, int]:
        found = self.index.match(self.symbols(tokens), SPACE)
        assert found is not None
        return found.pages.tolist(), found.partial_page, found.partial_tokens

    def put(self, tokens: list[int], *, release: bool = True) -> Any:
        """Store full pages of tokens, as a request does that shares what is there."""
        hold, source = self.index.hold(self.index.match(self.symbols(tokens), SPACE), SPACE)
        start = hold.end
        new = len(tokens) // self.size - start
        pages = np.arange(self.next_page, self.next_page + new, dtype=np.int32)
        self.next_page += new
        hold = self.index.insert(hold, self.symbols(tokens[start * self.size :]), pages, 0).hold
        if source is not None:
            self.index.release(source, used=False)
        if release:
            self.index.release(hold)
        return hold

    def runs(self) -> list[tuple[int, int, list[int]]]:
        return [(run.depth, run.start, run.pages.tolist()) for run in runs_of(self.index, SPACE)]


@pytest.fixture
def store() -> Store:
    made = Store()
    made.put([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    return made


# --- matching --------------------------------------------------------------------------------


# --- holding ---------------------------------------------------------------------------------


def cut(store: Store) -> tuple[Any, Any]:
    """The holds of a prompt that begins like the stored one, whose first page it wants."""
    hold, source = store.index.hold(store.index.match(store.symbols([1, 2, 9]), SPACE), SPACE)
    assert store.runs() == [(0, 0, [0]), (1, 1, [1, 2])]
    return hold, source


def test_a_run_that_was_cut_for_a_hold_is_one_run_again(store: Store) -> None:
    (before,) = (child for root in store.index.roots.values() for child in root.children.values())
    hold, source = cut(store)
    store.index.release(source, used=False)
    assert store.runs() == [(0, 0, [0, 1, 2])]
    assert before.in_tree, "the end is the run that it was"
    store.index.check([hold])
    assert store.match(*range(1, 13)) == ([0, 1, 2], -1, 0)
    assert store.match(1, 2, 9) == ([], 0, 2)
    assert store.index.evict(2).tolist() == [1, 2], "and it still goes tail first"
    store.index.check([hold])


def test_a_run_stays_cut_where_its_parts_differ(store: Store) -> None:
    def used(source: Any) -> list[Any]:
        store.index.release(store.index.retain(source))
        return []

    def held(source: Any) -> list[Any]:
        return [store.index.retain(source)]

    def branched(source: Any) -> list[Any]:
        store.put([1, 2, 3, 4, 50, 60, 70, 80])
        return []

    def reused(source: Any) -> list[Any]:
        return [store.index.hold(store.index.match(store.symbols([1, 2, 3, 4]), SPACE), SPACE)[0]]

    for differ in (used, held, branched, reused):
        store = Store()
        store.put([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
        hold, source = cut(store)
        others = differ(source)
        store.index.release(source, used=False)
        assert (0, 0, [0]) in store.runs(), differ.__name__
        store.index.check([hold, *others])


def test_prompts_that_begin_alike_by_chance_stay_one_run_each_and_go_in_order() -> None:
    store = Store()
    prompts = [[1, *range(100 * i, 100 * i + 11)] for i in range(1, 40)]
    for prompt in prompts:
        store.put(prompt)
    assert sorted(pages for _, _, pages in store.runs()) == [
        [3 * i, 3 * i + 1, 3 * i + 2] for i in range(len(prompts))
    ]
    assert not store.index.policy._queue._between, "no age belongs between others"  # type: ignore[attr-defined]
    assert store.index.evict(30).tolist() == list(range(30))
    store.index.check([])


# --- growing and shrinking -------------------------------------------------------------------


def grow(store: Store, pages: int, hold: Any = None, first: int = 1000) -> Any:
    """Publish page by page, as a conversation or a long decode does."""
    if hold is None:
        hold, _ = store.index.hold(None, SPACE)
    for number in range(first, first + pages):
        page = np.array([store.next_page], np.int32)
        store.next_page += 1
        hold = store.index.insert(hold, store.symbols([number] * store.size), page, 0).hold
    return hold


def test_a_leaf_grows_in_place_up_to_a_bound() -> None:
    store = Store()
    hold = grow(store, 3 * _GROW_PAGES)
    sizes = [len(run.pages) for run in runs_of(store.index, SPACE)]
    assert sum(sizes) == 3 * _GROW_PAGES
    assert len(sizes) <= 4, "a few long runs, not one per publish"
    assert max(sizes) <= _GROW_PAGES + 1, "and no publish copies more than this"
    store.index.check([hold])


def test_pages_taken_off_the_tail_give_their_memory_back() -> None:
    store = Store()
    store.put([token for token in range(1000) for _ in range(4)])
    (root,) = store.index.roots.values()
    (leaf,) = root.children.values()
    for left in (999, 700, 400, 399, 3, 1):
        gone = store.index.evict(store.index.num_pages - left)
        assert gone.tolist() == list(range(left, left + len(gone)))
        kept = leaf.run.obj if isinstance(leaf.run, memoryview) else leaf.run
        assert len(leaf.run) == left * 16
        assert len(kept) <= 2 * len(leaf.run), "more is kept than twice what is needed"
        base = leaf.pages if leaf.pages.base is None else leaf.pages.base
        assert len(base) <= 2 * max(left, 1)
        assert store.match(0, 0, 0, 0)[0] == [0]
        store.index.check([])
