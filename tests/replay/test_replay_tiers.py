"""Simulated tiers beside a real store, and what the policies do to traces that people know."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.bench.replay import Workload, simulate_tiers
from kvkeep.bench.replay.tiered import Level, TierSimulator
from kvkeep.bench.traces import generate
from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import chain_keys
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import BlockShape, make_codec
from kvkeep.store.tiers import (
    Exclusive,
    Inclusive,
    MemorySpec,
    TieredStore,
    TierSpec,
)
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.tiers import TieringPolicy

PAGE = 4096
RAW = PAGE - HEADER_BYTES
SPACE = bytes(16)
POLICIES: dict[str, Callable[[], TieringPolicy]] = {
    "inclusive": Inclusive,
    "inclusive 2": lambda: Inclusive(2),
    "exclusive": Exclusive,
    "exclusive 2": lambda: Exclusive(2),
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


class AtOnce(Workers):
    """No threads: a job is done by who submits it, so that the same comes of it each time."""

    def __init__(self) -> None:
        super().__init__("at once", 1, 1 << 40)

    def submit(
        self,
        job: Callable[[], object],
        cost: int = 1,
        wait: float | None = 0.0,
        given_up: Callable[[], object] | None = None,
    ) -> bool:
        job()
        return True


class Real:
    """A `TieredStore` of one page a block, asked as the simulator is."""

    def __init__(self, sizes: Sequence[int], policy: TieringPolicy) -> None:
        front, *below = sizes
        raw = make_codec("raw", BlockShape())
        specs = [
            TierSpec(f"t{level}", MemoryBackend(size * PAGE), raw, lambda _: None)
            for level, size in enumerate(below)
        ]
        self.store = TieredStore(MemorySpec(MemoryBackend(front * PAGE)), specs, policy)
        self.tiers = self.store.tiers
        for tier in self.tiers:
            tier.reading.close()
            tier.writing.close()
            tier.reading, tier.writing = AtOnce(), AtOnce()

    def request(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks found by level."""
        sizes = [RAW] * len(keys)
        levels = self.store.locate(keys)
        count = self.store.read(keys, sizes, lambda at, raw: None, levels=levels).blocks
        self.store.write(keys[count:], sizes[count:], lambda at, raw: None)
        return [levels[:count].count(level) for level in range(1 + len(self.tiers))]

    def orders(self) -> list[list[bytes]]:
        """What each level holds, in the order in which it would go. It is gone then."""
        return [one.catalogue.victims(1 << 40) for one in (self.store.memory, *self.tiers)]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), sizes=st.sampled_from([(40, 60), (40, 20), (50, 40, 100)]))
def test_it_moves_what_a_real_store_moves(name: str, seed: int, sizes: tuple[int, ...]) -> None:
    real = Real(sizes, POLICIES[name]())
    levels = [Level(f"l{at}", size) for at, size in enumerate(sizes)]
    simulated = TierSimulator(levels, POLICIES[name](), ahead=True)
    try:
        for keys in conversations(seed, 150, most=4):
            assert simulated.request(keys) == real.request(keys)
            simulated.check()
        for level, tier in enumerate(real.tiers, start=1):
            assert simulated.stats()[level].writes == tier.counters.writes
        counted = simulated.stats()[0]
        assert counted.demotions == real.store.memory.counters.demotions
        assert [place.catalogue.victims(1 << 40) for place in simulated._levels] == real.orders()
    finally:
        real.store.close()


def test_a_new_prompt_is_demoted_ahead_from_its_end() -> None:
    """Like in a store, where a prompt is found by its first blocks only."""
    simulated = TierSimulator([Level("m", 20), Level("d", 20)], Exclusive(), ahead=True)
    blocks = [bytes(16) + b"%04d" % number for number in range(20)]
    simulated.request(blocks)
    assert [simulated.level_of(block) for block in blocks] == [0] * 18 + [1] * 2


# --- by itself -------------------------------------------------------------------------------


