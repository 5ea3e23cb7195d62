"""The curve inside `PagedCache`: what it says of other sizes is what caches of these sizes do."""

from __future__ import annotations

import numpy as np
import pytest
from lru_model import PlainMemory

from kvkeep import Namespace, OutOfPages, PagedCache
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.miss_ratio import TIMES, MissRatioCurve, PromptWatch, prompts

PAGE = 256
BLOCK = 256
POOL = 48


@pytest.fixture(autouse=True)
def _remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached is worth remembering from 8 pages on: these prompts are short."""
    monkeypatch.setattr(prompts, "_WORTH_BYTES", 8 * PAGE * 4)


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
def test_every_block_is_known_again_whatever_was_evicted_meanwhile(prefix: str, seed: int) -> None:
    """Keys that are remembered at pages are the right ones, though pages come and go."""
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


def test_what_is_cached_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    plainly = PromptWatch._hash

    def count(watch: PromptWatch, tokens: bytes, length: int, start: int = 0) -> np.ndarray:
        nonlocal hashed
        hashed += length
        return plainly(watch, tokens, length, start)

    monkeypatch.setattr(PromptWatch, "_hash", count)
    cache = PagedCache(POOL, PAGE, what_if=MissRatioCurve(1.0, BLOCK, most_blocks=1000))
    tokens = np.arange(PAGE * 20 + 1, dtype=np.int32)
    for expected in (20, 20, 0, 0):  # when it is computed, when it is found, and never again
        hashed = 0
        serve(cache, tokens)
        cache.what_if()
        assert hashed == expected * PAGE * 4
    cache.clear()
    hashed = 0
    serve(cache, tokens)
    assert hashed == 20 * PAGE * 4


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
    assert points[0].hit_rate == pytest.approx(32 / 99)
    assert cache.what_if([64], "a")[0].hit_rate == pytest.approx(32 / 66)
    assert cache.what_if([64], "b")[0].hit_rate == 0.0
    assert cache.what_if([64], Namespace(tenant="nobody"))[0].hit_rate == 0.0
    assert cache.what_if([1])[0].hit_rate == pytest.approx(16 / 99)
    assert "what_if" not in cache.stats().as_dict()


def test_prompts_without_a_block_count_in_tokens() -> None:
    cache = PagedCache(64, 16, what_if=1.0)
    serve(cache, np.arange(5, dtype=np.int32))
    assert cache.what_if([64])[0].hit_rate == 0.0
    for _ in range(2):
        serve(cache, np.arange(17, dtype=np.int32))
    assert cache.what_if([64])[0].hit_rate == pytest.approx(16 / 39)


@pytest.mark.parametrize(
    ("pages", "size", "block"), [(64, 16, 16), (16_384, 16, 64), (10**6, 16, 512), (99, 1024, 1024)]
)
def test_blocks_are_small_where_memory_is(pages: int, size: int, block: int) -> None:
    curve = PromptWatch.of(0.1, size, pages, max(512, size)).curve
    assert curve.block_tokens == block
    assert curve.most_blocks * block >= 8 * pages * size


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


def test_a_remembered_page_that_went_is_found_out() -> None:
    cache = PagedCache(POOL, PAGE, what_if=MissRatioCurve(1.0, BLOCK, most_blocks=1000))
    for _ in range(2):
        serve(cache, np.arange(PAGE * 20 + 1, dtype=np.int32))
    cache.check()
    watch = cache._watch
    assert watch is not None
    watch.forget = lambda _: None  # type: ignore[method-assign]
    cache.clear()
    with pytest.raises(AssertionError, match="a page that was evicted"):
        cache.check()
