"""A prompt does not push its own beginning out of a tier, without which the rest is not found."""

from __future__ import annotations

import threading
import time

import pytest
from tier_bench import PAGE, RAW, Bench, content, get, name, put, save, settle, there, until

from kvkeep.core.eviction import LRU
from kvkeep.store.tiers import Exclusive, Inclusive, Tier, TieredStore
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.prompt_writes import TierWrites
from kvkeep.store.tiers.states import BlockStates, Operation
from kvkeep.store.tiers.tier_room import TierRoom


def written_one_by_one(store: TieredStore, tier: Tier, numbers: range) -> None:
    """Put a prompt so slowly that each block is written before the next one comes."""
    blocks = [name(number) for number in numbers]

    def fill(at: int, raw: memoryview) -> None:
        assert tier.writing.wait(10)
        raw[:] = content(blocks[at])

    store.write(blocks, [RAW] * len(blocks), fill, wait=20)
    settle(store)


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_it_had_from_before_stays_for_what_is_new(bench: Bench, in_memory: bool) -> None:
    place = bench.disk(8)
    tier = bench.spec(place)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(4), wait=20)
    put(store, range(20, 24), wait=20)  # used later than 0 to 3
    if not in_memory:
        store.memory.remove([name(number) for number in range(4)])
    written_one_by_one(store, tier, range(8))
    assert there(tier) == list(range(8)), "others went for it"
    assert tier.counters.evictions == 4


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("known", [0, 3])
def test_one_that_is_too_long_keeps_its_beginning(bench: Bench, writers: int, known: int) -> None:
    tier = bench.spec(bench.disk(8), writers=writers)
    store = bench.store(32, tier)
    tier = store.tiers[0]
    put(store, range(known), wait=20)
    put(store, range(20, 24), wait=20)
    put(store, range(16), wait=20)
    settle(store)
    assert there(tier) == list(range(8))
    assert tier.counters.drops + tier.counters.evictions == 8 + 4, "of the rest, and of the others"
    store.memory.remove([name(number) for number in range(16)])
    assert get(store, range(16)) == 8
    put(store, range(30, 34), wait=20)
    settle(store)
    assert [number for number in there(tier) if number >= 30] == list(range(30, 34)), (
        "it stays for no longer than until it was written"
    )


@pytest.mark.parametrize("quota", [False, True])
def test_a_later_block_does_not_take_the_room_of_an_earlier_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, quota: bool
) -> None:
    """One writer is so slow with the first block that the other fills the tier."""
    tier = bench.spec(bench.disk(64 if quota else 8), writers=2)
    store = bench.store(32, tier)
    tier = store.tiers[0]
    if quota:
        tier.catalogue.set_quota(name(0)[:16], 8 * PAGE)
    store_in = Tier._store

    def stalled(self: Tier, block: bytes, *args: object, **more: object) -> str:
        if block == name(0):
            until(lambda: len(there(self)) == 8)
        return store_in(self, block, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Tier, "_store", stalled)
    put(store, range(12), wait=20)
    settle(store)
    assert there(tier) == list(range(8))
    assert get(store, range(12)) == 12
    lost = [store.losses.of(name(number)) for number in range(12)]
    assert [loss is not None for loss in lost] == [False] * 8 + [True] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_quota_of_one_block_is_for_the_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The second block has the quota, written or not, when the first one comes."""
    place = bench.disk(8)
    store = bench.store(32, bench.spec(place, writers=2))
    tier = store.tiers[0]
    tier.catalogue.set_quota(name(0)[:16], PAGE)
    reserve, attempt, end = TierRoom.reserve, Tier._attempt, BlockStates.end
    make_room = TierWrites.make_room
    second, refused = threading.Event(), threading.Event()

    def reserved(self: TierRoom, block: bytes, size: int, prompt: TierWrites | None) -> bool:
        assert block == name(1) or second.wait(10)
        return reserve(self, block, size, prompt)

    def noted(self: TierWrites, block: bytes, needed: int) -> bool:
        refused.set()
        return make_room(self, block, needed)

    def attempted(self: Tier, block: bytes, encoded: memoryview) -> tuple[str, int]:
        if block == name(1) and fails:
            second.set()
            assert refused.wait(10)
            return "write failed", 0
        return attempt(self, block, encoded)

    def ended(self: BlockStates, operation: Operation, **result: bool) -> None:
        if operation.block == name(1):
            second.set()
            refused.wait(10)
            time.sleep(0.05)
        end(self, operation, **result)

    monkeypatch.setattr(TierRoom, "reserve", reserved)
    monkeypatch.setattr(Tier, "_attempt", attempted)
    monkeypatch.setattr(TierWrites, "make_room", noted)
    monkeypatch.setattr(BlockStates, "end", ended)
    put(store, range(2), wait=20)
    settle(store)
    assert there(tier) == [0]
    assert tier.known([name(0)])


def test_a_block_that_is_written_is_no_victim(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was added to the catalogue, and its write is not over: no record is forgotten."""
    store = bench.store(4, bench.disk(8), policy=Exclusive())
    tier, end = store.tiers[0], BlockStates.end

    def ended(self: BlockStates, operation: Operation, **result: bool) -> None:
        if operation.block == name(0):
            assert not self.victims(PAGE)
        end(self, operation, **result)

    monkeypatch.setattr(BlockStates, "end", ended)
    for number in range(6):
        put(store, [number], wait=20)
    settle(store)
    assert there(tier)[0] == 0
    assert {name(number) for number in there(tier)} == {*tier.catalogue.blocks()}


