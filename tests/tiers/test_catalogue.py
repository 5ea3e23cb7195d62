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
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.packed import Packed
from kvkeep.store.tiers.two_queues import TwoQ, tier_policies
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def test_what_comes_back_after_it_went_is_known() -> None:
    catalogue = Catalogue(tier_policies()["2q"], budget=1000)
    catalogue.add(LONG[199], 10)  # the first one says how large blocks are
    for block in [*LONG[:30], *LONG[200:400]]:
        arrives(catalogue, [block], 1000)
    assert catalogue.leading(LONG[:30]) == 0, "they were asked for once, and went"
    for block in [*LONG[:30], *LONG[400:600]]:
        arrives(catalogue, [block], 1000)
    assert catalogue.leading(LONG[:30]) == 30


def test_2q_forgets_the_ids_of_long_ago() -> None:
    catalogue = Catalogue(TwoQ, budget=1000)
    for block in (*LONG, *LONG):  # each returns after 30 times the memory
        assert arrives(catalogue, [block], 1000) == 0
    assert len(catalogue._table.order.shared._ghosts) == 400  # type: ignore[attr-defined]


def test_what_was_just_put_was_not_asked_for_again() -> None:
    catalogue = filled(A, policy="2q")
    catalogue.used([A])
    for block in (B, C):
        catalogue.add(block, 10)
    catalogue.used([B, C], new={B, C})
    assert catalogue.victims(30) == [C, B, A], "what was asked for once outlives newer ones"


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


def test_recency_outlives_a_quota_that_comes_later() -> None:
    """As it is with a disk tier: it is listed first, and then its quotas are set."""
    catalogue = filled(A, B, C, X)
    catalogue.used([A])
    catalogue.set_quota(SPACES[0], 1000)
    catalogue.add(D, 10)
    catalogue.used([B])
    assert catalogue.victims(100, SPACES[0]) == [C, A, D, B]
    assert catalogue.victims(100) == [X]


def test_2q_keeps_its_counts_when_a_quota_comes_later() -> None:
    catalogue = filled(A, B, C, policy="2q")
    catalogue.used([A])
    catalogue.set_quota(SPACES[0], 1000)
    assert catalogue.victims(100, SPACES[0]) == [B, C, A]


def test_the_oldest_goes_whoever_has_a_quota() -> None:
    catalogue = filled(A, X, B, Y)
    catalogue.set_quota(SPACES[0], 1000)
    assert [catalogue.victims(1)[0] for _ in range(4)] == [A, X, B, Y]


def test_a_block_named_twice_is_unpinned_once() -> None:
    catalogue = filled(A, B)
    assert catalogue.pin([A, A, B], 10, 100) == [A, A, B]
    assert catalogue.pinned_bytes == 20
    assert catalogue.unpin([A, A]) == [A]
    assert catalogue.pinned_bytes == 10
    catalogue.check()


def test_what_is_not_there_does_not_end_a_pin() -> None:
    assert filled(B, C).pin([A, B, C], 10, 100) == [B, C]


def test_a_pin_ends_and_can_be_made_longer() -> None:
    clock = Clock()
    catalogue = filled(A, B, clock=clock)
    catalogue.pin([A, B], 10, 100)
    catalogue.pin([A], 30, 100)
    catalogue.pin([A], 5, 100)  # not shorter
    clock.now += 11
    assert catalogue.victims(100) == [B]
    clock.now += 20
    assert catalogue.victims(100) == [A]


def test_pins_that_are_made_longer_again_and_again_do_not_pile_up() -> None:
    clock = Clock()
    catalogue = filled(A, B, clock=clock)
    for _ in range(5000):
        clock.now += 0.001
        catalogue.pin([A], 100, 100)
        catalogue.pin([B], 50, 100)
        catalogue.unpin([B])
    assert len(catalogue._table.pins) <= 2048
    catalogue.pin([B], 50, 100)
    clock.now += 51
    assert catalogue.victims(100) == [B]
    clock.now += 50
    assert catalogue.victims(100) == [A]


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


def test_a_use_is_told_once_in_a_while() -> None:
    clock = Clock()
    catalogue = filled(A, B, clock=clock)
    clock.now += 20
    assert catalogue.used([A, B]) == []
    assert catalogue.unnoted() == [(B, clock.now), (A, clock.now)]
    assert catalogue.unnoted() == []
    clock.now += 30
    assert catalogue.used([A, B]) == [B, A]
    assert catalogue.unnoted() == []


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


