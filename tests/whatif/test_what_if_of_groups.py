"""The curve of a cache with groups is of the KV alone, and says so."""

from __future__ import annotations

import numpy as np
from lru_model import PlainMemory

from kvkeep import PagedCache
from kvkeep.core.groups import GroupLayout, StateSpec
from kvkeep.core.miss_ratio import MissRatioCurve

PAGE = 8


def request(cache: PagedCache, tokens: np.ndarray) -> None:
    with cache.open(tokens) as sequence:
        groups = sequence.groups
        while groups.position < len(tokens):
            stop = min(len(tokens), *groups.stops)
            sequence.copies(), groups.copies()
            groups.reach(stop)
            if stop in groups.stops:
                groups.checkpoint(stop)
            sequence.publish(stop)


def test_it_is_the_share_of_kv_that_other_sizes_would_have() -> None:
    chance = np.random.default_rng(3)
    curve = MissRatioCurve(1.0, PAGE, most_blocks=2000)
    cache = PagedCache(240, GroupLayout(PAGE, (), StateSpec(4)), what_if=curve)
    sizes = (60, 120, 240, 480, 960)
    plain = {size: PlainMemory(size) for size in sizes}
    asked = reused = 0
    for _ in range(250):
        talk = int(chance.zipf(1.4)) % 60
        tokens = np.arange(PAGE * int(chance.integers(2, 14)) + 1, dtype=np.int32) + 1000 * talk
        request(cache, tokens)
        blocks = [(talk, at) for at in range(len(tokens) // PAGE)]
        for memory in plain.values():
            memory.prompt(blocks)
        asked += len(tokens) - 1
    reused = cache.stats().hit_tokens
    points = cache.what_if(sizes)
    assert all(point.kv_only for point in points)
    for point, memory in zip(points, plain.values(), strict=True):
        share = asked / (asked + 250)  # the last tokens count as requested
        assert abs(point.hit_rate - share * memory.hit_rate) < 1e-9
    of_all = points[sizes.index(240)].hit_rate
    assert of_all > reused / (asked + 250), "a bound from above: states take pages, and positions"
    groups = cache.stats().groups
    assert groups.unresumed_tokens > 0


def test_that_of_a_plain_cache_is_the_hit_rate() -> None:
    cache = PagedCache(64, PAGE, what_if=1.0)
    assert not any(point.kv_only for point in cache.what_if())
