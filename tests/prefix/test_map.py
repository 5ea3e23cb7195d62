"""Walks over a tree: sums, numbers, and what steps may miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import Namespace
from kvkeep.core.cache.inspector import Survey, TreeWalk, walk_tree
from kvkeep.core.eviction import LRU
from kvkeep.core.prefix import Tree
from kvkeep.core.prefix.node import descend
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.prefix.node import Node

PAGE = 2
SPACES = (Namespace(), Namespace("other"))


class Tree:
    """An index of pages of two tokens; what is stored is let go of at once, unless it is held."""

    def __init__(self, kind: type[Tree] = Tree) -> None:
        self.index = kind(PAGE, LRU())
        self.pages = 0

    def put(self, tokens: Iterable[int], space: int = 0, *, held: bool = False) -> Node:
        """What a request does that reuses what is there."""
        index, name = self.index, SPACES[space]
        row = as_tokens(list(tokens))
        encoder = index.encoder(name)
        hold, source = index.hold(index.match(encoder.lookup(row), name), name)
        start, stop = hold.end, len(row) // PAGE
        pages = np.arange(self.pages, self.pages + stop - start, dtype=np.int32)
        self.pages += len(pages)
        if len(pages):
            hold = index.insert(hold, encoder.pages(row, start, stop), pages, 0).hold
        if source is not None:
            index.release(source)
        if not held:
            index.release(hold)
        return hold

    def probe(self, tokens: Iterable[int], space: int = 0) -> Node:
        """A hold as far as these tokens are stored: within a run it cuts that in two."""
        index, name = self.index, SPACES[space]
        row = as_tokens(list(tokens))
        found = index.match(index.encoder(name).lookup(row), name)
        hold, source = index.hold(found, name, used=False)
        if source is not None:
            index.release(source, used=False)
        return hold

    def unprobe(self, hold: Node) -> None:
        """The hold was no use: what it cut in two is one run again."""
        self.index.release(hold, used=False)

    def roots(self) -> list[Node]:
        return list(self.index.roots.values())

    def nodes(self) -> list[Node]:
        """All runs, however they are found."""
        return [node for root in self.roots() for node, _ in descend(root) if node.end]

    def walk(
        self, columns: Iterable[str] = Survey.COLUMNS, top: Any = None, step: int = 3
    ) -> TreeWalk:
        walk = walk_tree(self.index, columns, top)
        while not walk.done:
            walk.step(step)
        return walk

    def path(self, node: Node) -> list[int]:
        """All tokens up to the end of a run."""
        tokens: list[int] = []
        while node.parent is not None:
            tokens[:0] = np.frombuffer(bytes(node.run), np.int32).tolist()
            node = node.parent
        return tokens


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 1)),
    min_size=1, max_size=14,
)  # fmt: skip


def grown(asked: list[tuple[list[int], int]], evicted: int = 0) -> Tree:
    tree = Tree()
    for tokens, space in asked:
        tree.put(tokens, space)
    tree.index.evict(evicted)
    return tree


def uses_below(node: Node) -> int:
    return node.hits + sum(uses_below(child) for child in node.children.values())


@given(prompts, st.integers(0, 6), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_sums_are_those_of_a_recount(asked, evicted, step):
    tree = grown(asked, evicted)
    survey = Survey(tree.walk(step=step))
    rows = {node: row for row, node in enumerate(survey.nodes)}
    assert set(rows) == {*tree.nodes(), *tree.roots()}
    assert len(rows) == len(survey.nodes)
    assert not survey.gone.any()
    for node, row in rows.items():
        below = [one for one, _ in descend(node)]
        assert survey.below_pages[row] == sum(one.size for one in below)
        assert survey.below_runs[row] == sum(1 for one in below if one.end)
        assert survey.below_hits[row] == uses_below(node)
        assert survey.parents[row] == (-1 if node.parent is None else rows[node.parent])
        assert survey.ids[row] == node.id


@given(prompts, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_largest_hang_together(asked, count):
    survey = Survey(grown(asked).walk())
    rows = survey.largest(count)
    assert len(rows) == min(count, len(survey.nodes))
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert all(survey.parents[row] < 0 or survey.parents[row] in rows for row in rows)
    left = np.setdiff1d(np.arange(len(survey.nodes)), rows)
    if len(left):
        assert survey.below_pages[left].max() <= survey.below_pages[rows].min()


# --- numbers -----------------------------------------------------------------------------------


@given(prompts)
@settings(max_examples=100, deadline=None)
def test_a_number_stays_with_the_end_of_its_run(asked):
    """Whatever is stored, split and evicted: by their last page, as long as they have that."""
    tree = Tree()
    known: dict[int, Node] = {}
    for tokens, space in asked:
        tree.put(tokens, space)
        nodes = {node.id: node for node in tree.nodes()}
        assert len(nodes) == len(tree.nodes())
        for number, node in known.items():
            if node.parent is not None:
                assert nodes[number] is node
            else:
                assert number not in nodes
        for number in set(nodes) - set(known):
            assert number > max(known, default=0)  # never one that was used before
        if len(nodes) > 4:
            tree.index.evict(1)
        known |= nodes


def test_uses_are_of_both_halves_and_outlive_what_was_used():
    tree = Tree()
    end = tree.put([1, 1, 2, 2, 3, 3])
    for _ in range(3):
        tree.put([1, 1, 2, 2, 3, 3])
    tree.put([1, 1, 2, 2, 4, 4])
    front = end.parent
    assert front is not None
    assert (uses_below(end), uses_below(front)) == (3, 4)
    tree.index.evict(2)
    assert (front.children, uses_below(front)) == ({}, 4)


# --- changes between steps -----------------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [1, 2, 3], ids=["before", "front", "both"])
def test_a_front_that_is_joined_again_counts_once(looked_at):
    tree = Tree()
    tree.put([1, 1, 2, 2, 3, 3])
    hold = tree.probe([1, 1])
    assert len(tree.nodes()) == 2
    walk = walk_tree(tree.index, Survey.COLUMNS)
    walk.step(1)
    for _ in range(looked_at - 1):
        walk.step(1)
    tree.unprobe(hold)
    assert len(tree.nodes()) == 1
    while not walk.done:
        walk.step(1)
    survey = Survey(walk)
    assert survey.below_pages[0] == 3
    assert not survey.gone.any()
    rows = survey.largest(9)
    assert rows.tolist() == list(range(len(survey.nodes)))


def test_a_top_that_is_joined_again_is_gone():
    tree = Tree()
    tree.put([1, 1, 2, 2, 3, 3])
    hold = tree.probe([1, 1])
    walk = walk_tree(tree.index, Survey.COLUMNS, tree.nodes()[0])
    tree.unprobe(hold)
    while not walk.done:
        walk.step(1)
    assert Survey(walk).gone[0]


@given(
    prompts, prompts, st.integers(1, 4), st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=8),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_change_between_steps_leaves_sums_that_fit_together(asked, later, step, evicted, cuts):
    tree = grown(asked)
    holds = [
        tree.probe(asked[which % len(asked)][0][:count], asked[which % len(asked)][1])
        for which, count in cuts
    ]
    walk = walk_tree(tree.index, Survey.COLUMNS)
    coming = iter(later)
    going = iter(evicted)
    while not walk.done:
        walk.step(step)
        tree.index.evict(next(going, 0))
        for tokens, space in [next(coming, ([], 0))]:
            if tokens:
                tree.put(tokens, space)
        if holds:
            tree.unprobe(holds.pop())
    survey = Survey(walk)
    assert survey.below_pages[survey.parents < 0].sum() == survey.sizes.sum()
    assert (survey.below_pages >= survey.sizes).all()
    rows = survey.largest(5)
    assert all(survey.parents[row] < 0 or survey.parents[row] in rows for row in rows)
