"""Ids that stand for all tokens before them, too."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.bench.traces.chain import Growing, chain_ids, chain_tokens, fresh_ids, words_of
from kvkeep.bench.traces.request import MAX_ID

few = st.lists(st.integers(0, 2), max_size=12)  # so that prompts often begin alike


def chained(tokens: list[int], unit: int) -> list[int]:
    return chain_tokens(np.array(tokens, np.int32), unit).tolist()


@given(few, few, st.integers(1, 4))
def test_ids_are_equal_where_all_tokens_so_far_are(a: list[int], b: list[int], unit: int) -> None:
    left, right = chained(a, unit), chained(b, unit)
    assert len(left) == -(-len(a) // unit)
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            same = i == j and a[: (i + 1) * unit] == b[: (j + 1) * unit]
            assert (one == other) == same
    assert all(0 <= one <= MAX_ID for one in left)


@given(st.lists(few, max_size=6), st.integers(1, 4))
def test_a_prompt_that_grows_is_the_same_as_a_whole_one(parts: list[list[int]], unit: int) -> None:
    growing = Growing(unit)
    whole: list[int] = []
    for part in parts:
        before = growing.fork()
        growing.append(np.array(part, np.int32))
        assert before.units().tolist() == chained(whole, unit)
        whole += part
        assert growing.units().tolist() == chained(whole, unit)
        assert growing.full().tolist() == chained(whole, unit)[: len(whole) // unit]


@given(few)
def test_ids_of_single_units_become_chained_and_may_be_chained_again(ids: list[int]) -> None:
    """A trace whose ids are chained already tells the same after it, under other names."""
    once = chain_ids(np.array(ids, np.int64))
    assert once.tolist() == chained(ids, 1)
    again = chain_ids(once)
    assert len(set(again.tolist())) == len(ids)


def test_the_values_are_what_they_were() -> None:
    """Files hold them: a change makes traces that were converted before useless beside new ones."""
    assert chained([1, 2, 3, 4, 5], 2) == [
        3482200338458162088,
        3752114084258358907,
        1884119232862686722,
    ]


def test_what_is_to_occur_once_does() -> None:
    ids = [fresh_ids(number, 50) for number in range(200)]
    assert len(set(np.concatenate(ids).tolist())) == 200 * 50
    assert words_of(7, 5).tolist() == words_of(7, 9)[:5].tolist()
