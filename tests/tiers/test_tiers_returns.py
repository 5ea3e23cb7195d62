"""Tiers that order by waits: what goes first, what blocks that move or are shared are worth."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.bench.replay.tiered import Level, TierSimulator
from kvkeep.core.eviction import POLICIES
from kvkeep.core.keys import chain_keys
from kvkeep.core.returns import Ended
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import BlockShape, make_codec
from kvkeep.store.tiers import (
    Chain,
    Exclusive,
    Inclusive,
    MemorySpec,
    TieredStore,
    TierOptions,
    TierSpec,
)
from kvkeep.store.tiers.block_waits import BlockWaits
from kvkeep.store.tiers.conversations import Conversations
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.returns import Wait
    from kvkeep.store.tiers import TieringPolicy

SPACE = bytes(16)
ROOT = SPACE + bytes(32)
SIZE = 16
FAST, NEVER = Ended("tool_use", 10), Ended("end_turn", 10)


def chain(*texts: int) -> Chain:
    """A prompt of whole blocks, each of one text."""
    row = np.repeat(np.array(texts, np.int32), SIZE)
    keys = [SPACE + key for key in chain_keys(bytes(32), row.tobytes(), SIZE * 4)]
    return Chain(ROOT, keys, SIZE, len(row), row)


class Tier:
    """A catalogue that conversations use, one block a request or more."""

    def __init__(self, **more: int | None) -> None:
        self.now = 1000.0
        self.catalogue = Index(POLICIES["returns"], clock=lambda: self.now, **more)
        self.conversations = Conversations([self.catalogue], lambda: self.now)

    def request(self, one: Chain, ended: Ended | None, prompt: int | None = None) -> None:
        self.conversations.requested(one)
        self.conversations.used(one.blocks)
        new = [block for block in one.blocks if block not in self.catalogue]
        for block in new:
            self.catalogue.add(block, 1)
        self.catalogue.used(one.blocks, stored=True)
        if ended is not None:
            self.conversations.ended(one, one.tokens if prompt is None else prompt, ended, "a")

    def teach(self) -> None:
        """Tool calls return after four seconds, final answers never."""
        for talk in range(100, 180):
            self.request(chain(talk, 1), FAST)
            self.now += 4
            self.request(chain(talk, 1, 2), NEVER)
            self.now += 4
        self.now += 500
        self.catalogue.victims(1 << 30)

    def goes(self) -> list[bytes]:
        return self.catalogue.victims(1 << 30)


def test_conversations_that_return_stay() -> None:
    tier = Tier()
    tier.teach()
    old, young = chain(1, 2, 3), chain(4, 5)
    tier.request(old, FAST)
    tier.now += 2
    tier.request(young, NEVER)
    assert tier.goes() == [*reversed(young.blocks), *reversed(old.blocks)]
    tier.catalogue.check()


def test_what_a_conversation_left_behind_goes_first() -> None:
    tier = Tier()
    tier.teach()
    other = chain(7, 8)
    tier.request(other, NEVER)
    talk = chain(1, 2, 3, 4)
    tier.request(talk, FAST, prompt=2 * SIZE)
    tier.now += 3
    tier.request(chain(1, 2, 9), None)  # without the answer: blocks 3 and 4
    assert tier.goes()[:2] == [talk.blocks[3], talk.blocks[2]]


def test_a_shared_block_is_worth_the_best_of_those_that_wait_there() -> None:
    tier = Tier()
    tier.teach()
    tier.request(chain(1, 2), FAST)
    for other in range(3, 12):
        tier.now += 0.1
        tier.request(chain(1, other), NEVER)
    gone = tier.goes()
    assert gone[-2:] == [chain(1, 2).blocks[1], chain(1).blocks[0]]


def test_its_last_conversation_that_returned_leaves_it_to_the_others() -> None:
    tier = Tier()
    tier.teach()
    tier.request(chain(1, 2), NEVER)
    tier.request(chain(1, 3), FAST)
    tier.now += 2
    tier.request(chain(1, 3, 4), NEVER)
    tier.request(chain(8), FAST)
    assert tier.goes()[-1] == chain(8).blocks[0]


def test_a_shared_block_outlives_the_conversation_that_was_worth_most() -> None:
    tier = Tier()
    for talk in range(100, 180):  # tool calls return after 4 seconds, answers after 64
        tier.request(chain(talk, 1), FAST)
        tier.now += 4
        tier.request(chain(talk, 1, 2), NEVER)
        tier.now += 64
        tier.request(chain(talk, 1, 2, 3), None)
    for talk in range(200, 280):  # and tools that take longer never end
        tier.request(chain(talk, 1), FAST)
    tier.now += 500
    tier.catalogue.victims(1 << 30)
    tier.request(chain(1, 2), FAST)
    tier.request(chain(1, 3), NEVER)
    tier.request(chain(9), FAST)
    tier.now += 40
    dead = [chain(1, 2).blocks[1], chain(9).blocks[0]]
    assert tier.goes() == [*dead, *reversed(chain(1, 3).blocks)]


@pytest.mark.parametrize("tiering", [Exclusive, Inclusive])
def test_a_block_that_moved_is_worth_the_same(tiering: type[TieringPolicy]) -> None:
    now = [1000.0]
    levels = [Level("memory", 4, "returns"), Level("disk", 8, "returns")]
    tiers = TierSimulator(levels, tiering(), lambda: now[0])

    def request(one: Chain, ended: Ended) -> int:
        tiers.conversations.requested(one)
        found = sum(tiers.request(list(one.blocks)))
        tiers.conversations.ended(one, one.tokens, ended, "a")
        return found

    for talk in range(100, 160):
        request(chain(talk), FAST)
        now[0] += 4
        request(chain(talk, 2), NEVER)
        now[0] += 40
    request(chain(1, 2, 3), FAST)
    for talk in range(200, 230):
        request(chain(talk, 1), NEVER)  # it pushes the other out of memory, and not out of both
        now[0] += 0.1
    assert request(chain(1, 2, 3, 4), NEVER) == 3
    tiers.check()


class Real:
    """A real store of blocks of one page in memory, over a second memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        page = 4096
        front, below = sizes
        raw, returns = make_codec("raw", BlockShape()), POLICIES["returns"]
        options = TierOptions(policy=returns)
        spec = TierSpec("disk", MemoryBackend(below * page), raw, lambda _: None, options)
        self.store = TieredStore(MemorySpec(MemoryBackend(front * page), returns), [spec])
        self.raw = page - HEADER_BYTES

    def request(self, one: Chain, ended: Ended) -> int:
        store, blocks = self.store, list(one.blocks)
        store.conversations.requested(one)
        sizes = [self.raw] * len(blocks)
        levels = store.locate(blocks)
        count = store.read(blocks, sizes, lambda at, raw: None, levels=levels).blocks
        store.write(blocks[count:], sizes[count:], lambda at, raw: None, wait=5.0)
        store.conversations.ended(one, one.tokens, ended, "a")
        return count


