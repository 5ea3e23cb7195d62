"""Faults of the tree behind both indices, each in its smallest form."""

from __future__ import annotations

import pytest

from kvkeep import PagedCache


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_publishing_what_is_stored_raises_its_priority(prefix: str) -> None:
    cache = PagedCache(4, 1, prefix=prefix, eviction="priority")
    first, second = cache.open([1]), cache.open([1], priority=9)
    for sequence in (first, second, cache.open([2], priority=3)):
        sequence.publish()
        sequence.close()
    cache.evict(1)
    assert cache.match([1]).num_tokens == 1
    assert cache.match([2]).num_tokens == 0
