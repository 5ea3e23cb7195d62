"""Which short pieces attend together, and how much padding that costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkeep.core.geometry import KVGeometry
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine.attention.plan import SHORT, Grain, PlacedPiece, PlanContext, groups

pytestmark = pytest.mark.model

PAGE_SIZE = 4


@pytest.fixture(scope="module")
def tensors():
    return PagedTensors(KVGeometry(2, 1, 8, "float32"), 200, PAGE_SIZE)


def planned(tensors, lengths, *, tokens=1, pad=0, most=1000, window=None):
    """The groups of pieces that end after ``lengths`` tokens; ``pad`` and ``most`` in pages."""
    tokens = [tokens] * len(lengths) if isinstance(tokens, int) else tokens
    begins = np.cumsum([0, *tokens[:-1]]).tolist()
    placed = [
        PlacedPiece(
            begin, stop - n, stop, np.arange(-(-stop // PAGE_SIZE), dtype=np.int32),
            0 if window is None else max(0, stop - n + 1 - window),
        )
        for begin, stop, n in zip(begins, lengths, tokens, strict=True)
    ]  # fmt: skip
    page = tensors.page_bytes // 2
    grain = Grain(query_rows=8, call_bytes=pad * page, group_bytes=most * page)
    return groups(placed, PlanContext(tensors, tensors.scratch(), grain, window, group=1))


def rows(group):
    """The rows of the batch that a group writes."""
    return torch.arange(1000)[group.rows].tolist()


def test_pieces_of_one_length_are_one_call_and_no_mask(tensors):
    [group] = planned(tensors, [20] * 5)
    assert rows(group) == [0, 1, 2, 3, 4]
    assert isinstance(group.rows, slice)  # neighbours are not copied
    assert group.mask is None


def test_one_piece_is_never_masked(tensors):
    [group] = planned(tensors, [18])
    assert group.keys.shape[2] == 18
    assert group.mask is None


@pytest.mark.parametrize(("pad", "count"), [(0, 4), (1, 2), (3, 2), (4, 1)])
def test_padding_up_to_what_a_call_costs(tensors, pad, count):
    """Of 1, 2, 4 and 5 pages: a piece that joins a group pads all pieces in it."""
    made = planned(tensors, [4, 8, 16, 20], pad=pad)
    assert len(made) == count
    assert sorted(row for group in made for row in rows(group)) == [0, 1, 2, 3]


def test_a_group_is_no_larger_than_the_grain(tensors):
    made = planned(tensors, [16] * 7, most=8)
    assert [len(rows(group)) for group in made] == [2, 2, 2, 1]


def test_a_piece_larger_than_the_grain_is_a_group_of_its_own(tensors):
    assert len(planned(tensors, [40, 40], most=3)) == 2


def test_drafts_attend_together_and_single_tokens_apart_from_them(tensors):
    tokens = [1, 5, 1, 9, 2]
    made = planned(tensors, [20] * 5, tokens=tokens)
    assert [group.queries for group in made] == [1, 9]
    # Rows 0 and 6 are single; a shorter draft is filled up with its last token.
    assert rows(made[0]) == [0, 6]
    assert rows(made[1])[:9] == [1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert rows(made[1])[9:18] == list(range(7, 16))
    assert rows(made[1])[18:] == [16, 17] + [17] * 7


def test_sixteen_sequences_with_drafts_are_one_call(tensors):
    assert len(planned(tensors, [40] * 16, tokens=SHORT)) == 1


def test_what_is_before_the_window_is_not_seen(tensors):
    [group] = planned(tensors, [30], window=5)
    assert group.keys.shape[2] == 5
    assert group.mask is None
    [group] = planned(tensors, [30], tokens=3, window=5)
    assert group.keys.shape[2] == 7
    seen = (group.mask[0, 0] == 0).int()
    assert seen.tolist() == [[1] * 5 + [0, 0], [0] + [1] * 5 + [0], [0, 0] + [1] * 5]
