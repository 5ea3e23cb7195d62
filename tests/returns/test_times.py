"""`ReturnTimes` against its definitions, computed by brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.returns import AGES, BUCKETS, ReturnTimes

_WIDTHS = [*np.diff(AGES), AGES[-1] * (2**0.5 - 1)]


def counted(times: ReturnTimes, ends: list[tuple[int, int, bool]]) -> ReturnTimes:
    for kind, bucket, returned in ends:
        times.ended(kind, bucket, returned=returned)
    return times


_ends = st.lists(st.tuples(st.integers(0, 4), st.integers(0, BUCKETS - 1), st.booleans()))


def _tree() -> ReturnTimes:
    times = ReturnTimes()
    for parent in (0, 0, 1, 3):
        times.add(parent)
    return times


@settings(max_examples=60, deadline=None)
@given(_ends, st.integers(0, 2**16))
def test_worth_is_the_best_ratio_over_all_times_to_give_up(
    ends: list[tuple[int, int, bool]], seed: int
) -> None:
    times = counted(_tree(), ends)
    chance = random.Random(seed)
    waiting = np.array([[chance.randrange(3) * 1.0 for _ in range(BUCKETS)] for _ in range(5)])
    hazards = np.minimum(times.hazards(waiting), 0.999)
    worths = times.worths(waiting)
    for kind in range(5):
        for begin in range(0, BUCKETS, 7):
            stays, came, kept, best = 1.0, 0.0, 0.0, 0.0
            for bucket in range(begin, BUCKETS):
                hazard = hazards[kind, bucket]
                came += stays * hazard
                kept += stays * _WIDTHS[bucket] * (1 - hazard / 2)
                stays *= 1 - hazard
                best = max(best, came / kept)
            assert worths[kind, begin] == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_hazards_are_the_shares_that_return() -> None:
    times = ReturnTimes()
    for _ in range(9000):
        times.ended(0, 3, returned=True)
    for _ in range(1000):
        times.ended(0, 9, returned=True)
    hazards = times.hazards(np.zeros((1, BUCKETS)))[0]
    assert hazards[3] == pytest.approx(0.9, abs=0.01)
    assert hazards[9] == pytest.approx(1.0, abs=0.01)
    assert hazards[[0, 1, 2]].max() < 0.001


def test_those_that_never_return_count() -> None:
    """1,000 return in a bucket; as many are still waiting behind it."""
    times = ReturnTimes()
    for _ in range(1000):
        times.ended(0, 5, returned=True)
    alone = times.hazards(np.zeros((1, BUCKETS)))[0, 5]
    waiting = np.zeros((1, BUCKETS))
    waiting[0, 20] = 1000
    beside = times.hazards(waiting)[0, 5]
    assert alone == pytest.approx(1, abs=0.01)
    assert beside == pytest.approx(0.5, abs=0.01)
    given_up = counted(ReturnTimes(), [(0, 5, True)] * 1000 + [(0, 20, False)] * 1000)
    assert given_up.hazards(np.zeros((1, BUCKETS)))[0, 5] == pytest.approx(beside)


def test_a_class_leans_on_its_parent_until_it_has_seen_enough() -> None:
    times = ReturnTimes()
    for _ in range(1000):
        times.ended(0, 4, returned=True)
    child = times.add(0)
    nothing = np.zeros((2, BUCKETS))
    assert times.hazards(nothing)[child] == pytest.approx(times.hazards(nothing)[0])
    for _ in range(500):
        times.ended(child, 12, returned=True)
    hazards = times.hazards(nothing)
    assert hazards[child, 4] < 0.02, "its own conversations take longer"
    assert hazards[child, 12] > 0.98
    assert hazards[0, 4] == pytest.approx(2 / 3, abs=0.02), "and they count for the parent"
