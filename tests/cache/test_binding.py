"""A cache belongs to one memory: page ids mean nothing in another."""

from __future__ import annotations

import gc

import pytest

from kvkeep import PagedCache
from kvkeep.core.errors import InvalidValue


class Memory:
    """What owns the tensors."""


def filled(cache: PagedCache) -> PagedCache:
    with cache.open(range(20)) as sequence:
        sequence.copies()
        sequence.publish()
    return cache


def test_the_same_memory_is_bound_as_often_as_one_likes() -> None:
    cache, memory = PagedCache(8, 4), Memory()
    for _ in range(3):
        cache.bind(memory)
        filled(cache)


def test_another_memory_is_refused_while_the_first_is_there() -> None:
    cache, memory, other = PagedCache(8, 4), Memory(), Memory()
    cache.bind(memory)
    with pytest.raises(InvalidValue, match=r"pages lie in another memory.*of its own"):
        cache.bind(other)  # even empty: whoever has the first may go on at any time
    cache.bind(memory)


def test_pages_of_a_memory_that_is_gone_are_not_another_ones() -> None:
    cache, memory, other = PagedCache(8, 4), Memory(), Memory()
    cache.bind(memory)
    filled(cache)
    del memory
    gc.collect()
    with pytest.raises(InvalidValue, match=r"holds 5 pages of a memory that is gone.*clear\(\)"):
        cache.bind(other)
    running = cache.open(range(4))
    cache.clear()
    with pytest.raises(InvalidValue, match="pages of a memory that is gone"):
        cache.bind(other)
    running.close()
    cache.clear()
    cache.bind(other)
    with pytest.raises(InvalidValue, match="another memory"):
        cache.bind(Memory())


def test_no_memory_is_kept_alive() -> None:
    cache, memory = PagedCache(8, 4), Memory()
    cache.bind(memory)
    before = len(gc.get_referrers(memory))
    cache.bind(memory)
    assert len(gc.get_referrers(memory)) == before


def test_what_was_cached_before_is_the_first_ones() -> None:
    """An engine of one's own may bind late: nothing was said of the memory until then."""
    cache, memory = filled(PagedCache(8, 4)), Memory()
    cache.bind(memory)
    assert cache.match(range(20)).num_tokens == 20


@pytest.mark.parametrize("memory", [7, "gpu", (1, 2)])
def test_what_cannot_be_referred_to_weakly_is_refused(memory: object) -> None:
    with pytest.raises(InvalidValue, match="the object that owns it"):
        PagedCache(8, 4).bind(memory)
