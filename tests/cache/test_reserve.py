"""`open` with a reserve: pages that must remain for others, or nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep import InvalidValue, OutOfPages, PagedCache

PAGE = 4


@pytest.fixture(params=["radix", "chain"])
def cache(request):
    return PagedCache(10, PAGE, prefix=request.param)


def tokens(pages, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, pages * PAGE)


@pytest.mark.parametrize("reserve", range(8))
def test_what_is_reserved_remains(cache, reserve):
    if reserve > 6:
        with pytest.raises(OutOfPages, match="11 pages are needed and 10 can be had"):
            cache.open(tokens(4), reserve=reserve)
        assert cache.num_available == 10
        assert cache.stats().opened == 0
    else:
        with cache.open(tokens(4), reserve=reserve) as sequence:
            assert cache.num_available == 6
            sequence.append(tokens(reserve, 1))
    cache.check()


def test_a_partial_hit_is_given_up_for_the_reserve():
    cache = PagedCache(4, PAGE)
    with cache.open(tokens(2)) as sequence:
        sequence.publish()
    turned = [*tokens(2)[:6], 1, 2]
    with cache.open(turned, reserve=1) as sequence:
        assert sequence.num_cached == 6  # a page shared, one copied from, one new
    with cache.open(turned[:5], reserve=2) as sequence:
        assert sequence.num_cached <= 4
        sequence.copies()
    cache.check()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2", None])
def test_a_reserve_is_a_number_of_pages(cache, wrong):
    with pytest.raises(InvalidValue, match="reserve"):
        cache.open([1], reserve=wrong)
