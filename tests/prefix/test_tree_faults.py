"""Faults of the tree behind both indices, each in its smallest form."""

from __future__ import annotations

import pytest

from kvkeep import PagedCache
from kvkeep.core.eviction import LRU, Priority


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_a_pin_whose_last_run_went_keeps_what_is_left(prefix: str) -> None:
    cache = PagedCache(8, 1, prefix=prefix)
    for prompt in ([1, 2], [1, 2, 3, 4], [7, 7], [9]):
        with cache.open(prompt) as sequence:
            sequence.publish()
    pin = cache.pin([1, 2, 3, 4])
    cache.evict(5)  # all that is not pinned, and the run [3, 4]
    assert pin.num_tokens == 2
    with cache.open([9, 9]) as sequence:
        sequence.publish()
    cache.evict(2)
    assert pin.num_tokens == 2
    assert cache.stats().pins == 1
    cache.evict(2)
    assert (pin.num_tokens, cache.stats().pins_broken, cache.stats().pins) == (0, 1, 0)


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_run_that_loses_its_front_keeps_its_place(policy: str) -> None:
    """Prompts that part behind the first page of others cut their runs there.

    The ends of those runs are as old as before: they need no place between others in the queue.
    """
    cache = PagedCache(1000, 4, eviction=policy)
    for end in (0, 50):
        for i in range(100):
            front = [7, *range(10 * i, 10 * i + 3)]
            with cache.open([*front, *range(10 * i + end, 10 * i + end + 4)]) as sequence:
                sequence.copies()
                sequence.publish()
    assert sum(1 for _ in cache.runs()) == 300
    orders = cache.tree.policy
    assert isinstance(orders, LRU | Priority)
    queues = [orders._queue] if isinstance(orders, LRU) else [*orders._queues.values()]
    assert sum(len(queue._between) for queue in queues) == 0
    cache.check()
    before = cache.stats().pages_cached
    assert cache.evict(before) == before
    cache.check()
