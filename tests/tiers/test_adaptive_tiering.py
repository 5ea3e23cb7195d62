"""Tiering that watches: which policy it follows on traffic whose best one is known."""

from __future__ import annotations

import random
from hashlib import blake2b
from time import thread_time
from typing import TYPE_CHECKING

import pytest
from tier_bench import Bench, get, name, put, settle

from kvkeep.core.errors import InvalidValue
from kvkeep.store.tiers import TIERINGS, AdaptiveTiering, Exclusive, Inclusive, tiering

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.tiers import TieringPolicy


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=48).digest()


def once_and_again(rng: random.Random, popular: int, share: float) -> Iterator[list[bytes]]:
    """Prompts of one block: ``share`` of them among ``popular`` ones, the others never again."""
    fresh = 1 << 20
    while True:
        fresh += 1
        yield [key(rng.randrange(popular) if rng.random() < share else fresh)]


def watched(policy: AdaptiveTiering, prompts: Iterator[list[bytes]], count: int) -> None:
    for _ in range(count):
        policy.requested(next(prompts))


def kinds(policy: TieringPolicy) -> tuple[type[TieringPolicy], int]:
    assert isinstance(policy, Inclusive | Exclusive)
    return type(policy), policy.admit_after


def test_where_room_is_tight_what_was_asked_for_once_is_not_moved_down() -> None:
    policy = AdaptiveTiering()
    policy.fit([100, 300])
    # Between two times that a popular block is asked for come 1250 that never come again.
    watched(policy, once_and_again(random.Random(1), 250, 0.2), 12_000)
    assert kinds(policy.chosen)[1] == 2
    assert not policy.admits(1, 1) or policy.demotes(0, 1) is None


def test_where_tiers_together_hold_what_is_asked_for_they_hold_it_once() -> None:
    policy = AdaptiveTiering()
    policy.fit([200, 300])
    # All in turn, and 440 fit in none of the tiers alone: the worst that least recent use can have.
    for _ in range(40):
        for number in range(440):
            policy.requested([key(number)])
    assert kinds(policy.chosen)[0] is Exclusive


def test_it_changes_with_what_is_asked() -> None:
    policy = AdaptiveTiering()
    policy.fit([100, 300])
    watched(policy, once_and_again(random.Random(2), 250, 0.2), 12_000)
    tight = kinds(policy.chosen)
    # Now each block comes twice, 350 others in between, and then never again.
    for number in range(12_000):
        policy.requested([key((1 << 30) + number)])
        policy.requested([key((1 << 30) + number - 175)])
    assert tight[1] == 2
    assert kinds(policy.chosen) == (Exclusive, 1)
    assert policy.switches >= 2


def test_a_small_advantage_is_no_reason_to_change() -> None:
    policy = AdaptiveTiering()
    policy.fit([100, 300])
    watched(policy, once_and_again(random.Random(3), 50, 0.9), 12_000)  # all fits memory
    assert policy.switches == 0


def test_it_does_as_the_one_it_follows() -> None:
    policy = AdaptiveTiering()
    policy.fit([100, 300])
    watched(policy, once_and_again(random.Random(1), 250, 0.2), 12_000)
    chosen = policy.chosen
    for level in (1, 2):
        for touches in (1, 2, 3):
            assert policy.admits(level, touches) == chosen.admits(level, touches)
            assert policy.promotes(level, touches) == chosen.promotes(level, touches)
            assert policy.demotes(level, touches) == chosen.demotes(level, touches)
        assert policy.leaves(level) == chosen.leaves(level)
    assert repr(chosen) in repr(policy)


def test_a_place_without_an_end_keeps_what_it_has() -> None:
    policy = AdaptiveTiering()
    policy.fit([200, 300, None])
    for _ in range(40):
        for number in range(440):
            policy.requested([key(number)])
    assert kinds(policy.chosen)[0] is Inclusive
    assert not policy.leaves(1)


