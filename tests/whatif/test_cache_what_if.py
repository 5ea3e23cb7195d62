"""The curve inside `PagedCache`: what it says of other sizes is what caches of these sizes do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lru_model import PlainMemory

from kvkeep import Namespace, OutOfPages, PagedCache
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.miss_ratio import TIMES, MissRatioCurve, PromptWatch

PAGE = 256
BLOCK = 256
POOL = 48


def serve(cache: PagedCache, tokens: np.ndarray, space: str = "", answer: int = 0) -> np.ndarray:
    """A request; returns its tokens with the answer's."""
    with cache.open(tokens, space) as sequence:
        sequence.copies()
        if answer:
            sequence.append(np.arange(answer, dtype=np.int32) + int(tokens[-1]))
        sequence.copies()
        sequence.publish()
        return sequence.tokens.copy()


class Twin:
    """A cache, and plain memories of several sizes that get the same prompts."""

    def __init__(self, prefix: str, capacities: tuple[int, ...]) -> None:
        self.curve = MissRatioCurve(1.0, BLOCK, most_blocks=10_000)
        self.cache = PagedCache(POOL, PAGE, prefix=prefix, what_if=self.curve)
        self.plain = {capacity: PlainMemory(capacity) for capacity in capacities}

    def ask(self, tokens: np.ndarray, space: str = "", answer: int = 0) -> np.ndarray:
        try:
            done = serve(self.cache, tokens, space, answer)
        except OutOfPages:
            return tokens
        blocks = self._blocks(tokens[:-1], space)
        for memory in self.plain.values():
            memory.prompt(blocks)
            if len(after := self._blocks(done, space)) > len(blocks):
                memory.used(after)
        return done

    @staticmethod
    def _blocks(tokens: np.ndarray, space: str) -> list[tuple[str, bytes]]:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [(space, tokens[:end].tobytes()) for end in ends]

    def compare(self) -> None:
        self.cache.check()
        share = {size: memory.hit_rate for size, memory in self.plain.items()}
        self.cache.what_if()  # what waits is counted
        assert self.curve.blocks == next(iter(self.plain.values())).asked
        assert dict(zip(share, self.curve.curve(list(share)), strict=True)) == pytest.approx(share)