def test_a_real_store_learns_it_too() -> None:
    real = Real((8, 24))
    try:
        for talk in range(100, 140):
            real.request(chain(talk), FAST)
            real.request(chain(talk, 1), NEVER)
        real.request(chain(1, 2, 3), FAST)
        for talk in range(200, 240):
            real.request(chain(talk, 1), NEVER)
        assert real.request(chain(1, 2, 3, 4), NEVER) == 3
        assert real.store.memory.stats().counters["evictions"] > 0
        waits = real.store.conversations.waits
        assert isinstance(waits, BlockWaits)
        real.store.memory.check()
        real.store.conversations.check()
    finally:
        real.store.close()


@settings(max_examples=15, deadline=None)
@patch("kvkeep.core.returns._MOST_OCTAVES", 0)  # they change for all at once; entries lag behind
@given(seed=st.integers(0, 10_000), ordered=st.sampled_from([None, 6]))
def test_the_victim_is_worth_least(seed: int, ordered: int | None) -> None:
    """For any requests: without sharing, no class has waited longer for something worth less."""
    chance, tier = random.Random(seed), Tier(ordered=ordered)
    talks = [[talk] for talk in range(8)]
    for _ in range(150):
        tier.now += chance.choice((2.0, 5.0, 60.0))
        talk = chance.choice(talks)
        if len(talk) < 6:
            talk.append(1)
        else:
            talk[:] = [chance.randrange(1 << 20)]
        ended = chance.choice((FAST, NEVER, None))
        tier.request(chain(*talk), ended)
        if len(tier.catalogue) > 14:
            policy, waits = tier.catalogue._shares.first, tier.conversations.waits
            assert waits is not None
            tier.now += 2.0  # as often as entries age
            before = {**tier.catalogue._blocks}
            (gone,) = tier.catalogue.victims(1)
            victim = before.pop(gone, None)
            if victim is None or victim.wait is None or ordered:
                continue
            worth = -1.0 if victim.wait.over else waits.worth(victim.wait)
            left = [
                one.wait for one in before.values() if not one.held and not one.pinned and one.wait
            ]
            assert len(left) == len(policy)
            oldest: dict[int, Wait] = {}
            for wait in sorted([*left, victim.wait], key=lambda wait: wait.since):
                oldest.setdefault(-1 if wait.over else wait.kind, wait)
            values = [-1.0 if wait.over else waits.worth(wait) for wait in oldest.values()]
            assert worth <= min(values, default=worth) * (1 + 1e-9)
        tier.catalogue.check()
