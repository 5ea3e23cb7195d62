"""The index of a place, beside a model that is too simple to be wrong."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc

import pytest
from index_machine import BLOCKS, SPACES, Clock, machine_of

from kvkeep.core.eviction import LRU
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.two_queues import tier_policies
from kvkeep.testing.backend_hooks import block_id

A, B = BLOCKS[:2]


# One test case a policy, whichever there are.
globals().update({f"Test_{one}": machine_of(one) for one in tier_policies()})


# --- one by one ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(tier_policies()))
def test_threads(policy: str) -> None:
    index = Index(tier_policies()[policy])
    index.set_quota(SPACES[1], 50)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(400):
                block = chance.choice(BLOCKS)
                match chance.randrange(7):
                    case 0 | 1:
                        index.add(block, chance.randint(1, 9))
                    case 2:
                        index.used(chance.sample(BLOCKS, 4))
                    case 3:
                        index.hold([block], [])
                        index.free([block])
                    case 4:
                        index.pin([block], 0.0001, 40)
                    case 5:
                        index.victims(20)
                    case _:
                        index.forget(block)
        except BaseException as error:  # noqa: BLE001 - shown below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    index.check()
    index.unpin(BLOCKS)
    index.victims(10_000)
    assert len(index) == index.total_bytes == index.pinned_bytes == 0


# --- many blocks -----------------------------------------------------------------------------


def many(count: int, first: int = 0) -> list[bytes]:
    return [block_id(number, space=1) for number in range(first, first + count)]


def test_a_clock_that_was_ahead_does_not_keep_blocks_for_ever() -> None:
    clock = Clock()
    index = Index(LRU, ttl=50.0, clock=clock)
    index.add(A, 1)
    year = 365 * 86400.0
    clock.now += year
    index.add(B, 1)
    assert index.used([B], 30.0) == []
    clock.now -= year
    assert B in index
    assert index.used([B], 30.0) == [B], "the place is told of it"
    clock.now += 51.0
    assert B not in index
    assert set(index.expired()) == {A, B}


def test_memory_of_a_block_is_small() -> None:
    """benchmarks/store_growth.py has the figure for a million."""
    index = Index(LRU, ordered=1000)
    tracemalloc.start()
    try:
        index.fill((bytes(16) + os.urandom(32), 1000, 0.0) for _ in range(30_000))
        each = tracemalloc.get_traced_memory()[0] / 30_000
    finally:
        tracemalloc.stop()
    assert each < 110 + 25  # the thousand that a policy orders take 25
