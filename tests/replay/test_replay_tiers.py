"""Simulated tiers beside a real store, and what the policies do to traces that people know."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.backends.memory import MemoryBackend
from kvkeep.codecs import BlockShape, make_codec
from kvkeep.errors import InvalidValue
from kvkeep.keys import chain_keys
from kvkeep.replay.tiers import Level, TierSimulator
from kvkeep.tiers import (
    AdaptiveTiering,
    Exclusive,
    Front,
    Inclusive,
    Tier,
    TieredStore,
    TierOptions,
)
from kvkeep.tiers.record import HEADER_BYTES
from kvkeep.traces import generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.eviction import EvictionPolicy
    from kvkeep.tiers import TieringPolicy

PAGE = 4096
RAW = PAGE - HEADER_BYTES
SPACE = bytes(16)
POLICIES: dict[str, Callable[[], TieringPolicy]] = {
    "inclusive": Inclusive,
    "inclusive 2": lambda: Inclusive(2),
    "exclusive": Exclusive,
    "exclusive 2": lambda: Exclusive(2),
    "adaptive": AdaptiveTiering,
}


def prompt(*texts: int) -> list[bytes]:
    """Block ids of a prompt whose blocks have these texts, chained."""
    data = b"".join(text.to_bytes(8, "big") for text in texts)
    return [SPACE + key for key in chain_keys(SPACE * 2, data, 8)]


def conversations(seed: int, requests: int, most: int) -> Iterator[list[bytes]]:
    """Prompts that begin alike, go on from one another, or come alone; ``most`` blocks each."""
    chance = random.Random(seed)
    talks: list[list[int]] = []
    for number in range(requests):
        if talks and chance.random() < 0.6:
            texts = talks[-1 - min(int(chance.expovariate(0.2)), len(talks) - 1)]
        else:
            texts = [chance.randrange(3)]
            talks.append(texts)
        if len(texts) < most:
            texts.append(1000 + number)
        yield prompt(*texts)


class Real:
    """A `TieredStore` of one page a block, asked as the simulator is, and at rest in between."""

    def __init__(self, sizes: Sequence[int], policy: TieringPolicy) -> None:
        front, *below = sizes
        raw = make_codec("raw", BlockShape())
        self.tiers = [
            Tier(f"t{level}", MemoryBackend(size * PAGE), raw, lambda _: None, one_by_one())
            for level, size in enumerate(below)
        ]
        self.store = TieredStore(Front(MemoryBackend(front * PAGE)), self.tiers, policy)

    def request(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks found by level."""
        sizes = [RAW] * len(keys)
        levels = self.store.locate(keys)
        count = self.store.read(keys, sizes, lambda at, raw: None, levels=levels)
        assert count == len(levels)
        self.settle()
        self.store.write(keys[count:], sizes[count:], lambda at, raw: None)
        self.settle()
        return [levels.count(level) for level in range(1 + len(self.tiers))]

    def settle(self) -> None:
        for _ in range(3):
            for tier in self.tiers:
                assert tier.reading.wait(20)
                assert tier.writing.wait(20)

    def orders(self) -> list[list[bytes]]:
        """What each level holds, in the order in which it would go. It is gone then."""
        return [one.catalogue.victims(1 << 40) for one in (self.store.front, *self.tiers)]


def one_by_one() -> TierOptions:
    """So that blocks come in the order in which they were sent."""
    return TierOptions(writers=1, readers=1)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), sizes=st.sampled_from([(40, 60), (40, 20), (50, 40, 100)]))
def test_it_moves_what_a_real_store_moves(name: str, seed: int, sizes: tuple[int, ...]) -> None:
    real = Real(sizes, POLICIES[name]())
    levels = [Level(f"l{at}", size) for at, size in enumerate(sizes)]
    simulated = TierSimulator(levels, POLICIES[name](), ahead=True)
    try:
        for keys in conversations(seed, 150, most=4):
            assert list(simulated.request(keys).found) == real.request(keys)
            simulated.check()
        for level, tier in enumerate(real.tiers, start=1):
            assert simulated.writes(level) == tier.counters.writes
        counted = simulated.stats()[0]
        assert counted.demotions == real.store.front.counters.demotions
        assert [place.catalogue.victims(1 << 40) for place in simulated._places] == real.orders()
    finally:
        real.store.close()
