"""Faults of `PagedCache` that the state machine found, each in its smallest form."""

from __future__ import annotations

from kvkeep import PagedCache
from kvkeep.events import Closed


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
