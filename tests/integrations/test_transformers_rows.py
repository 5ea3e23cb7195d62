"""Rows of a batch: their texts, what they share, and the passes that compute the rest."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.transformers_settings import (
    PASS_TOKENS,
    passes,
    rows_of,
    shared_prefixes,
)

TEXTS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda t: np.array(t, np.int32)),
    min_size=1,
    max_size=6,
)


def test_texts_are_what_the_mask_leaves():
    ids = torch.tensor([[9, 9, 1, 2], [3, 4, 5, 6]])
    rows = rows_of(ids, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert [text.tolist() for text in rows.texts] == [[1, 2], [3, 4, 5, 6]]
    assert rows.pads == (2, 0)
    assert (rows.columns, rows.longest) == (4, 4)
    assert rows.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_kind(kind):
    rows = rows_of(torch.tensor([[9, 1, 2]]), torch.tensor([[0, 1, 1]]).to(kind))
    assert rows.pads == (1,)
    assert rows.mask.dtype == torch.int64


def test_one_text_and_no_mask():
    assert rows_of(torch.tensor([4, 5])).texts[0].tolist() == [4, 5]


@pytest.mark.parametrize("ids", [torch.zeros(0), torch.zeros(1, 2, 3), torch.zeros(0, 4)])
def test_shapes_that_are_no_batch(ids):
    with pytest.raises(InvalidValue, match=r"\[rows, tokens\] is needed"):
        rows_of(ids.long())


@given(TEXTS)
def test_every_two_rows_share_what_they_begin_with(texts):
    order, shared = shared_prefixes(texts)
    assert sorted(order) == list(range(len(texts)))
    assert [tokens for _, tokens in shared] == sorted(tokens for _, tokens in shared)
    for rows, tokens in shared:
        assert len(rows) >= 2
        assert tokens
        assert len({texts[row][:tokens].tobytes() for row in rows}) == 1
        assert all(tokens < len(texts[row]) for row in rows)
    for one in range(len(texts)):
        for other in range(one):
            both = min(len(texts[one]), len(texts[other])) - 1
            different = np.flatnonzero(texts[one][:both] != texts[other][:both])
            common = int(different[0]) if len(different) else both
            found = [tokens for rows, tokens in shared if {one, other} <= set(rows)]
            assert max(found, default=0) == common


def cost(steps):
    return sum(PASS_TOKENS + len(rows) * (stop - start) for rows, start, stop in steps)


def cheapest(levels, columns):
    """All ways to go, tried."""

    @cache
    def best(start):
        if start == columns:
            return 0
        return min(
            PASS_TOKENS + (stop - start) * sum(level < stop for level in levels) + best(stop)
            for stop in range(start + 1, columns + 1)
        )

    return best(min(levels)) if min(levels) < columns else 0


@settings(max_examples=60)
@given(st.lists(st.integers(0, 160), min_size=1, max_size=6), st.integers(0, 40))
def test_passes_are_as_cheap_as_can_be(levels, more):
    columns = max(levels) + more
    steps = passes(levels, columns)
    reached = list(levels)
    for rows, start, stop in steps:
        for row in rows:
            assert reached[row] >= start  # no pass needs what nobody knows
            reached[row] = max(reached[row], stop)
    assert all(level >= columns for level in reached)
    assert cost(steps) == cheapest(tuple(levels), columns)
    if steps and more:
        assert steps[-1].stop == columns
        assert steps[-1].rows == tuple(range(len(levels)))  # all are in the last one


def test_a_row_that_knows_little_does_not_hold_up_the_others():
    assert passes([1000, 0, 1000], 1010) == [((1,), 0, 1000), ((0, 1, 2), 1000, 1010)]
    assert passes([1000, 990, 1000], 1010) == [((0, 1, 2), 990, 1010)]  # not worth a pass
