"""Shared prefixes are found, read once, and merged as one softmax would."""

from __future__ import annotations

import pytest
import torch

from kvkeep.serve.engine.attention.memory import EVERYTHING, Reach
from kvkeep.serve.engine.attention.plan import Grain

pytestmark = pytest.mark.model

SHARING = Grain(query_rows=8, call_bytes=1, group_bytes=1 << 20)
APART = Grain(query_rows=8, call_bytes=1 << 40, group_bytes=1 << 20)


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
