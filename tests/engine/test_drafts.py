"""Prompt lookup: drafts equal those of a brute-force search, and adapt their length."""

from __future__ import annotations

from itertools import pairwise
from time import thread_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine.request import PromptLookup

LENGTHS = (8, 4, 2)


def lookup(tokens, max_draft=8):
    return PromptLookup(np.array(tokens, np.int32), max_draft)


def brute_force(tokens, limit):
    """What followed the latest earlier match of the end, longest match first."""
    for length in LENGTHS:
        if length >= len(tokens):
            continue
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                longer = list(tokens)
                for place in range(start + length, start + length + limit):
                    longer.append(longer[place])
                return longer[len(tokens) :]
    return []


few_tokens = st.lists(st.integers(0, 3), max_size=60)


@given(few_tokens, st.lists(few_tokens, max_size=6), st.integers(0, 12))
def test_it_finds_what_brute_force_finds(prompt, chunks, limit):
    """However the sequence was extended, and without reports of accepted drafts."""
    drafts = lookup(prompt, 12)
    tokens = list(prompt)
    assert drafts.propose(limit) == brute_force(tokens, limit)
    for chunk in chunks:
        drafts.extend(chunk)
        tokens += chunk
        assert drafts.propose(limit) == brute_force(tokens, limit)


@given(few_tokens, st.lists(st.tuples(few_tokens, st.integers(0, 9)), max_size=20))
def test_with_any_feedback_it_proposes_a_beginning_of_that(prompt, steps):
    drafts = lookup(prompt, 9)
    tokens = list(prompt)
    for chunk, right in steps:
        draft = drafts.propose(9)
        assert draft == brute_force(tokens, 9)[: len(draft)]
        drafts.accepted(min(right, len(draft)), len(draft))
        drafts.extend(chunk)
        tokens += chunk


def test_the_most_recent_place_counts():
    assert lookup([1, 2, 7, 7, 1, 2, 8, 8, 1, 2]).propose(2) == [8, 8]


def test_a_longer_match_counts_more_than_a_recent_one():
    assert lookup([5, 6, 1, 2, 7, 0, 1, 2, 8, 5, 6, 1, 2]).propose(1) == [7]


def test_a_loop_goes_on_in_the_draft():
    assert lookup([9, 1, 2, 3, 1, 2, 3, 1, 2]).propose(8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert lookup([4] * 5).propose(6) == [4] * 6


def test_extreme_ids_are_told_apart():
    """Keys are bytes: parts of two tokens must not match as one."""
    big = 2**31 - 1
    assert lookup([256, 1, 5, 1, 65536, 9, 256, 1]).propose(1) == [5]
    assert lookup([big, 0, 3, 0, big, 4, big, 0]).propose(1) == [3]
    assert lookup([1, 2, 3, 2, 1]).propose(4) == []


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3]])
def test_short_sequences_propose_nothing(tokens):
    assert lookup(tokens).propose(4) == []


def test_at_most_max_draft():
    assert len(lookup([1, 2] * 20, max_draft=3).propose(10)) == 3
    with pytest.raises(InvalidValue, match="max_draft"):
        lookup([1], max_draft=0)


# --- the pace --------------------------------------------------------------------------------


def play(prompt, answer, max_draft=8):
    """The lengths of the drafts, and of what each step added, while ``answer`` is generated."""
    drafts = lookup(prompt, max_draft)
    lengths, added = [], []
    done = 0
    while done < len(answer):
        draft = drafts.propose(max_draft)
        right = 0
        while right < min(len(draft), len(answer) - done) and draft[right] == answer[done + right]:
            right += 1
        drafts.accepted(right, len(draft))
        drafts.extend(answer[done : done + right + 1])
        done += right + 1
        lengths.append(len(draft))
        added.append(right + 1)
    return lengths, added


def test_a_copy_is_drafted_in_full():
    text = np.random.default_rng(0).integers(0, 30_000, 2000).tolist()
    _, added = play(text, text[100:1000])
    assert sum(added) / len(added) > 8


def test_text_that_repeats_nothing_is_left_alone():
    """Matches of two random letters predict nothing."""
    rng = np.random.default_rng(1)
    prompt, answer = rng.integers(0, 12, (2, 2000)).tolist()
    lengths, _ = play(prompt, answer)
    assert sum(lengths) < 0.1 * len(answer)


def test_it_tries_again_once_text_repeats():
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 12, 3000).tolist()
    noise = rng.integers(0, 12, 1000).tolist()
    lengths, added = play(prompt, noise + prompt[500:1500])
    assert sum(lengths[: len(lengths) // 3]) < len(lengths) / 3
    assert len(added) < 1000 + 1000 / 5


def test_drafts_grow_while_right_and_shrink_while_wrong():
    drafts = lookup([1, 2] * 30, 16)

    def next_length(share):
        draft = drafts.propose(16)
        drafts.accepted(int(len(draft) * share), len(draft))
        return len(draft)

    wrong = [next_length(0) for _ in range(40)]
    active = [length for length in wrong if length]
    assert all(after <= before for before, after in pairwise(active))
    assert active[-1] < 16
    assert wrong.count(0) > 25
    for _ in range(64):  # drafting resumes after the longest rest
        if next_length(1):
            break
    else:
        pytest.fail("it never tried again")
    grown = [next_length(1) for _ in range(6)]
    assert grown == sorted(grown)
    assert grown[-1] == 16


def test_an_empty_draft_teaches_nothing():
    drafts = lookup([1, 2, 3] * 9, 4)
    for _ in range(50):
        drafts.accepted(0, 0)
    assert len(drafts.propose(4)) == 4


def test_cost_does_not_grow_with_the_sequence():
    """A step at 32k tokens; bounds are ten times its usual time, of this thread alone."""
    tokens = np.random.default_rng(3).integers(0, 32_000, 32_768, dtype=np.int32)
    begun = thread_time()
    drafts = PromptLookup(tokens, 8)
    assert thread_time() - begun < 0.3
    steps = []
    for i in range(500):
        begun = thread_time()
        drafts.extend(tokens[i : i + 2].tolist())
        drafts.propose(8)
        steps.append(thread_time() - begun)
    assert np.median(steps) < 50e-6
