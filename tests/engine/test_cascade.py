"""Shared prefixes are found, read once, and merged as one softmax would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.serve.engine.attention.memory import EVERYTHING, Reach
from kvkeep.serve.engine.attention.plan import Grain, shared_prefixes

pytestmark = pytest.mark.model

SHARING = Grain(query_rows=8, call_bytes=1, group_bytes=1 << 20)
APART = Grain(query_rows=8, call_bytes=1 << 40, group_bytes=1 << 20)


def tables(*texts):
    """One page a letter."""
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def found(least, *texts):
    prefixes = shared_prefixes(tables(*texts), least)
    return {(texts[chosen[0]][:pages], *sorted(chosen)) for chosen, pages in prefixes}


def test_the_pages_that_tables_begin_with():
    assert found(1, "abcx", "abcyz", "q", "abcy") == {("abc", 0, 1, 3)}
    assert found(1, "abc", "abc") == {("abc", 0, 1)}
    assert found(1, "ab", "cd", "") == set()
    assert found(1, "xab", "yab") == set()  # the same pages, but not at the beginning


def test_the_set_that_saves_most():
    # Three share 5 pages (saves 10) and four share 1 (saves 3).
    assert found(1, "abcdex", "abcdey", "az", "abcdez") == {("abcde", 0, 1, 3)}
    # Five share 2 (saves 8) and two of them 5 (saves 5).
    assert found(1, "abcde", "abcde", "abx", "aby", "abz") == {("ab", 0, 1, 2, 3, 4)}


def test_what_is_left_may_share_as_well():
    assert found(1, "abcdx", "abcdy", "afghx", "afghy") == {("abcd", 0, 1), ("afgh", 2, 3)}
    assert found(1, "ab", "cd", "cd", "ab") == {("ab", 0, 3), ("cd", 1, 2)}


def test_too_little_to_save_is_left_alone():
    assert found(4, "abx", "aby", "abz") == {("ab", 0, 1, 2)}
    assert found(5, "abx", "aby", "abz") == set()


@given(
    texts=st.lists(st.text("ab", max_size=6), max_size=9),
    least=st.integers(1, 6),
)
def test_what_is_found_is_shared_and_worth_it(texts, least):
    given = tables(*texts)
    seen = []
    for chosen, pages in shared_prefixes(given, least):
        assert len(chosen) > 1
        assert (len(chosen) - 1) * pages >= least
        assert len({texts[index][:pages] for index in chosen}) == 1
        assert all(len(texts[index]) >= pages for index in chosen)
        seen += chosen
    assert len(seen) == len(set(seen))
    # The tables in no set share too little.
    rest = [text for index, text in enumerate(texts) if index not in seen]
    for pages in range(1, 7):
        for begin in {text[:pages] for text in rest if len(text) >= pages}:
            assert (sum(text.startswith(begin) for text in rest) - 1) * pages < least


SPANS = [(1500, 1501, 1488)] * 2 + [(1520 + at, 1523 + at, 1488) for at in range(6)]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_same_numbers_as_each_by_itself(make_story, softcap):
    story = make_story(SPANS, page_size=16)
    shared = story.attend(story.batch(grain=SHARING), softcap=softcap)
    apart = story.attend(story.batch(grain=APART), softcap=softcap)
    assert not torch.equal(shared, apart)  # the two ways differ, as they should here
    assert (shared - apart).abs().max() <= 1e-6
    story.assert_right(shared, softcap=softcap)


def test_sinks_weigh_on_all_parts_together(make_story):
    story = make_story(SPANS, page_size=16)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 8.0, 0.5, 30.0])
    story.assert_right(story.attend(story.batch(grain=SHARING), sinks=sinks), sinks=sinks)


def test_one_part_that_weighs_everything(make_story):
    """Scores far apart, until the exponential of one side is zero."""
    story = make_story(SPANS, page_size=16)
    for scale in (30.0, 300.0):
        out = story.attend(story.batch(grain=SHARING), scale=scale)
        assert out.isfinite().all()
        story.assert_right(out, tolerance=1e-3, scale=scale)


def test_shared_pages_are_read_once(make_story):
    """Counts the keys that each gather of a layer brings."""
    story = make_story(SPANS, page_size=16)
    plan = story.batch(grain=SHARING).parts[0]._planned(EVERYTHING, group=3)
    [cascade] = plan.cascades
    own = [len(group.gather.keys) for group in cascade.own]
    assert not plan.short
    assert len(cascade.gather.keys) == 1488
    assert sum(own) == sum(-(-stop // 16) * 16 - 1488 for _, stop, _ in SPANS)


def test_no_cascade_under_a_window_that_hides_keys(make_story):
    story = make_story(SPANS, page_size=16)
    batch = story.batch(grain=SHARING)
    assert not batch.parts[0]._planned(Reach(1000), group=3).cascades
    story.assert_right(story.attend(batch, window=1000), window=1000)


def test_a_page_that_is_being_written_is_not_shared(make_story):
    """Only whole pages before the first new token are shared: the next page differs."""
    story = make_story([(32, 33, 32), (33, 34, 32), (40, 41, 32)], page_size=16)
    [cascade] = story.batch(grain=SHARING).parts[0]._planned(EVERYTHING, group=3).cascades
    assert len(cascade.gather.keys) == 32
    story.assert_right(story.attend(story.batch(grain=SHARING)))
