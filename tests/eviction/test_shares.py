"""`Shares`: who gives a page, counted against the cache, and what a flooder can take."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue, OutOfPages, PagedCache
from kvkeep.core.eviction import LRU, POLICIES, EvictionPolicy
from kvkeep.core.eviction.shares import Shares
from kvkeep.testing import PolicyTests

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence


class TestSharesOfLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return Shares(LRU)


def serve(cache: PagedCache, tokens: list[int], tenant: str) -> int:
    with cache.open(tokens, tenant) as sequence:
        sequence.copies()
        sequence.publish()
        return sequence.num_cached


def held(cache: PagedCache) -> dict[str, int]:
    return {space.tenant: pages for space, pages in cache.namespaces().items() if pages}


def flood(cache: PagedCache, requests: int, tenant: str = "flooder") -> None:
    for number in range(requests):
        serve(cache, [10_000 + number, *range(15)], tenant)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_flooder_evicts_its_own(name: str) -> None:
    cache = PagedCache(100, 4, eviction=Shares(POLICIES[name]))
    prompts = {f"t{number}": [number, *range(60)] for number in range(4)}  # 15 pages each
    for tenant, prompt in prompts.items():
        serve(cache, prompt, tenant)
    flood(cache, 200)
    cache.check()
    assert held(cache)["flooder"] >= 35
    for tenant, prompt in prompts.items():
        assert serve(cache, prompt, tenant) == 60


def test_without_shares_the_flooder_takes_all() -> None:
    cache = PagedCache(100, 4)
    serve(cache, list(range(60)), "a")
    flood(cache, 200)
    assert set(held(cache)) == {"flooder"}


def test_others_use_what_a_tenant_leaves() -> None:
    cache = PagedCache(100, 4, eviction=Shares(LRU))
    serve(cache, [1, 2, 3, 4], "small")
    flood(cache, 100)
    assert held(cache)["flooder"] >= 90
    for number in range(20):  # the small one takes its share back
        serve(cache, [number, *range(15)], "small")
    assert held(cache)["small"] >= 45


def test_shares_are_by_weight() -> None:
    cache = PagedCache(120, 4, eviction=Shares(LRU, {"a": 3.0, "b": 1.0}, guaranteed=1))
    for _ in range(3):
        flood(cache, 60, "a")
        flood(cache, 60, "b")
    assert 85 <= held(cache)["a"] <= 95
    assert 25 <= held(cache)["b"] <= 35


def test_public_pages_go_last() -> None:
    cache = PagedCache(40, 4, eviction=Shares(LRU))
    cache.public.declare(list(range(20)))
    serve(cache, [*range(20), 1, 2, 3, 4, 5], "a")
    flood(cache, 100)
    assert serve(cache, [*range(20), 1], "b") == 20
    cache.clear()
    assert not cache.namespaces()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_pages_are_counted_right(name: str) -> None:
    """Whatever is done, the pages of each tenant are those that the cache stores for it."""
    chance = random.Random(name)
    policy = Shares(POLICIES[name], {"t1": 0.5, "t2": 4})
    cache = PagedCache(60, 2, eviction=policy)
    cache.public.declare([1, 1, 2, 2])
    running: list[Sequence] = []
    for step in range(1500):
        tenant = f"t{chance.randrange(5)}"
        begin = [1, 1, 2, 2] if chance.random() < 0.4 else []
        prompt = begin + [chance.randrange(3) for _ in range(chance.randrange(1, 20))]
        try:
            sequence = cache.open(prompt, tenant)
        except OutOfPages:
            running.pop(chance.randrange(len(running))).close()
            continue
        running.append(sequence)
        sequence.copies()
        sequence.publish()
        one = chance.choice(running)
        match chance.randrange(5):
            case 0:
                one.truncate(chance.randrange(one.num_tokens + 1))
            case 1:
                cache.evict(chance.randrange(4))
            case 2:
                cache.remove(prompt, tenant)
            case _:
                running.remove(one)
                one.close(keep=chance.random() < 0.8)
        if step % 10 == 0:
            cache.check()
            assert policy.pages() == {s: n for s, n in cache.namespaces().items() if n}
    for sequence in running:
        sequence.close()
    cache.clear()
    assert not policy.pages()


@pytest.mark.parametrize("by", ["a pin", "the end of its session"])
def test_a_tail_counts_no_longer_whatever_order_it_went_in(by: str) -> None:
    shares = Shares(LRU)
    cache = PagedCache(100, 4, eviction=shares)
    with cache.open(range(40), "a", session="one") as sequence:
        sequence.publish()
    if by == "a pin":
        cache.pin(range(40), "a")
    else:
        cache.session("one", "a").close()
    cache.evict(3)
    assert {space.tenant: pages for space, pages in shares.pages().items()} == held(cache)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_tenants_without_pages_leave_nothing_behind(name: str) -> None:
    policy = Shares(POLICIES[name])
    cache = PagedCache(64, 1, eviction=policy)
    for number in range(2000):
        serve(cache, [number], f"tenant {number}")
    assert len(policy.pages()) <= 64
    assert len(policy._order) <= 4 * 64 + 65
    assert policy._weight == pytest.approx(len(policy.pages()))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e9, True])
def test_wrong_weights_are_refused(weight: float) -> None:
    with pytest.raises(InvalidValue, match="the share of 'a'"):
        Shares(LRU, {"a": weight})


def test_a_wrong_guarantee_is_refused() -> None:
    with pytest.raises(InvalidValue, match="guaranteed"):
        Shares(LRU, guaranteed=2)