def replayed(
    policy: TieringPolicy, sizes: Sequence[int], prompts: Sequence[list[bytes]], **more: Any
) -> tuple[float, TierSimulator]:
    """The share of blocks that were found, in %."""
    levels = [Level(f"l{at}", size, **more) for at, size in enumerate(sizes)]
    simulated = TierSimulator(levels, policy)
    found = sum(sum(simulated.request(keys)) for keys in prompts)
    simulated.check()
    return 100 * found / sum(map(len, prompts)), simulated


@pytest.fixture(scope="module")
def chats() -> list[list[bytes]]:
    """Chats that a few hundred blocks of 512 tokens are too few for."""
    trace = generate("chat", seed=7, requests=2500, unit_tokens=512)
    return [prompt(*map(int, request.units)) for request in trace]


def test_one_level_is_a_cache(chats: list[list[bytes]]) -> None:
    """Against an LRU cache of blocks in ten lines."""
    kept: dict[bytes, None] = {}
    found = 0
    for keys in chats:
        count = next((at for at, key in enumerate(keys) if key not in kept), len(keys))
        found += count
        for key in reversed(keys[:count]):
            kept[key] = kept.pop(key)
        new = keys[count:]
        while len(kept) + len(new) > 300:
            del kept[next(iter(kept))]
        kept.update(dict.fromkeys(reversed(new)))
    share, simulated = replayed(Inclusive(), [300], chats)
    assert share == 100 * found / sum(map(len, chats))
    assert simulated.stats()[0].hits == found
    assert simulated.stats()[0].writes <= sum(map(len, chats)) - found, "some lie behind a gap"


def test_exclusive_tiers_hold_as_much_as_one_as_large(chats: list[list[bytes]]) -> None:
    together, simulated = replayed(Exclusive(), [100, 200], chats)
    alone, _ = replayed(Inclusive(), [300], chats)
    copied, _ = replayed(Inclusive(), [100, 300], chats)
    assert abs(together - alone) < 0.5
    assert abs(copied - alone) < 0.5
    memory, lower = simulated.stats()
    assert memory.blocks == 100
    assert lower.blocks == 200
    assert memory.demotions == lower.writes <= memory.evictions


def test_the_same_again(chats: list[list[bytes]]) -> None:
    runs = [replayed(Exclusive(2), [100, 300], chats) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert runs[0][1].stats() == runs[1][1].stats()


def test_2q_remembers_what_was_evicted() -> None:
    """A few are asked for again and again, and between them come ever more that are not."""
    chance = random.Random(3)
    prompts = [
        prompt(chance.randrange(60)) if chance.random() < 0.3 else prompt(1000 + number)
        for number in range(6000)
    ]
    lru, _ = replayed(Inclusive(), [30, 60], prompts)
    share, _ = replayed(Inclusive(), [30, 60], prompts, eviction="2q")
    assert share > 1.2 * lru


def test_a_prompt_larger_than_memory_fills_it_and_no_more() -> None:
    for make in POLICIES.values():
        simulated = TierSimulator([Level("memory", 10), Level("disk", 30)], make())
        keys = prompt(*range(50))
        assert sum(simulated.request(keys)) == 0
        simulated.check()
        again = simulated.request(keys)
        assert sum(again) in (10, 30), "the beginning of it is there"
        simulated.check()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Level("x", 0), "at least 1"),
        (lambda: Level("x", 5, "best"), "no eviction policy 'best'"),
        (lambda: TierSimulator([], Inclusive()), "memory, at least"),
    ],
)
def test_mistakes(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        wrong()


def test_what_is_written_a_day_is_told_in_tokens() -> None:
    work = Workload.read(generate("chat", seed=1, requests=400, unit_tokens=128))
    disk = simulate_tiers(work, [100 * 128, 4000 * 128]).tiers[1]
    days = work.span_s / 86_400
    assert disk["written_tokens_a_day"] == pytest.approx(disk["writes"] * work.unit_tokens / days)
