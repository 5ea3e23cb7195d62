"""What a `PagedCache` tells a policy that remembers, and what it makes of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvkeep import Namespace, PagedCache
from kvkeep.core.eviction import POLICIES, TwoQ, policy
from kvkeep.core.keys import chain_keys, root_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.prefix.node import Node

PAGE = 16
REMEMBERS = sorted(name for name in POLICIES if policy(name).remembers)
FORGETS = sorted(set(POLICIES) - set(REMEMBERS))


class Noting(TwoQ):
    """2Q that keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.fitted: list[tuple[int, int]] = []
        self.told: list[list[bytes]] = []

    def fit(self, size: int, block: int) -> None:
        self.fitted.append((size, block))
        super().fit(size, block)

    def requested(self, keys: Sequence[bytes]) -> int:
        self.told.append(list(keys))
        return super().requested(keys)


def prompt(pages: int, first: int = 0, more: int = 1) -> np.ndarray:
    """So many full pages, and some tokens."""
    return np.arange(first, first + pages * PAGE + more, dtype=np.int32)


def run(cache: PagedCache, tokens: np.ndarray, namespace: str = "") -> int:
    """Serve it; how many of its pages were asked for before."""
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()
        return sequence.known_pages


def runs_on_path(cache: PagedCache, tokens: np.ndarray) -> list[tuple[int, int]]:
    """Pages and hits of the runs that a prompt goes through."""
    with cache.open(tokens) as sequence:
        sequence.copies()
        node: Node = sequence.hold
        path = []
        while node.parent is not None:
            path.append((node.size, node.hits))
            node = node.parent
        return path[::-1]


def test_the_ones_that_remember() -> None:
    assert {"2q", "adaptive", "arc", "reuse", "s3fifo"} <= set(REMEMBERS)
    assert {"lru", "lfu", "fifo", "slru", "priority", "gdsf", "tlru"} <= set(FORGETS)


@pytest.mark.parametrize(("block_pages", "expected"), [(None, 32), (1, 1), (4, 4)])
def test_a_policy_is_told_of_its_memory(block_pages: int | None, expected: int) -> None:
    mine = Noting()
    PagedCache(64, PAGE, eviction=mine, block_pages=block_pages)
    assert mine.fitted == [(64, expected)]


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_it_is_told_the_keys_of_full_blocks(prefix: str) -> None:
    mine = Noting()
    cache = PagedCache(64, PAGE, eviction=mine, block_pages=2, prefix=prefix)
    tokens = prompt(5, more=3)
    run(cache, tokens)
    run(cache, tokens[:20], "tenant")
    run(cache, tokens[: 4 * PAGE], "tenant")
    bytes_per_block = 2 * PAGE * 4
    keys = chain_keys(root_key(Namespace()), tokens.tobytes(), bytes_per_block)
    others = chain_keys(root_key(Namespace(tenant="tenant")), tokens.tobytes(), bytes_per_block)
    assert len(keys) == 2
    assert mine.told == [keys, [], others]
    assert not set(keys) & set(others)


@pytest.mark.parametrize("prefix", ["radix", "chain"])
@pytest.mark.parametrize("name", REMEMBERS)
def test_what_comes_back_is_known(name: str, prefix: str) -> None:
    cache = PagedCache(12, PAGE, eviction=name, block_pages=2, prefix=prefix)
    tokens = prompt(5)
    assert run(cache, tokens) == 0
    cache.evict(12)
    assert runs_on_path(cache, tokens) == []
    assert run(cache, tokens, "tenant") == 0, "another's prompt is not his"
    cache.clear()
    assert run(cache, tokens) == 4, "two blocks of two pages; the fifth page is no full block"
    assert runs_on_path(cache, tokens) == [(4, 1), (1, 1)], "the last one: by being found here"
    other = np.concatenate((tokens[: 3 * PAGE], prompt(3, 5000)))
    cache.clear()
    assert run(cache, other) == 2, "its first block leads the other prompt, too"
    cache.check()


@pytest.mark.parametrize("name", REMEMBERS)
def test_known_and_new_pages_are_runs_of_their_own(name: str) -> None:
    """However they are published: in one go, page by page, or across the border."""
    for steps in ([96], [16, 32, 48, 64, 80, 96], [48, 96], [64, 96]):
        cache = PagedCache(24, PAGE, eviction=name, block_pages=2)
        run(cache, prompt(4))
        cache.clear()
        with cache.open(prompt(6)) as sequence:
            sequence.copies()
            assert sequence.known_pages == 4
            assert sequence.fork().known_pages == 4
            for step in steps:
                sequence.publish(step)
            path = []
            node: Node = sequence.hold
            while node.parent is not None:
                path.append((node.size, node.hits))
                node = node.parent
        known = [size for size, hits in path if hits]
        new = [size for size, hits in path if not hits]
        assert (sum(known), sum(new)) == (4, 2), steps
        assert [bool(hits) for _, hits in path[::-1]] == sorted(
            (bool(hits) for _, hits in path), reverse=True
        )
        cache.check()


@pytest.mark.parametrize("name", FORGETS)
def test_others_are_asked_nothing(name: str) -> None:
    cache = PagedCache(12, PAGE, eviction=name, block_pages=1)
    for _ in range(3):
        assert run(cache, prompt(5)) == 0
        cache.clear()


@pytest.mark.parametrize("name", REMEMBERS)
def test_the_same_prompts_bring_the_same_hits(name: str) -> None:
    """Nothing depends on chance, on ids of objects or on the time."""
    outcomes = []
    for _ in range(2):
        chance = np.random.default_rng(3)
        cache = PagedCache(40, PAGE, eviction=name, block_pages=1)
        hits = []
        for _ in range(400):
            first = int(chance.zipf(1.3)) % 30
            tokens = prompt(1 + first % 6, 1000 * first)
            with cache.open(tokens) as sequence:
                sequence.copies()
                hits.append(sequence.num_cached)
                sequence.publish()
        cache.check()
        outcomes.append(hits)
    assert outcomes[0] == outcomes[1]
    assert sum(outcomes[0]) > 0
