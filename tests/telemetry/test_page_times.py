"""How long pages stay and how long prefixes wait, as a real cache tells it."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.events import Evicted, Stored
from kvkeep.core.keys import Namespace
from kvkeep.observe.telemetry import Histogram, PageTimes

PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A cache with a `PageTimes` on a clock of ours."""

    def __init__(self, pages: int = 64) -> None:
        self.clock = Clock()
        self.cache = PagedCache(pages, PAGE)
        self.times = PageTimes(pages, clock=self.clock)
        self.end = self.cache.subscribe(self.times.see)

    def ask(self, *parts: int, at: float) -> None:
        """A request whose prompt has a page for each of ``parts``."""
        self.clock.now = at
        sequence = self.cache.open(np.repeat(np.array(parts, np.int32), PAGE))
        sequence.copies()
        sequence.publish()
        sequence.close()

    def gaps(self) -> tuple[int, float]:
        gap = self.times.snapshot().reuse_gap
        return gap.count, gap.total


def test_a_page_has_stayed_from_when_it_was_stored_to_when_it_was_evicted():
    it = Watched()
    it.ask(1, 2, at=0)
    it.ask(3, at=50)
    it.clock.now = 60
    it.cache.evict(1)  # of 1, 2: the least recently used
    it.clock.now = 100
    it.cache.clear()
    seen = it.times.snapshot()
    assert seen.evicted == {"pressure": 0, "asked": 1, "dropped": 0, "cleared": 2}
    asked, cleared = seen.residency["asked"], seen.residency["cleared"]
    assert (asked.count, asked.total) == (1, 60)
    assert (cleared.count, cleared.total) == (2, 100 + 50)
    assert dict(asked.cumulative)[60] == 1  # on a bound is below it
    assert dict(asked.cumulative)[15] == 0


def test_a_gap_is_from_the_last_use_of_a_prefix_to_the_next():
    it = Watched()
    it.ask(1, 2, 3, at=0)
    assert it.gaps() == (0, 0)
    it.ask(1, 2, 3, 4, at=10)
    assert it.gaps() == (1, 10)
    it.ask(1, 2, 3, 4, 5, at=30)  # behind what was stored at 10
    assert it.gaps() == (2, 10 + 20)
    it.ask(1, 2, 3, 6, at=35)  # the path to it was used at 30, by the one before
    assert it.gaps() == (3, 10 + 20 + 5)


def test_what_is_stored_anew_is_not_as_old_as_what_was_there_before():
    it = Watched()
    it.ask(1, 2, at=0)
    it.cache.clear()
    it.ask(7, 8, at=1000)  # in the same pages
    it.ask(7, 8, 9, at=1003)
    assert it.gaps() == (1, 3)
    it.clock.now = 1010
    it.cache.clear()
    cleared = it.times.snapshot().residency["cleared"]
    assert (cleared.count, cleared.total) == (2 + 3, 10 + 10 + 7)


def test_an_answer_that_grows_is_one_run():
    it = Watched()
    sequence = it.cache.open(np.zeros(PAGE, np.int32))
    for second in range(1, 6):
        it.clock.now = second
        sequence.append([second] * PAGE)
        sequence.publish()
    sequence.close()
    it.ask(0, 1, 2, 9, at=20)  # in the middle of it; used at 5, when its last page came
    assert it.gaps() == (1, 15)


def test_what_was_stored_before_anybody_looked_has_no_age():
    cache = PagedCache(16, PAGE)
    first = cache.open([1] * PAGE)
    first.publish()
    first.close()
    times = PageTimes(16)
    cache.subscribe(times.see)
    second = cache.open([1] * PAGE + [2] * PAGE)
    second.publish()
    second.close()
    cache.clear()
    seen = times.snapshot()
    assert seen.evicted["cleared"] == 2
    assert seen.residency["cleared"].count == 1
    assert seen.reuse_gap.count == 0


