"""Write budgets: what they are written as, and how a bucket spends and refills."""

from __future__ import annotations

import random

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends import TierURL, WriteBudget
from kvkeep.store.backends.budget import WriteBucket

BUDGET = WriteBudget(1200, 100)


@pytest.mark.parametrize(
    ("text", "amount", "seconds"),
    [("2TB/day", 2 * 10**12, 86_400), ("50 GiB/hour", 50 << 30, 3_600), ("4096/day", 4096, 86_400)],
)
def test_a_budget_is_bytes_per_day_or_hour(text: str, amount: int, seconds: int) -> None:
    assert WriteBudget.parse(text) == WriteBudget(amount, seconds)


@pytest.mark.parametrize("text", ["2TB", "2TB/week", "/day", "2T/day", "-1/day", "0/day", "day"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        WriteBudget.parse(text)
    with pytest.raises(InvalidValue, match="writes="):
        TierURL(f"file:///x?writes={text}").write_budget("writes")


def test_a_budget_reads_back_as_text() -> None:
    assert str(WriteBudget.parse("2GiB/day")) == "2 GiB/day"
    assert str(BUDGET).endswith("/100 s")


def test_no_span_has_more_writes_than_the_budget() -> None:
    draw, now = random.Random(7), 0.0
    bucket = WriteBucket(BUDGET, lambda: now)
    spent: list[tuple[float, int]] = []
    for _ in range(5000):
        now += draw.expovariate(1.0)
        size = draw.randint(1, 60)
        left = bucket.left()
        if bucket.spend(size):
            spent.append((now, size))
        else:
            assert left < size
        assert sum(one for at, one in spent if at > now - BUDGET.seconds) <= BUDGET.amount
    assert sum(one for _, one in spent) > 0.9 * BUDGET.amount * now / BUDGET.seconds


def test_a_refused_write_costs_nothing_and_the_burst_comes_back() -> None:
    now = 0.0
    bucket = WriteBucket(BUDGET, lambda: now)
    assert not bucket.spend(101)
    assert bucket.spend(100)
    assert bucket.left() == 0
    now = 1e6
    assert bucket.state() == {"bytes": 1200, "seconds": 100, "left": 100}
