"""Where two prompts go on the same: what is said is so, and long stretches are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.nearest import GRAM, Anchors, Stretch, alike

ROWS = st.lists(st.integers(0, 3), max_size=60)


def row(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def compare(ours: list[int], theirs: list[int]) -> tuple[int, list[Stretch]]:
    one, other = row(ours), row(theirs)
    start = common_length(one, other)
    return start, alike(one, other, Anchors.of(one), Anchors.of(other), start)


@given(ROWS, ROWS, ROWS, ROWS)
@settings(max_examples=300, deadline=None)
def test_what_is_said_is_so(
    head: list[int], one: list[int], other: list[int], end: list[int]
) -> None:
    ours, theirs = [*head, *one, *end], [*head, *other, *end]
    start, found = compare(ours, theirs)
    assert start == next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    at, other_at = start, start
    for stretch in found:
        length = stretch.stop - stretch.start
        assert length >= GRAM
        assert stretch.start >= at
        assert stretch.other >= other_at
        assert ours[stretch.start : stretch.stop] == theirs[stretch.other : stretch.other + length]
        at, other_at = stretch.stop, stretch.other + length


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 3000), st.integers(0, 300), st.integers(0, 300),
    st.integers(200, 5000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_long_stretch_behind_a_difference_is_found_as_a_whole(
    seed: int, head: int, removed: int, added: int, end: int
) -> None:
    """Whatever was replaced, inserted or left out before it, by some hundred tokens."""
    random = np.random.default_rng(seed)
    text = random.integers(0, 32_000, head + removed + end).astype(np.int32)
    new = random.integers(32_000, 64_000, added).astype(np.int32)
    ours = np.concatenate((text[:head], new, text[head + removed :]))
    if not removed and not added:
        return
    start, found = compare(ours.tolist(), text.tolist())
    missed = end - sum(stretch.stop - stretch.start for stretch in found)
    # A difference may end in what stands behind it, by chance; an anchor in 32 tokens.
    assert abs(missed) <= 5 or end < 400
    if end >= 400:
        assert found[-1].stop == len(ours)
        assert start >= head


def test_what_is_repeated_over_and_over_is_survived() -> None:
    ours, theirs = [1] * 5000, [2] + [1] * 4000
    start, found = compare(ours, theirs)
    assert start == 0
    assert all(ours[a:b] == theirs[c : c + b - a] for a, b, c in found)


def test_markers_between_turns_do_not_lead_astray() -> None:
    """A short piece that occurs everywhere is no reason to jump over what is the same."""
    random = np.random.default_rng(5)
    marker = list(range(50_000, 50_010))
    turns = [random.integers(0, 32_000, 120).tolist() for _ in range(6)]
    theirs = [token for turn in turns for token in (*marker, *turn)]
    ours = [*theirs[:20], 7, 7, 7, *theirs[22:]]
    start, found = compare(ours, theirs)
    assert (start, found) == (20, [Stretch(23, len(ours), 22)])


@pytest.mark.parametrize("turned", [False, True])
def test_two_pieces_in_turn(turned: bool) -> None:
    """Pieces that changed places: the longer one is what goes on the same."""
    random = np.random.default_rng(6)
    one, other = (random.integers(0, 32_000, size).tolist() for size in (900, 500))
    ours, theirs = [1, *one, *other], [2, *other, *one]
    if turned:
        ours, theirs = theirs, ours
    _, found = compare(ours, theirs)
    assert sum(stretch.stop - stretch.start for stretch in found) == 900


def test_anchors_are_few_in_long_prompts_and_bounded_in_short_ones() -> None:
    random = np.random.default_rng(7)
    assert not len(Anchors.of(row(list(range(GRAM - 1)))).hashes)
    assert len(Anchors.of(row(list(range(100)))).hashes) == 93
    long = Anchors.of(random.integers(0, 32_000, 32_000).astype(np.int32))
    assert 700 < len(long.hashes) < 1300
    assert (np.diff(long.hashes.astype(object)) > 0).all()