@pytest.mark.parametrize("blocks", [[1], [1, 1], [5, None], [100_000, 1 << 30, None], [3, 2, 1]])
def test_any_sizes(blocks: list[int | None]) -> None:
    policy = AdaptiveTiering()
    for _ in range(2):
        policy.fit(blocks)
        watched(policy, once_and_again(random.Random(4), 50, 0.5), 2000)
        blocks = [None if count is None else max(1, count // 2) for count in blocks]


def test_what_it_watches_has_an_end() -> None:
    policy = AdaptiveTiering()
    policy.fit([1 << 20, 1 << 24])
    prompts = [[key(number) for number in range(at, at + 100)] for at in range(0, 20_000, 100)]
    for prompt in prompts:
        policy.requested(prompt)
    assert len(policy._touches) < 1000, "a thousandth of so many is enough"


def test_it_costs_little_beside_the_store() -> None:
    """Against `Touches` and the like, not against a clock: no more than ten dict entries."""
    prompts = [[key(number) for number in range(at, at + 50)] for at in range(0, 20_000, 50)]
    policy = AdaptiveTiering()
    policy.fit([3000, 20_000])

    def of_watching() -> float:
        begun = thread_time()
        for prompt in prompts:
            policy.requested(prompt)
        return thread_time() - begun

    def of_entries() -> float:
        begun = thread_time()
        for _ in range(10):
            entries: dict[bytes, int] = {}
            for prompt in prompts:
                for block in prompt:
                    entries[bytes(block)] = entries.get(block, 0) + 1
        return thread_time() - begun

    assert min(of_watching() for _ in range(5)) < min(of_entries() for _ in range(5))


# --- in a store ------------------------------------------------------------------------------


def test_a_store_asks_it_and_tells_it(bench: Bench) -> None:
    told: list[list[bytes]] = []
    room: list[list[int | None]] = []

    class Watching(AdaptiveTiering):
        def fit(self, blocks: object) -> None:
            assert isinstance(blocks, list)
            room.append(blocks)
            super().fit(blocks)

        def requested(self, blocks: object) -> None:
            assert isinstance(blocks, list)
            told.append(blocks)
            super().requested(blocks)

    store = bench.store(20, bench.memory(40), bench.disk(None), policy=Watching())
    put(store, range(4))
    settle(store)
    assert get(store, range(6)) == 4  # of the last two nothing is known
    put(store, range(4, 6))
    assert told == [[name(n) for n in some] for some in (range(4), range(4), range(4, 6))]
    assert room[0] == [20, 40, None]
    store.prefetch(lambda: ([name(0)], [100])).wait(10)
    assert len(told) == 3, "what is brought ahead is asked for when it is asked for"


def test_blocks_survive_its_changes(bench: Bench) -> None:
    policy = AdaptiveTiering()
    store = bench.store(16, bench.memory(48), policy=policy)
    rng = random.Random(5)
    for step in range(500):
        numbers = [rng.randrange(60)] if rng.random() < 0.3 else [1000 + step]
        count = get(store, numbers)
        put(store, numbers[count:])
        settle(store)
    assert policy.switches


# --- by name ---------------------------------------------------------------------------------


def test_tierings_have_names() -> None:
    assert [repr(tiering(one)) for one in TIERINGS] == [
        "Inclusive(admit_after=1)",
        "Inclusive(admit_after=2)",
        "Exclusive(admit_after=1)",
        "Exclusive(admit_after=2)",
        "AdaptiveTiering(), Exclusive(admit_after=1) at present",
        "ValuedTiering(), price 0 at present",
    ]
    assert repr(tiering("inclusive:7")) == "Inclusive(admit_after=7)"
    assert tiering("adaptive") is not tiering("adaptive")


@pytest.mark.parametrize("wrong", ["", "best", "adaptive:2", "inclusive:", "inclusive:0", "x:1"])
def test_other_names_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidValue, match=r"no tiering .*adaptive"):
        tiering(wrong)
