"""Policies that learn, in made-up workloads where it is known what does best."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import PagedCache
from kvkeep.core.eviction import ARC, LRU, S3FIFO, Adaptive, Entry, EvictionPolicy, Reuse, TwoQ
from kvkeep.core.eviction.arc import Directory
from kvkeep.core.eviction.depths import CLASSES, Depths, chances_by_class, class_of
from kvkeep.core.eviction.reuse import Hazards, bucket_of
from kvkeep.core.eviction.s3fifo import Ghost
from kvkeep.core.eviction.trials import Asked, KeyLists, KeyTrial
from kvkeep.testing.policy_suite import drain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MEMORY = 120


def scan_and_hot_set(asked: int, hot: int = 100, seed: int = 5) -> Iterable[int]:
    """Three of ten are of a hot set that comes round too rarely for LRU; the others come once."""
    chance = random.Random(seed)
    for turn in range(asked):
        yield chance.randrange(hot) if chance.random() < 0.3 else 10_000 + turn


def twice_and_never_again(asked: int) -> Iterable[int]:
    """All comes back once, just within what LRU keeps; and then never."""
    for turn in range(asked // 2):
        yield 50_000 + turn
        yield 50_000 + turn - MEMORY // 2 + 10


def serve(cache: PagedCache, blocks: Iterable[int]) -> float:
    """The share of one-block prompts that were cached."""
    hits = count = 0
    for number in blocks:
        # Two tokens a page, and one more that is always left to compute.
        with cache.open(np.array([number, number, 0], np.int32)) as sequence:
            sequence.copies()
            hits += sequence.num_cached // 2
            count += 1
            sequence.publish(2)
    return hits / count


def cached(policy: EvictionPolicy) -> PagedCache:
    return PagedCache(MEMORY, 2, eviction=policy, block_pages=1)


def test_the_workloads_are_what_they_say() -> None:
    assert serve(cached(LRU()), scan_and_hot_set(2000)) < 0.12
    assert serve(cached(TwoQ()), scan_and_hot_set(2000)) > 0.2
    assert serve(cached(LRU()), twice_and_never_again(2000)) > 0.44
    assert serve(cached(TwoQ()), twice_and_never_again(2000)) < 0.05


@pytest.mark.parametrize("make", [Adaptive, Reuse])
def test_they_do_as_well_as_the_best(make: Callable[[], EvictionPolicy]) -> None:
    """In each workload, once they have found out which it is; the other misleads them first."""
    cache = cached(make())
    serve(cache, scan_and_hot_set(2000))
    assert serve(cache, scan_and_hot_set(1500, seed=6)) > 0.22
    serve(cache, twice_and_never_again(2000))
    assert serve(cache, twice_and_never_again(1500)) > 0.40
    cache.check()


def test_adaptive_follows_the_best_candidate() -> None:
    policy = Adaptive()
    cache = cached(policy)
    assert policy.chosen == "reuse", "until it knows better"
    serve(cache, scan_and_hot_set(1000))
    assert policy.chosen not in {"lru", "returns"}
    serve(cache, twice_and_never_again(3000))
    assert policy.chosen not in {"2q with 1% on probation", "2q with 10% on probation"}
    serve(cache, scan_and_hot_set(6000))
    assert policy.chosen != "lru"
    best = max(candidate.hits for candidate in policy.candidates)
    assert next(one.hits for one in policy.candidates if one.name == policy.chosen) == best


@pytest.mark.parametrize("probation", [0.0, 0.3, 0.7, None])
@settings(max_examples=100, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 14), st.booleans()), max_size=80))
def test_a_candidate_is_2q_over_keys(
    probation: float | None, asked: list[tuple[int, bool]]
) -> None:
    """``known`` says that it was asked for before, and went; without probation it is LRU."""
    trial = KeyLists(probation, 10)
    most = 10 if probation is None else int(10 * probation)
    once: list[int] = []  # oldest first
    again: list[int] = []
    for number, known in asked:
        held = number in once or number in again
        assert trial.requested([Asked(bytes([number]), known, 0)]) == held
        reused = held or known or probation is None
        once = [other for other in once if other != number]
        again = [other for other in again if other != number]
        (again if reused else once).append(number)
        if len(once) + len(again) > 10:
            (once if len(once) > most or not again else again).pop(0)


@settings(max_examples=100, deadline=None)
@given(asked=st.lists(st.integers(0, 14), max_size=80))
def test_a_trial_of_any_policy_holds_as_many_keys(asked: list[int]) -> None:
    """With LRU as the policy it is the LRU of the lists."""
    trial, lists = KeyTrial(LRU(), 10), KeyLists(None, 10)
    for turn, number in enumerate(asked):
        trial.policy._time = turn
        block = Asked(bytes([number]), False, 0)
        assert trial.requested([block]) == lists.requested([block])
        assert len(trial._kept) <= 10


def test_adaptive_watches_a_sample_of_a_large_memory() -> None:
    policy = Adaptive()
    policy.fit(100_000, 1)
    chance = random.Random(1)
    keys = [chance.randbytes(32) for _ in range(5000)]
    policy.requested(keys)
    trials = [one.trial for one in policy.candidates if isinstance(one.trial, KeyTrial)]
    watched = len(trials[0]._kept)
    assert 400 < watched < 600, "a tenth of them"
    assert len(trials[1]._kept) == watched
    assert not any(candidate.hits for candidate in policy.candidates)
    policy.requested(keys)
    assert [candidate.hits for candidate in policy.candidates] == [watched] * 8


# --- chances by hits and depth -------------------------------------------------------------------


def held_entry(policy: Depths, hits: int, depth: int, used: int, size: int = 1) -> Entry:
    entry = Entry()
    entry.size, entry.depth, entry.hits, entry.last_used = size, depth, hits, used
    policy.add(entry)
    return entry


def test_classes_are_by_hits_and_then_by_depth() -> None:
    depths = (0, 3, 4, 16, 64, 256, 10_000)
    classes = [[class_of(hits, depth) for depth in depths] for hits in (0, 1, 3, 9)]
    assert classes[0] == [0, 0, 1, 2, 3, 4, 4]
    assert classes[1] == [5, 5, 6, 7, 8, 9, 9]
    assert classes[2] == classes[3]
    assert classes[3][-1] == CLASSES - 1


def test_with_equal_chances_it_is_lru() -> None:
    policy = Depths()
    policy.chances = [[1 / (1 + bucket) for bucket in range(23)]] * CLASSES
    chance = random.Random(3)
    used = chance.sample(range(100_000), 300)
    entries = [
        held_entry(policy, chance.randrange(4), chance.randrange(500), when) for when in used
    ]
    policy.at(100_000)
    for entry in entries[::7]:
        policy.discard(entry)
        entry.hits += 1
        policy.add(entry)
    ages = [entry.last_used for entry in drain(policy)]
    late = sum(one > other for one, other in pairwise(ages))
    assert sorted(ages) == sorted(used)
    assert late < 30, "the order is that of use, but for a class that stays chosen for a while"


def test_the_tail_of_a_run_goes_first() -> None:
    policy = Depths()
    policy.fit(1000, 2)
    entry = held_entry(policy, 0, 6, 0, size=40)  # blocks 3 to 22, classes from block 4 and 16 on
    assert policy.pop() is entry
    parts = []
    while entry.size:
        parts.append(policy.portion(entry))
        entry.size -= parts[-1]
    assert parts == [14, 24, 2]


def test_blocks_that_return_together_are_one_observation() -> None:
    """A class departs from the others by evidence of many prompts, not of many blocks."""

    def ratio(together: float) -> float:
        hazards = Hazards(CLASSES)
        for row, returns in ((0, 200), (1, 20)):
            for number in range(400):
                hazards.ended(100, row, reused=number < returns)
        table = chances_by_class(hazards, 100.0, together)
        assert all(line == sorted(line, reverse=True) for line in table), "they only fall with age"
        return table[0][2] / table[1][2]

    assert ratio(1.0) > 3
    assert 1 < ratio(500.0) < 1.5


def fronts_return(asked: int, seed: int = 5) -> Iterable[list[int]]:
    """Prompts of eight blocks: a popular front of two, and an end that never comes again."""
    chance = random.Random(seed)
    for turn in range(asked):
        front = min(200, int(chance.paretovariate(0.4)))
        yield [front * 2, front * 2 + 1, *range(10_000 + 30 * turn, 10_006 + 30 * turn)]


def test_depth_shows_what_returns() -> None:
    """Of prompts that come once so far, the fronts are kept: LRU and hits cannot tell them."""

    def rate(policy: EvictionPolicy) -> float:
        cache = PagedCache(MEMORY, 2, eviction=policy, block_pages=1)
        hits = 0
        for blocks in fronts_return(1500):
            with cache.open(np.array([*np.repeat(blocks, 2), 0], np.int32)) as sequence:
                sequence.copies()
                hits += sequence.num_cached // 2
                sequence.publish(16)
        cache.check()
        return hits / 1500

    assert rate(Adaptive()) > 1.05 * rate(LRU())


# --- one block a prompt: there is no tree, and the algorithms are the papers' --------------------


@pytest.mark.parametrize(
    ("policy", "paper"),
    [(ARC(), Directory(MEMORY)), (S3FIFO(), Ghost(MEMORY, 0.1, 2))],
    ids=["arc", "s3fifo"],
)
@pytest.mark.parametrize("hot", [100, 300])
def test_single_blocks_hit_as_in_the_paper(
    policy: EvictionPolicy, paper: Directory | Ghost, hot: int
) -> None:
    cache = PagedCache(MEMORY + 1, 2, eviction=type(policy)(), block_pages=1)
    paper = Directory(MEMORY) if isinstance(paper, Directory) else Ghost(MEMORY, 0.1, 2)
    asked = [*scan_and_hot_set(1500, hot), *twice_and_never_again(1000)]
    asked += scan_and_hot_set(1500, hot, seed=7)
    expected = sum(paper.requested(number.to_bytes(4, "big")) for number in asked) / len(asked)
    assert serve(cache, asked) == pytest.approx(expected, abs=0.01)


# --- what is counted -----------------------------------------------------------------------------


def test_ages_fall_into_powers_of_two() -> None:
    assert [bucket_of(age) for age in (0, 31, 32, 63, 64, 127, 128)] == [0, 0, 1, 1, 2, 2, 3]
    assert bucket_of(1 << 60) == bucket_of(1 << 59)


def test_rates_are_reuses_over_the_time_watched() -> None:
    """Against a table that looks at every event of every life."""
    chance = random.Random(8)
    hazards = Hazards()
    lives = [(int(chance.expovariate(1 / 300)), chance.random() < 0.6) for _ in range(3000)]
    watched: dict[int, int] = {}
    came: dict[int, int] = {}
    for age, reused in lives:
        hazards.ended(age, 2, reused=reused)
        for event in range(age):
            watched[bucket_of(event)] = watched.get(bucket_of(event), 0) + 1
        if reused:
            came[bucket_of(age)] = came.get(bucket_of(age), 0) + 1
    rates = hazards.rates(2)
    for bucket in range(5):
        assert rates[bucket] == pytest.approx(came[bucket] / watched[bucket], rel=0.2)
    chances = hazards.chances(2, 100.0)
    assert chances[1] == pytest.approx(1 - 2.718281828 ** (-100 * 0.6 / 300), rel=0.2)


def test_what_was_never_seen_is_hits_over_age() -> None:
    hazards = Hazards()
    rates = [hazards.rates(hits) for hits in range(4)]
    for hits in range(4):
        assert rates[hits] == sorted(rates[hits], reverse=True), "what is older comes more rarely"
    for bucket in range(10):
        column = [row[bucket] for row in rates]
        assert column == sorted(column), "what was asked for often comes more often"


def test_what_was_seen_fades() -> None:
    hazards = Hazards()
    for _ in range(100):
        hazards.ended(10, 0, reused=True)
    before = hazards.rates(0)[0]
    copied = hazards.copy()
    for _ in range(20):
        hazards.fade(0.5)
    assert hazards.rates(0)[0] < before / 2
    assert copied.rates(0)[0] == before


def test_victims_are_the_oldest_of_the_likeliest_to_stay_away() -> None:
    """Whatever was learned: none in an earlier queue is passed over, none older in its own."""
    policy = Reuse()
    policy.fit(MEMORY, 1)
    for number in scan_and_hot_set(1500):
        policy.requested([number.to_bytes(32, "big")])
    chance = random.Random(2)
    entries = []
    for number in range(400):
        entry = Entry()
        entry.size = 1
        policy.stored(entry, 0, known=number % 3 == 0)
        for _ in range(chance.randrange(4)):
            policy.hit(entry)
        policy.add(entry)
        entries.append(entry)
    policy._time += 64

    def place(entry: Entry) -> tuple[int, int]:
        bucket = bucket_of(policy._time - entry.last_used)
        queue = policy._queues[min(entry.hits, 3)][bucket]
        return next(at for at, other in enumerate(policy._order) if other is queue), entry.last_used

    assert drain(policy) == sorted(entries, key=place)