def test_much_that_waits_is_counted_without_being_asked_and_nothing_is_lost():
    it = Watched(pages=8)
    for number in range(10_000):
        it.ask(number, at=number)
    assert len(it.times._waiting) < 5000
    seen = it.times.snapshot()
    assert seen.evicted["pressure"] == 10_000 - 8
    assert seen.residency["pressure"].total == 8 * (10_000 - 8)


def test_sequences_that_ended_long_ago_are_forgotten():
    times = PageTimes(4)
    for sequence in range(70_000):
        pages = np.array([sequence % 4], np.int32)
        times.see(Stored(sequence, Namespace(), -1, pages, np.zeros(PAGE, np.int32)))
    times.snapshot()
    assert len(times._own) <= 1 << 16


def test_events_hold_no_tokens_while_they_wait():
    it = Watched()
    it.ask(1, 2, at=0)
    assert not any(isinstance(note, Stored | Evicted) for note in it.times._waiting)


def test_who_reads_meanwhile_neither_waits_nor_takes_anything_away():
    it = Watched(pages=16)
    ended = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(sum(it.times.snapshot().evicted.values()))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(3000):
        it.ask(number, number, at=number)
    ended.set()
    for reader in readers:
        reader.join()
    last = it.times.snapshot()
    assert last.evicted["pressure"] == it.cache.stats().evicted_pages == 2 * 3000 - 16
    assert last.residency["pressure"].count == 2 * 3000 - 16
    assert max(seen) <= 2 * 3000 - 16


def test_a_reason_that_nobody_knows_yet_is_told():
    times = PageTimes(4)
    times.see(Evicted(np.array([1, 2], np.int32), "replaced"))
    seen = times.snapshot()
    assert seen.evicted["replaced"] == 2
    assert seen.residency["replaced"].count == 0


def test_the_cache_does_not_wait_for_who_reads():
    it = Watched(pages=8)
    for number in range(5000):
        it.ask(number, at=number)
    with it.times._working:  # somebody reads, and takes long
        it.ask(7, 7, at=5000)
    assert it.times.snapshot().evicted["pressure"] == 5002 - 8


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 3))))
def test_ages_are_those_of_a_naive_count(asks):
    """Whatever is asked for, stored and evicted: against a dict of pages, told the same."""
    it = Watched(pages=12)
    stored: dict[int, float] = {}
    ages: dict[str, list[float]] = {}

    def naive(event: object) -> None:
        if isinstance(event, Stored):
            stored.update((page, it.clock.now) for page in event.pages.tolist())
        if isinstance(event, Evicted):
            gone = [it.clock.now - stored.pop(page) for page in event.pages.tolist()]
            ages.setdefault(event.reason, []).extend(gone)

    it.cache.subscribe(naive)
    for second, (parts, evicted) in enumerate(asks):
        it.ask(*parts, at=float(second))
        it.cache.evict(evicted)
        if second % 3 == 0:
            it.times.snapshot()  # worked off now or later is the same
    seen = it.times.snapshot()
    for reason, buckets in seen.residency.items():
        known = ages.get(reason, [])
        assert seen.evicted[reason] == buckets.count == len(known)
        assert math.isclose(buckets.total, sum(known))
        for bound, count in buckets.cumulative:
            assert count == sum(age <= bound for age in known)


def test_a_histogram_counts_few_and_many_alike():
    few, many = Histogram([1, 2, 5]), Histogram([1, 2, 5])
    values = np.random.default_rng(3).uniform(0, 7, 100)
    values[:4] = 1, 2, 5, 0
    for value in values.tolist():
        few.add(value)
    many.add_all(values)
    assert few.buckets().cumulative == many.buckets().cumulative
    assert math.isclose(few.buckets().total, many.buckets().total)
    assert many.buckets().count == 100
    many.add_all(values[:0])
    assert many.buckets().count == 100


@pytest.mark.parametrize("bounds", [[], [1, 1], [2, 1], [1, float("nan"), 2]])
def test_bounds_rise(bounds):
    with pytest.raises(InvalidValue, match="rise"):
        Histogram(bounds)
