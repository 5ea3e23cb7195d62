"""The catalogue of a tier, beside a model that is too simple to be wrong."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from catalogue_machine import BLOCKS, SPACES, Clock, machine_of

from kvkeep.core.eviction import LRU
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.packed import Packed
from kvkeep.store.tiers.two_queues import tier_policies
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Sequence

A, B, C, D, E = BLOCKS[:5]  # one space
X, Y = BLOCKS[5:7]  # another


# One test case a policy, whichever there are.
globals().update({f"Test_{one}": machine_of(one) for one in tier_policies()})


# --- 2Q ------------------------------------------------------------------------------------------

LONG = [block_id(number, 0) for number in range(3000)]


def arrives(catalogue: Catalogue, blocks: Sequence[bytes], budget: int) -> int:
    """A prompt: what is there is used, the rest is added; how many were there."""
    found = catalogue.leading(blocks)
    for block in blocks[found:]:
        short = catalogue.total_bytes + 10 - budget
        if short > 0:
            catalogue.victims(short)
        catalogue.add(block, 10)
    catalogue.used(blocks, new=set(blocks[found:]))
    return found


def test_2q_spares_what_was_asked_for_again_from_a_scan() -> None:
    kept: dict[str, int] = {}
    for policy in ("lru", "2q"):
        catalogue = Catalogue(tier_policies()[policy], budget=1000)
        for _ in range(3):
            for block in LONG[:50]:
                arrives(catalogue, [block], 1000)
        for block in LONG[100:300]:
            arrives(catalogue, [block], 1000)
        kept[policy] = catalogue.leading(LONG[:50])
    assert kept == {"lru": 0, "2q": 50}


# --- one by one ------------------------------------------------------------------------------


def filled(*blocks: bytes, policy: str = "lru", clock: Clock | None = None) -> Catalogue:
    catalogue = Catalogue(tier_policies()[policy], clock=clock or Clock())
    for block in blocks:
        catalogue.add(block, 10)
    return catalogue


def test_the_end_of_a_prompt_goes_first() -> None:
    catalogue = filled(A, B, C)
    catalogue.used([A, B, C])
    assert catalogue.victims(20) == [C, B]


def test_the_oldest_goes_whoever_has_a_quota() -> None:
    catalogue = filled(A, X, B, Y)
    catalogue.set_quota(SPACES[0], 1000)
    assert [catalogue.victims(1)[0] for _ in range(4)] == [A, X, B, Y]


def test_others_keep_a_block_young() -> None:
    clock = Clock()
    catalogue = Catalogue(LRU, ttl=100, clock=clock)
    catalogue.add(A, 1)
    clock.now += 90
    catalogue.fill([(A, 1, clock.now)])
    clock.now += 90
    assert A in catalogue
    assert catalogue.expired() == []
    assert catalogue.unnoted() == [], "the place knows it"


@pytest.mark.parametrize("policy", sorted(tier_policies()))
def test_threads(policy: str) -> None:
    catalogue = Catalogue(tier_policies()[policy])
    catalogue.set_quota(SPACES[1], 50)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(400):
                block = chance.choice(BLOCKS)
                match chance.randrange(7):
                    case 0 | 1:
                        catalogue.add(block, chance.randint(1, 9))
                    case 2:
                        catalogue.used(chance.sample(BLOCKS, 4))
                    case 3:
                        catalogue.holds.hold(block)
                        catalogue.holds.free(block)
                    case 4:
                        catalogue.pin([block], 0.0001, 40)
                    case 5:
                        catalogue.victims(20)
                    case _:
                        catalogue.forget(block)
        except BaseException as error:  # noqa: BLE001 - shown below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    catalogue.check()
    catalogue.unpin(BLOCKS)
    catalogue.victims(10_000)
    assert len(catalogue) == catalogue.total_bytes == catalogue.pinned_bytes == 0


# --- many blocks -----------------------------------------------------------------------------


def many(count: int, first: int = 0) -> list[bytes]:
    return [block_id(number, space=1) for number in range(first, first + count)]


@pytest.mark.parametrize("ordered", [None, 1, 50])
def test_the_order_is_the_same_with_a_bound(ordered: int | None) -> None:
    """A listing, then adds and uses by chance: what goes is what would go without rows."""
    chance, clock = random.Random(5), Clock()
    plain = Catalogue(LRU, clock=clock)
    bounded = Catalogue(LRU, clock=clock, ordered=ordered)
    blocks = many(400)
    listed = [(block, 10, chance.uniform(0, 900)) for block in blocks[:200]]
    for catalogue in (plain, bounded):
        assert catalogue.fill(iter(listed)) == []
    for _ in range(300):
        clock.now += 1
        some = chance.sample(blocks, 3)
        victims = chance.choice([0, 0, 35])
        for catalogue in (plain, bounded):
            catalogue.used(some)
            catalogue.add(some[0], 10)
        assert plain.victims(victims) == bounded.victims(victims)
        assert len(plain) == len(bounded)
        assert set(plain.blocks()) == set(bounded.blocks())
    bounded.check()
    if ordered is not None:
        assert len(bounded._table.blocks) <= ordered
    assert sorted(plain.victims(10**6)) == sorted(bounded.victims(10**6))


def test_a_clock_that_was_ahead_does_not_keep_blocks_for_ever() -> None:
    clock = Clock()
    catalogue = Catalogue(LRU, ttl=50.0, clock=clock)
    catalogue.add(A, 1)
    year = 365 * 86400.0
    clock.now += year
    catalogue.add(B, 1)
    assert catalogue.used([B], 30.0) == []
    clock.now -= year
    assert B in catalogue
    assert catalogue.used([B], 30.0) == [B], "the place is told of it"
    clock.now += 51.0
    assert B not in catalogue
    assert set(catalogue.expired()) == {A, B}


def test_memory_of_a_block_is_small() -> None:
    """benchmarks/store_growth.py has the figure for a million."""
    catalogue = Catalogue(LRU, ordered=1000)
    catalogue._table.packed = Packed(
        catalogue._table.order.group_of, buckets=2048
    )  # as full as with a million
    tracemalloc.start()
    try:
        catalogue.fill((bytes(16) + os.urandom(32), 1000, 0.0) for _ in range(30_000))
        each = tracemalloc.get_traced_memory()[0] / 30_000
    finally:
        tracemalloc.stop()
    assert each < 150