def test_blocks_are_known_and_may_go_while_a_listing_goes_on() -> None:
    catalogue = Catalogue(LRU, ordered=100)
    seen: list[int] = []

    def listing() -> Iterable[tuple[bytes, int, float]]:
        for number, block in enumerate(many(5000)):
            if number == 3000:
                seen.append(len(catalogue))
                catalogue.add(E, 7)
                seen.extend(len(block) for block in catalogue.victims(3))
                assert E in catalogue
            yield block, 1, 5000.0 - number

    assert catalogue.fill(listing()) == [], "what is added while it is listed is not forgotten"
    assert seen == [2048, 48, 48, 48]
    catalogue.check()
    assert len(catalogue) == 4998
    assert catalogue.victims(2) == many(5000)[:-3:-1], "by last use, whatever the listing's order"


@pytest.mark.parametrize("ordered", [None, 1])
def test_what_goes_while_a_listing_goes_on_stays_away(ordered: int | None) -> None:
    """The listing saw it before: a put of it would be skipped, as if it were there."""
    catalogue = Catalogue(LRU, ordered=ordered)
    catalogue.fill([(A, 1, 1.0), (B, 1, 2.0), (C, 1, 3.0), (D, 1, 4.0)])

    def listing() -> Iterable[tuple[bytes, int, float]]:
        for block in (A, B, C, D, E):  # all in one chunk
            yield block, 1, 1.0
        assert catalogue.forget(B)
        assert not catalogue.forget(E), "not known yet"
        gone.extend(catalogue.victims(1))
        catalogue.forget(C)
        catalogue.add(C, 7)  # written anew

    gone: list[bytes] = []
    assert catalogue.fill(listing()) == []
    assert len(gone) == 1
    assert set(catalogue.blocks()) == {A, C, D} - set(gone) | {C}
    catalogue.check()
    assert catalogue.fill([(B, 1, 1.0), (C, 7, 1.0)]) == [b for b in (A, D) if b not in gone]
    assert B in catalogue, "the next listing sees what is there"


def test_a_listing_that_fails_is_kept_as_far_as_it_came() -> None:
    catalogue = Catalogue(LRU, ordered=10)
    catalogue.fill([(block, 1, 1.0) for block in many(50)])

    def broken() -> Iterable[tuple[bytes, int, float]]:
        yield from ((block, 1, 2.0) for block in many(2048, 100))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        catalogue.fill(broken())
    catalogue.check()
    assert set(many(50)) < set(catalogue.blocks()), "nothing is forgotten"
    assert len(catalogue) == 50 + 2048
    assert len(catalogue.fill([])) == 50 + 2048
    assert len(catalogue) == catalogue.total_bytes == 0


def test_quotas_come_late() -> None:
    catalogue = Catalogue(LRU, ordered=4)
    own, others = many(60), [block_id(number, space=2) for number in range(60)]
    catalogue.fill([(block, 1, float(at)) for at, block in enumerate([*own, *others])])
    catalogue.set_quota(own[0][:SPACE_BYTES], 50)
    assert catalogue.over_quota(own[0][:SPACE_BYTES], 0) == 10
    assert catalogue.victims(10, own[0][:SPACE_BYTES]) == own[:10]
    assert catalogue.victims(50) == own[10:], "the oldest of all"
    assert catalogue.victims(60) == others
    catalogue.check()


def test_rows_outlive_their_time() -> None:
    clock = Clock()
    catalogue = Catalogue(LRU, ordered=5, ttl=10.0, clock=clock)
    catalogue.fill([(block, 1, 900.0 + at) for at, block in enumerate(many(100))])
    assert sum(block in catalogue for block in many(100)) == 10
    assert catalogue.has_expired(many(1)[0])
    assert catalogue.expired_at(many(1)[0]) == 910.0
    gone: list[bytes] = []
    while old := catalogue.expired(7):
        assert len(old) <= 7
        gone += old
    assert sorted(gone) == sorted(many(90))
    catalogue.check()


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


def test_what_cannot_suffice_is_said() -> None:
    catalogue = Catalogue(LRU, unit=4096)
    for block in (A, B):
        catalogue.add(block, 100)
    assert catalogue.may_free(2 * 4096)
    assert not catalogue.may_free(2 * 4096 + 1)
    assert catalogue.victims(4096) == [A], "it takes a whole unit"
    catalogue.pin([B], 60.0, 1000)
    assert not catalogue.may_free(4097)


def test_how_many_fit() -> None:
    catalogue = Catalogue(LRU, budget=10 * 4096, unit=4096)
    assert catalogue.fits(A[:16]) is None, "nothing is here to judge by"
    catalogue.add(A, 100)
    catalogue.add(B, 5000)
    assert catalogue.fits(A[:16]) == 6, "each takes a unit and a half"
    catalogue.set_quota(A[:16], 7700)
    assert catalogue.fits(A[:16]) == 3
    assert catalogue.fits(bytes([9]) * 16) == 6
