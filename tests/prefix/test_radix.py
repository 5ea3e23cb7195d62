"""What is particular to the radix index: exact to the token, and how its runs are cut and grow.

The contract that it shares with the chain index is in `prefix_suite.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import Namespace
from kvkeep.core.eviction import LRU
from kvkeep.core.prefix import RadixIndex
from kvkeep.core.prefix.pinned import Pinned
from kvkeep.core.prefix.tree import _GROW_PAGES
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

SPACE = Namespace()


class Store:
    """A radix index with a counter for page ids; what is stored is let go of at once."""

    def __init__(self, page_size: int = 4) -> None:
        self.index = RadixIndex(page_size, LRU())
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
        return [(run.depth, run.start, run.pages.tolist()) for run in self.index.runs(SPACE)]


@pytest.fixture
def store() -> Store:
    made = Store()
    made.put([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    return made


# --- matching --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "pages", "partial"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [0, 1, 2], (-1, 0)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [0, 1, 2], (-1, 0)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 1], (2, 3)),  # ends inside a page
        ([1, 2, 3, 4, 5, 6, 99, 8, 9], [0], (1, 2)),  # leaves inside a page
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1], (-1, 0)),  # ends between pages
        ([1, 2, 3, 4, 99, 6, 7, 8], [0], (-1, 0)),  # leaves between pages
        ([1, 2, 3], [], (0, 3)),  # shorter than a page
        ([1, 99], [], (0, 1)),
        ([99, 2, 3, 4], [], (-1, 0)),
        ([], [], (-1, 0)),
    ],
)
def test_a_match_is_exact_to_the_token(
    store: Store, prompt: list[int], pages: list[int], partial: tuple[int, int]
) -> None:
    assert store.match(*prompt) == (pages, *partial)


def test_among_siblings_the_one_that_begins_most_alike_is_named(store: Store) -> None:
    store.put([1, 2, 3, 4, 5, 60, 70, 80])  # page 3
    store.put([1, 2, 3, 4, 5, 6, 7, 88])  # page 4
    assert store.match(1, 2, 3, 4, 5, 60, 99) == ([0], 3, 2)
    assert store.match(1, 2, 3, 4, 5, 6, 7, 88) == ([0, 4], -1, 0)
    assert store.match(1, 2, 3, 4, 5, 6, 7, 89) == ([0], 4, 3)
    assert store.match(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) == ([0, 1], 2, 3)
    pages, page, tokens = store.match(1, 2, 3, 4, 5, 99)
    assert (pages, tokens) == ([0], 1)
    assert page in {1, 3, 4}


def test_bytes_that_agree_are_not_tokens_that_agree() -> None:
    """0x01020304 and 0x09020304 share three bytes of four."""
    store = Store(page_size=2)
    store.put([0x01020304, 5])
    assert store.match(0x09020304, 5) == ([], -1, 0)
    store.put([0x02020304, 6])  # a sibling, so that the ordered search is used
    assert store.match(0x09020304, 5) == ([], -1, 0)
    assert store.match(0x02020304, 0x07000006) == ([], 1, 1)


def test_evicted_siblings_are_not_named() -> None:
    store = Store()
    for first in range(20):
        store.put([0, first, first, first])
    store.index.evict(19)
    assert store.match(0, 3, 3) == ([], 19, 1)
    store.index.evict(1)
    assert store.index.match(store.symbols([0, 3, 3]), SPACE) is None, "the namespace is empty"


def test_a_match_changes_nothing(store: Store) -> None:
    store.put([1, 2, 3, 4, 50, 60, 70, 80])
    before = list(map(str, store.index.runs(SPACE)))
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3, 4, 50, 60, 70, 80, 9], [7]):
        store.match(*prompt)
        assert store.index.match(store.symbols(prompt), Namespace(tenant="other")) is None
    assert list(map(str, store.index.runs(SPACE))) == before
    store.index.check([])


# --- holding ---------------------------------------------------------------------------------


def test_a_hold_cuts_the_run_where_the_match_ends(store: Store) -> None:
    found = store.index.match(store.symbols([1, 2, 3, 4, 5, 6, 7, 8, 99]), SPACE)
    assert store.index.protects(found) == 2
    hold, source = store.index.hold(found, SPACE)
    assert source is None
    assert store.runs() == [(0, 0, [0, 1]), (1, 2, [2])]
    assert store.index.num_evictable == 1
    store.index.check([hold])


@pytest.mark.parametrize(
    ("prompt", "runs", "protected"),
    [
        ([1, 2, 3, 4, 5, 99], [(0, 0, [0]), (1, 1, [1]), (2, 2, [2])], 2),
        ([1, 99], [(0, 0, [0]), (1, 1, [1, 2])], 1),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 99], [(0, 0, [0, 1]), (1, 2, [2])], 3),
    ],
)
def test_a_partial_hit_protects_one_page_more_not_the_run_behind_it(
    store: Store, prompt: list[int], runs: list[Any], protected: int
) -> None:
    found = store.index.match(store.symbols(prompt), SPACE)
    assert found is not None
    assert store.index.protects(found) == protected
    hold, source = store.index.hold(found, SPACE)
    assert store.runs() == runs
    assert store.index.num_evictable == 3 - protected
    store.index.check([hold, source])
    assert sorted(store.index.evict(9)) == list(range(protected, 3))
    assert store.index.protects(store.index.match(store.symbols(prompt), SPACE)) == 0


def cut(store: Store) -> tuple[Any, Any]:
    """The holds of a prompt that begins like the stored one, whose first page it wants."""
    hold, source = store.index.hold(store.index.match(store.symbols([1, 2, 9]), SPACE), SPACE)
    assert store.runs() == [(0, 0, [0]), (1, 1, [1, 2])]
    return hold, source


def test_a_run_that_was_cut_for_a_hold_is_one_run_again(store: Store) -> None:
    (before,) = (child for root in store.index._roots.values() for child in root.children.values())
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
        store.index.release(store.index.again(source))
        return []

    def held(source: Any) -> list[Any]:
        return [store.index.again(source)]

    def pinned(source: Any) -> list[Any]:
        store.index.pin(source, Pinned())
        return []

    def branched(source: Any) -> list[Any]:
        store.put([1, 2, 3, 4, 50, 60, 70, 80])
        return []

    def reused(source: Any) -> list[Any]:
        return [store.index.hold(store.index.match(store.symbols([1, 2, 3, 4]), SPACE), SPACE)[0]]

    for differ in (used, held, pinned, branched, reused):
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


def test_what_protects_says_is_what_hold_takes(store: Store) -> None:
    store.put([1, 2, 3, 4, 5, 6, 70, 80, 90, 100, 110, 120])
    prompts = [[], [1], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], list(range(1, 13)),
               [1, 2, 3, 4, 5, 6, 70, 80, 90], [1, 2, 3, 4, 5, 6, 70, 80, 99], [9]]  # fmt: skip
    held: list[Any] = []
    for prompt in [*prompts, *prompts]:  # also while the others hold theirs
        found = store.index.match(store.symbols(prompt), SPACE)
        evictable = store.index.num_evictable
        says = store.index.protects(found)
        held += [hold for hold in store.index.hold(found, SPACE) if hold is not None]
        assert evictable - store.index.num_evictable == says, prompt
        store.index.check(held)


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
    sizes = [len(run.pages) for run in store.index.runs(SPACE)]
    assert sum(sizes) == 3 * _GROW_PAGES
    assert len(sizes) <= 4, "a few long runs, not one per publish"
    assert max(sizes) <= _GROW_PAGES + 1, "and no publish copies more than this"
    store.index.check([hold])


def test_a_run_that_others_stand_on_does_not_grow() -> None:
    """A hold or a pin on a run's end means that end: it would cover what came later."""
    for stand in ("fork", "pin"):
        store = Store()
        hold = grow(store, 2)
        if stand == "fork":
            other = [store.index.again(hold)]
        else:
            other = []
            store.index.pin(hold, Pinned())
        pinned = hold
        hold = grow(store, 2, hold, first=2000)
        assert [len(run.pages) for run in store.index.runs(SPACE)] == [2, 2], stand
        assert pinned.end == 2
        store.index.check([hold, *other])


