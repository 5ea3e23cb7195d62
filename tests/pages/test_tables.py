"""Page tables of a batch as one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import InvalidValue, page_tables

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=5)


@given(rows=ROWS, pad=st.sampled_from([0, -1, 2**31 - 1]), more=st.tuples(*[st.integers(0, 3)] * 2),
       buffer=st.booleans())  # fmt: skip
def test_rows_are_the_tables_and_then_the_pad(
    rows: list[list[int]], pad: int, more: tuple[int, int], buffer: bool
) -> None:
    width = max(map(len, rows), default=0)
    out = None
    if buffer:
        out = np.full((len(rows) + more[0], width + more[1]), 12345, np.int32)
        width = out.shape[1]
    found = page_tables([np.array(row, np.int32) for row in rows], pad=pad, out=out)
    assert found.pages.tolist() == [row + [pad] * (width - len(row)) for row in rows]
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert found.pages.dtype == found.lengths.dtype == np.int32
    if out is not None:
        assert (out[len(rows) :] == pad).all()
        assert np.shares_memory(found.pages, out) or not found.pages.size


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (np.zeros((1, 2), np.int32), "room for 1 rows of 2 pages; 2 rows of 3"),
        (np.zeros((2, 2), np.int32), "2 rows of 3 are needed"),
        (np.zeros((2, 3), np.int64), "out is int64"),
        (np.zeros(6, np.int32), "out is int32"),
        ([[0] * 3] * 2, "out is list"),
        (np.broadcast_to(np.zeros(3, np.int32), (2, 3)), "read-only"),
    ],
)
def test_a_wrong_buffer_is_refused(out: Any, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        page_tables([np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)], out=out)


@pytest.mark.parametrize("pad", [2**31, -(2**31) - 1, 1.0, True])
def test_the_pad_is_an_int32(pad: Any) -> None:
    with pytest.raises(InvalidValue, match="pad"):
        page_tables([], pad=pad)
