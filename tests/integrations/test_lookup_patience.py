"""A lookup is waited for as long as it saves more than it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.integrations.load_choice import LookupPatience


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_what_pays_is_waited_for() -> None:
    one = LookupPatience(0.5)
    assert one.seconds(None) == 0.5
    assert one.seconds(0.4) == pytest.approx(0.1)  # nothing is known of lookups
    for _ in range(5):
        one.answered(0.01, 1.0)
    assert one.seconds(0.4) == pytest.approx(0.1)
    assert one.seconds(0.02) == pytest.approx(0.02)
    assert one.seconds(0.005) == 0
    assert one.seconds(100.0) == 0.5


def test_what_finds_nothing_does_not_pay() -> None:
    one = LookupPatience(0.5)
    for _ in range(40):
        one.answered(0.01, 0.0)
    assert one.seconds(0.4) == 0
    for _ in range(8):
        one.answered(0.01, 1.0)
    assert one.seconds(0.4) > 0


def test_one_in_five_seconds_is_made_for_nobody() -> None:
    clock = Clock()
    one = LookupPatience(0.5, clock=clock)
    made = 0
    for _ in range(1000):
        made += one.due()
        clock.now += 0.1
    assert made == pytest.approx(20, abs=1)


@given(
    answers=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=50),
    saves=st.floats(0, 10),
    timeout=st.floats(0, 5),
)
def test_never_longer_than_it_can_save(
    answers: list[tuple[float, float]], saves: float, timeout: float
) -> None:
    one = LookupPatience(timeout)
    for seconds, share in answers:
        one.answered(seconds, share)
    assert 0 <= one.seconds(saves) <= min(timeout, saves)