def test_a_hold_outlives_the_record_that_was_held() -> None:
    index = Index(LRU)
    index.add(name(0), PAGE)
    held: list[bytes] = []
    index.hold([name(0)], held)
    index.forget(name(0))
    index.hold_ahead([name(0)])
    index.add(name(0), PAGE)
    index.free(held)
    assert not index.victims(PAGE), "the second hold goes on"
    index.free([name(0)])
    assert index.victims(PAGE) == [name(0)]
    index.check()


def test_a_later_block_that_others_need_stays(bench: Bench) -> None:
    tier = bench.tier(bench.disk(8))
    record = memoryview(bytearray(PAGE))
    for number in range(4):
        assert not save(tier, number, record)
    catalogue = tier.catalogue
    catalogue.hold([name(number) for number in (0, 1, 1, 2, 3)], [])
    assert catalogue.pin([name(3)], 60, 8 * PAGE)
    blocks = [name(number) for number in range(4, -1, -1)]
    assert catalogue.give_up(blocks, 3 * PAGE) == [], "too few to be of use"
    assert catalogue.give_up(blocks, PAGE - 1) == [name(2)]
    assert sorted(catalogue.blocks()) == [name(0), name(1), name(3)]
    catalogue.check()


def test_what_a_read_writes_pushes_out_nothing_of_it(bench: Bench) -> None:
    """A tier that takes blocks at their second use gets the rest of a prompt."""
    small, large = bench.disk(8), bench.disk(64, at="large")
    store = bench.store(32, bench.spec(small, writers=1), large, policy=Inclusive(admit_after=2))
    tiers = store.tiers
    for _ in range(2):
        put(store, range(4), wait=20)
    for _ in range(2):
        put(store, range(20, 24), wait=20)
    settle(store)
    put(store, range(12), wait=20)
    assert get(store, range(12)) == 12
    settle(store)
    assert there(tiers[0]) == list(range(8))


def test_a_place_that_fails_lets_go(bench: Bench) -> None:
    place = bench.disk(8)
    tier = bench.spec(place)
    store = bench.store(16, tier)
    tier = store.tiers[0]
    put(store, range(4), wait=20)
    place.fail("put", times=1)
    put(store, range(8), wait=20)
    settle(store)
    place.heal()
    put(store, range(30, 38), wait=20)
    settle(store)
    assert there(tier) == list(range(30, 38))


def test_what_is_behind_a_block_without_room_was_dropped_for_that(bench: Bench) -> None:
    tier = bench.spec(bench.disk(4), writers=1)
    store = bench.store(32, tier)
    tier = store.tiers[0]
    written_one_by_one(store, tier, range(8))
    assert there(tier) == list(range(4))
    for number in range(4, 8):
        loss = store.losses.of(name(number))
        assert loss is not None
        assert (loss.tier, loss.what, loss.detail) == (tier.name, "dropped", "no room")


@pytest.mark.parametrize("quota", [False, True])
def test_an_end_does_not_keep_out_its_beginning(bench: Bench, quota: bool) -> None:
    """The beginning could not be written; the next put repairs that, where there is little room."""
    place = bench.disk(64 if quota else 8)
    tier = bench.spec(place, writers=1)
    store = bench.store(32, tier)
    tier = store.tiers[0]
    if quota:
        tier.catalogue.set_quota(name(0)[:16], 8 * PAGE)
    place.fail("put", times=2)
    put(store, range(12), wait=20)
    settle(store)
    assert there(tier) == list(range(2, 10))
    place.heal()
    put(store, range(12), wait=20)
    settle(store)
    assert there(tier) == list(range(8))


def test_a_block_that_is_being_written_is_not_given_up() -> None:
    """It was added to the catalogue just now; nobody would delete its record."""
    catalogue = Index(LRU, budget=8 * PAGE)
    states = BlockStates(catalogue)
    catalogue.hold_ahead([name(0), name(1)])
    (operation,) = states.queue([name(0)], lambda _block, _saved: None, held=True)
    assert states.start(operation)
    for number in range(2):
        catalogue.add(name(number), PAGE)
    with states.victims(PAGE, of=[name(0), name(1)]) as victims:
        assert victims.blocks == [name(1)]
    states.end(operation, saved=True)
    assert catalogue.blocks() == [name(0)]
    catalogue.free([name(0)])
    catalogue.check()
