"""What a trace is too short to tell, and how sure a difference is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replaying import workload

from kvkeep.bench.replay import Outcome, infinite, simulate
from kvkeep.bench.replay.doubts import FEW_REQUESTS, difference, doubts


def said(paths, memory=120):
    work = workload(paths)
    return " ".join(doubts(simulate(work, memory), infinite(work), work.span_s, "a size"))


def turns(requests, different):
    return [[("again", at % different), 1, 2, 3] for at in range(requests)]


def outcome(hits, blocks=10):
    rows = [[float(at), blocks, int(one)] for at, one in enumerate(hits)]
    return Outcome("lru", 1, 1, timeline=rows)


def test_a_long_trace_raises_no_doubt():
    assert said(turns(FEW_REQUESTS, 20)) == ""


def test_few_requests():
    assert f"has {FEW_REQUESTS - 1} requests, too few" in said(turns(FEW_REQUESTS - 1, 20))


def test_a_trace_that_fits_tells_nothing_of_policies():
    assert "All KV of the trace fits into a size" in said(turns(400, 20), memory=10_000)
    assert "fits" not in said([[("once", at), 1] for at in range(400)], memory=10_000)


def test_reuse_after_pauses_as_long_as_the_trace():
    late = [[("again", at % 260), 1] for at in range(400)]
    assert "100.0\u00a0% of all reuse comes after a pause" in said(late)
    assert "covers 6.65\u00a0min" in said(late)


def test_no_difference_is_none():
    hits = np.arange(100) % 7
    assert difference(outcome(hits), outcome(hits)) == (0.0, 0.0)


def test_a_steady_difference_is_certain():
    low, high = difference(outcome([6] * 100), outcome([4] * 100))
    assert low == high == pytest.approx(0.2)


def test_a_difference_of_a_moment_is_not():
    moment = [0] * 100
    moment[40:43] = [10, 10, 10]
    low, high = difference(outcome(moment), outcome([0] * 100))
    assert low == 0
    assert 0.03 < high < 0.2


def test_a_moment_tells_nothing():
    assert difference(outcome([1]), outcome([0])) is None


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=2, max_size=100))
def test_the_range_is_within_what_any_moment_has(rows):
    one, other = ([row[at] for row in rows] for at in (0, 1))
    low, high = difference(outcome(one), outcome(other))
    gains = [(mine - theirs) / 10 for mine, theirs in rows]
    assert min(gains) - 1e-9 <= low <= high <= max(gains) + 1e-9
    assert difference(outcome(one), outcome(other)) == (low, high), "it is the same each time"
    down, up = difference(outcome(other), outcome(one))
    assert (down, up) == pytest.approx((-high, -low))
    assert difference(outcome(one), None)[0] >= 0