def test_pages_taken_off_the_tail_give_their_memory_back() -> None:
    store = Store()
    store.put([token for token in range(1000) for _ in range(4)])
    (root,) = store.index._roots.values()
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


def test_what_was_trimmed_can_be_cut_and_grow_again(store: Store) -> None:
    store.index.evict(1)
    hold = store.put([1, 2, 3, 4, 5, 6, 7, 8, 90, 100, 110, 120], release=False)
    assert store.match(1, 2, 3, 4, 5, 6, 7, 8, 90, 100) == ([0, 1], 3, 2)
    store.put([1, 2, 3, 4, 55, 66, 77, 88])
    assert store.match(1, 2, 3, 4, 55, 66, 77, 88)[0] == [0, 4]
    store.index.check([hold])


def test_two_requests_that_store_the_same_get_the_first_ones_pages() -> None:
    store = Store(page_size=2)
    first, _ = store.index.hold(None, SPACE)
    second = store.index.again(first)
    tokens = store.symbols([1, 2, 3, 4, 5, 6])
    put = store.index.insert(first, tokens, np.array([0, 1, 2], np.int32), 0)
    assert put.existing.tolist() == []
    # The second went another way after two pages, and further.
    tokens = store.symbols([1, 2, 3, 4, 9, 9, 8, 8])
    late = store.index.insert(second, tokens, np.array([3, 4, 5, 6], np.int32), 0)
    assert late.existing.tolist() == [0, 1]
    assert store.runs() in (
        [(0, 0, [0, 1]), (1, 2, [5, 6]), (1, 2, [2])],
        [(0, 0, [0, 1]), (1, 2, [2]), (1, 2, [5, 6])],
    )
    store.index.check([put.hold, late.hold])
