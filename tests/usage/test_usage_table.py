"""Figures and holdings: what they tell is what a slow count of everything tells."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvkeep.core.cache import PagedCache
from kvkeep.core.keys import Namespace
from kvkeep.observe.usage import UsageTable
from kvkeep.observe.usage.table import PageOwners
from request_events import Requests


class Clock:
    """A time that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


def opened(table, prompt, cached, tenant="", session=None, *, id="a"):
    """A request is admitted."""
    Requests(table.see).admitted(
        id, namespace=tenant, prompt_tokens=prompt, cached_tokens=cached, session=session
    )


@pytest.fixture
def clock():
    return Clock()


def test_history_has_every_five_seconds_and_no_more_than_ten_minutes(clock):
    figures = UsageTable(clock=clock)
    opened(figures, 100, 40)
    clock.now += 12
    opened(figures, 10, 0, id="late")
    clock.now += 6
    Requests(figures.see).loaded(
        "late", sources=[(0, 8, "file")], seconds=1.0, late=False
    )  # what comes later belongs to the request's own time
    told = figures.moment().history
    assert told == [(1_000_000_000, 100, 40), (1_000_000_005, 0, 0), (1_000_000_010, 10, 8),
                    (1_000_000_015, 0, 0)]  # fmt: skip
    clock.now += 10_000
    opened(figures, 7, 7)
    told = figures.moment().history
    assert len(told) == 120
    assert told[-1] == (1_000_010_015, 7, 7)
    assert sum(tokens for _, tokens, _ in told) == 7
    assert [at - told[0][0] for at, _, _ in told] == list(range(0, 600, 5))


def test_a_clock_that_is_set_back_loses_nothing(clock):
    figures = UsageTable(clock=clock)
    opened(figures, 100, 40)
    clock.now -= 3600
    opened(figures, 50, 10)
    assert figures.moment().history == [(1_000_000_000, 150, 50)]


def test_times_to_first_tokens_cold_and_warm_of_five_minutes(clock):
    figures = UsageTable(clock=clock)
    assert [one.count for one in figures.moment()[1:3]] == [0, 0]
    assert figures.moment()[1:3][0].p50_s is None
    figures.note_first_token(99.0, prompt_tokens=100, reused_tokens=0)
    clock.now += 301
    for number in range(1, 102):
        figures.note_first_token(number / 100, prompt_tokens=100, reused_tokens=49)
        figures.note_first_token(number / 1000, prompt_tokens=100, reused_tokens=50)
    cold, warm = figures.moment()[1:3]
    assert (cold.count, cold.p50_s, cold.p95_s) == (101, 0.51, 0.96)
    assert (warm.count, warm.p50_s, warm.p95_s) == (101, 0.051, 0.096)
    for _ in range(5000):
        figures.note_first_token(1.0, prompt_tokens=1, reused_tokens=1)
    assert sum(one.count for one in figures.moment()[1:3]) == 2000  # memory is bounded


def stored(cache):
    return {space: pages for space, pages in cache.namespaces().items() if pages}


@pytest.mark.parametrize("seed", range(3))
def test_holdings_are_what_the_tree_holds(seed):
    chance = random.Random(seed)
    cache = PagedCache(48, 4)
    before = cache.open([1] * 9, "early")
    before.publish(9)
    before.close()
    owners = PageOwners(cache.num_pages)
    for space in cache.namespaces():
        for run in cache.runs(space):
            owners.stored(space.tenant, run.pages)
    cache.subscribe(owners.see)
    salts = ["", "a", "b", "early"]
    for _ in range(300):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
        with cache.open(tokens, chance.choice(salts)) as sequence:
            sequence.copies()
            sequence.publish(len(tokens))
        if chance.random() < 0.1:
            cache.evict(chance.randrange(10))
        if chance.random() < 0.05:
            cache.clear(chance.choice(salts))
        counted = Counter({Namespace(tenant=salt): owners.pages[salt]
                           for salt in salts})  # fmt: skip
        assert {space: pages for space, pages in counted.items() if pages} == stored(cache)
    assert cache.stats().evictions > 50
    cache.clear()
    assert not owners.pages
