"""Faults of `PagedCache` that the state machine found, each in its smallest form."""

from __future__ import annotations

import pytest

from kvkeep import InvalidValue, NotCached, PagedCache
from kvkeep.core.events import Closed


def test_closed_counts_the_pages_that_another_keeps_from_being_forgotten() -> None:
    cache = PagedCache(4, 2)
    events: list[object] = []
    cache.subscribe(events.append)
    first = cache.open([1, 2, 3])
    first.publish()
    second = cache.open([1, 2, 3])
    first.close(keep=False)
    closed = [event for event in events if isinstance(event, Closed)]
    assert closed[0].stored_pages == 1
    assert cache.match([1, 2]).num_tokens == 2
    second.close()


def test_what_was_written_in_the_place_of_a_shared_page_is_forgotten_too() -> None:
    cache = PagedCache(8, 2)
    with cache.open([1, 2, 3]) as first:
        first.publish()
    second = cache.open([1, 2, 3])
    second.truncate(1)
    second.append([9, 9])
    second.copies()
    second.publish()
    second.close(keep=False)
    assert cache.match([1, 2]).num_tokens == 2
    assert cache.match([1, 9]).num_tokens == 1


def test_a_copy_that_forks_wait_for_is_handed_over_once() -> None:
    """Made again later, it would bring back what was on the page before one of them computed it."""
    cache = PagedCache(8, 3)
    first = cache.open([0])  # not computed yet
    second = first.fork()
    second.append(1)
    third = second.fork()
    second.append(2)
    third.append(3)
    source, shared, own = (s.pages.tolist()[0] for s in (first, third, second))
    assert third.copies() == [(source, shared, 1)]
    third.publish()  # it computed all three tokens of the page, the first one too
    assert second.copies() == [(shared, own, 2)]
    assert cache.stats().copies == 2
    cache.check()


def test_a_fork_that_waits_for_copies_keeps_them_when_another_closes() -> None:
    cache = PagedCache(8, 2)
    first = cache.open([0])
    second = first.fork()
    second.append(1)
    third = second.fork()
    second.close()
    cache.check()
    assert len(third.copies()) == 1
    third.truncate(0)
    third.close()
    first.close()
    cache.check()
    assert cache.stats().pages_free == 8


def test_a_pin_whose_time_is_over_has_ended_whether_noticed_or_not() -> None:
    now = [0.0]
    cache = PagedCache(4, 1, clock=lambda: now[0])
    with cache.open([1, 2]) as sequence:
        sequence.publish()
    for noticed in (False, True):
        pin = cache.pin([1], ttl=5)
        now[0] += 5
        if noticed:
            cache.stats()
        with pytest.raises(NotCached, match="not a running pin"):
            cache.unpin(pin)


def test_a_pin_that_is_refused_leaves_the_order_of_eviction() -> None:
    cache = PagedCache(4, 1, hard_pin_pages=0)
    for token in (1, 2):
        with cache.open([token]) as sequence:
            sequence.publish()
    with pytest.raises(InvalidValue, match="budget"):
        cache.pin([1], hard=True)
    cache.evict(1)
    assert cache.match([1]).num_tokens == 0
    assert cache.match([2]).num_tokens == 1


@pytest.mark.parametrize("hard", [False, True])
def test_a_pin_whose_time_is_over_keeps_nothing_from_being_forgotten(hard: bool) -> None:
    now = [0.0]
    cache = PagedCache(4, 1, clock=lambda: now[0])
    sequence = cache.open([1, 2])
    sequence.publish()
    cache.pin([1], ttl=5, hard=hard)
    now[0] = 5
    sequence.close(keep=False)
    assert cache.match([1]).num_tokens == 0
