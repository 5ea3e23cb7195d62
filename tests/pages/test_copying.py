from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.pages import PageCopy
from kvkeep.core.pages.copying import checked_copies, independent

pages = st.integers(0, 5)
copies = st.lists(
    st.tuples(pages, pages, st.integers(1, 4)).filter(lambda copy: copy[0] != copy[1]), max_size=20
)


def test_a_page_copied_onto_itself_is_left_out() -> None:
    given = [PageCopy(1, 1, 4), PageCopy(np.int32(2), np.int64(3), 1)]
    assert checked_copies(given, 4, 4) == [(2, 3, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        *[
            (0, 4, 1),
            (4, 0, 1),
            (-1, 0, 1),
            (0, -1, 1),
            (0, 1, 0),
            (0, 1, 5),
            (0, 1, -1),
            (0, 4, 9),
        ],
        *[(0, 1), (0, 1, 2, 3), (0.0, 1, 2), (0, 1, 2.0), ("0", 1, 2), None, 7, (None, 1, 2)],
    ],
)
def test_what_is_no_copy_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue, match=r"is no copy here; .* two pages of 0 … 3 and 1 … 4"):
        checked_copies([(0, 1, 4), wrong], 4, 4)  # type: ignore[list-item]


@given(copies)
def test_within_a_run_the_order_does_not_matter(copies: list[tuple[int, int, int]]) -> None:
    cut = list(independent(copies))
    assert [copy for run in cut for copy in run] == copies
    for run in cut:
        targets = [dst for _, dst, _ in run]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {src for src, _, _ in run}


@given(copies)
def test_a_run_ends_only_where_it_has_to(copies: list[tuple[int, int, int]]) -> None:
    cut = list(independent(copies))
    for run, following in itertools.pairwise(cut):
        src, dst, _ = following[0]
        touched = {page for copy in run for page in copy[:2]}
        assert src in {dst for _, dst, _ in run} or dst in touched