@pytest.mark.parametrize("prefix", ["radix", "chain"])
@pytest.mark.parametrize("seed", range(3))
def test_every_block_counts_whatever_was_evicted_meanwhile(prefix: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    twin = Twin(prefix, (4, 12, 24, 48, 100, 300))
    heads = [chance.integers(0, 9000, PAGE * 10, dtype=np.int32) for _ in range(4)]
    talks: list[np.ndarray] = []
    for step in range(600):
        space = ("", "tenant")[int(chance.integers(4) == 0)]
        kind = int(chance.integers(10))
        if kind < 4 or not talks:  # a common beginning, or a part of it
            head = heads[int(chance.integers(4))][: PAGE * int(chance.integers(1, 11))]
            own = chance.integers(0, 9000, int(chance.integers(1, 3 * PAGE)), dtype=np.int32)
            tokens = np.concatenate((head, own))
        elif kind < 9:  # a conversation goes on
            talk = talks[int(chance.integers(len(talks)))]
            own = chance.integers(0, 9000, int(chance.integers(1, 2 * PAGE)), dtype=np.int32)
            tokens = np.concatenate((talk, own))[: PAGE * 30]
        else:
            tokens = chance.integers(0, 9000, PAGE * int(chance.integers(1, 30)), dtype=np.int32)
        done = twin.ask(tokens, space, answer=int(chance.integers(2)) * int(chance.integers(600)))
        talks = [*talks[-12:], done]
        if step % 97 == 0:
            twin.compare()
        if step % 211 == 210:
            twin.cache.clear()
    assert twin.cache.stats().evicted_pages > 500
    twin.compare()


def test_it_says_what_a_larger_cache_then_does() -> None:
    """Sampled, with the defaults, and with a cache that is twice as large beside it."""
    chance = np.random.default_rng(2)
    talks = [chance.integers(0, 9000, 400, dtype=np.int32) for _ in range(260)]
    sizes = (8192, 16_384)
    caches = [PagedCache(size, 16, what_if=0.1) for size in sizes]
    for _ in range(1500):
        which = int(chance.integers(len(talks)))
        own = chance.integers(0, 9000, 100, dtype=np.int32)
        talks[which] = talk = np.concatenate((talks[which], own))[-1200:]
        if len(talk) == 1200:
            talks[which] = chance.integers(0, 9000, 400, dtype=np.int32)
        for cache in caches:
            serve(cache, talk)
    (told,) = [point for point in caches[0].what_if() if point.times == 2]
    assert (told.pages, told.tokens) == (sizes[1], sizes[1] * 16)
    measured = [cache.stats().hit_rate for cache in caches]
    assert measured[1] > measured[0] + 0.1
    assert told.hit_rate == pytest.approx(measured[1], abs=0.05)
    (now,) = caches[0].what_if([sizes[0]])
    assert now.hit_rate == pytest.approx(measured[0], abs=0.05)


def test_points_and_statistics() -> None:
    cache = PagedCache(64, 16, what_if=1.0)
    tokens = np.arange(33, dtype=np.int32)
    for space in ("a", "a", "b"):
        serve(cache, tokens, space)
    points = cache.what_if()
    assert [point.times for point in points] == list(TIMES)
    assert [point.pages for point in points] == [16, 32, 64, 128, 256, 512]
    assert points == cache.stats().what_if
    # Two of three prompts found nothing; of the third all but the last token.
    assert [point.hit_rate for point in points] == pytest.approx([32 / 99] * 6)
    assert cache.what_if([64], "a")[0].hit_rate == pytest.approx(32 / 66)
    assert cache.what_if([64], "b")[0].hit_rate == 0.0
    assert cache.what_if([64], Namespace(tenant="nobody"))[0].hit_rate == 0.0
    assert cache.what_if([1])[0].hit_rate == pytest.approx(16 / 99)
    assert "what_if" not in cache.stats().as_dict()


def test_the_present_size_is_what_was_measured() -> None:
    """LRU has one page of the second prompt; the cache also reused half of the next page."""
    cache = PagedCache(64, 16, what_if=1.0)
    tokens = np.arange(33, dtype=np.int32)
    serve(cache, tokens)
    serve(cache, np.concatenate((tokens[:24], tokens[:9] + 1000)))
    assert cache.stats().hit_rate == 24 / 66
    assert [point.hit_rate for point in cache.what_if()] == pytest.approx([24 / 66] * 6)


def test_sizes_below_one_at_which_lru_has_nothing_are_left_out() -> None:
    """What a pin keeps is reused in turns in which LRU would reuse nothing."""
    cache = PagedCache(16, 16, what_if=1.0)
    talks = [np.arange(65, dtype=np.int32) + 1000 * talk for talk in range(6)]
    serve(cache, talks[0])
    cache.pin(talks[0], hard=True)
    for turn in range(120):
        serve(cache, talks[(turn + 1) % 6])
    rate = cache.stats().hit_rate
    assert rate > 0.1
    points = cache.what_if()
    assert [point.times for point in points] == [1, 2, 4, 8]
    assert points[0].hit_rate == rate
    assert points[1].hit_rate > 0.9


@pytest.mark.parametrize(("pages", "size"), [(64, 16), (16_384, 16), (10**6, 16), (99, 1024)])
def test_a_curve_counts_pages_up_to_16_times_the_memory(pages: int, size: int) -> None:
    curve = PromptWatch(0.1, size, pages).curve
    assert curve.block_tokens == size
    assert curve.most_blocks >= 16 * pages


@pytest.mark.parametrize("length", [24, 60, 200])
def test_short_prompts_tell_what_caches_of_other_sizes_do(length: int) -> None:
    """Prompts of a page or some, in a cache that would have had blocks of 512 tokens."""
    chance = np.random.default_rng(length)
    heads = [chance.integers(0, 9000, length, dtype=np.int32) for _ in range(3000)]
    pages = 600 * (length // 16)
    sizes = (pages // 2, pages, 2 * pages)
    caches = [PagedCache(size, 16, what_if=0.1) for size in sizes]
    for _ in range(6000):
        tokens = heads[min(2999, int(chance.exponential(600)))].copy()
        tokens[-3:] = chance.integers(0, 9000, 3)
        for cache in caches:
            serve(cache, tokens)
    half, now, twice = (cache.stats().hit_rate for cache in caches)
    assert twice > now + 0.02 > half + 0.04
    told = {point.times: point.hit_rate for point in caches[1].what_if()}
    assert told[1] == pytest.approx(now)
    assert told[2] == pytest.approx(twice, abs=0.03)
    assert told[0.5] == pytest.approx(half, abs=0.03)


@settings(deadline=None)
@given(
    st.sampled_from(["lru", "priority", "returns"]),
    st.integers(1, 5),
    st.sampled_from([0.2, 1.0]),
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(1, 30), st.integers(0, 9), st.booleans(),
            st.sampled_from(["", "tenant"]),
        ),
        max_size=60,
    ),
)  # fmt: skip
def test_what_it_says_of_the_present_size_is_the_hit_rate(
    policy: str, size: int, sample: float, requests: list[tuple[int, int, int, bool, str]]
) -> None:
    """Whatever the policy, the pages, the sample, forks, and prompts that do not fit."""
    cache = PagedCache(12, size, eviction=policy, what_if=sample)
    for head, length, answer, forked, space in requests:
        tokens = np.arange(length, dtype=np.int32) % 11 + 100 * head
        try:
            done = serve(cache, tokens, space, answer)
            if forked:
                with cache.open(done, space) as sequence, sequence.fork() as fork:
                    fork.append([1])
        except OutOfPages:
            continue
    cache.check()
    stats = cache.stats()
    told = {point.times: point.hit_rate for point in stats.what_if}
    assert told[1] == pytest.approx(stats.hit_rate, abs=1e-9)
    rates = [told[times] for times in TIMES if times in told]
    assert rates == sorted(rates)
    assert all(0 <= rate <= 1 for rate in rates)


def test_a_cache_that_nobody_watches() -> None:
    cache = PagedCache(16)
    assert cache.stats().what_if == ()
    with pytest.raises(IllegalStep, match=r"what_if=0\.1"):
        cache.what_if()


def test_mistakes() -> None:
    with pytest.raises(InvalidValue, match="whole pages of 16"):
        PagedCache(16, 16, what_if=MissRatioCurve(block_tokens=100))
    with pytest.raises(InvalidValue, match="share above 0"):
        PagedCache(16, 16, what_if=0)
    cache = PagedCache(64, 16, what_if=MissRatioCurve(1.0, 16, most_blocks=100))
    assert [point.times for point in cache.what_if()] == [0.25, 0.5, 1]  # as far as it reaches
    for wrong in (0, 101, 1.5):
        with pytest.raises(InvalidValue, match="pages"):
            cache.what_if([wrong])
