"""Policies that learn, in made-up workloads where it is known what does best."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import PagedCache
from kvkeep.core.eviction import ARC, LRU, S3FIFO, Adaptive, Entry, EvictionPolicy, Reuse, TwoQ
from kvkeep.core.eviction.adaptive import _Learned, _Lists
from kvkeep.core.eviction.arc import Directory
from kvkeep.core.eviction.reuse import Hazards, bucket_of
from kvkeep.core.eviction.s3fifo import Ghost
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
    hot = {
        "2q with 1% on probation",
        "2q with 10% on probation",
        "2q with 30% on probation",
        "reuse",
    }
    serve(cache, scan_and_hot_set(1000))
    assert policy.chosen in hot
    serve(cache, twice_and_never_again(3000))
    assert policy.chosen not in hot - {"reuse"}, "a new one comes back 50 later"
    serve(cache, scan_and_hot_set(6000))
    assert policy.chosen in hot


@pytest.mark.parametrize("probation", [0.0, 0.3, 0.7, None])
@settings(max_examples=100, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 14), st.booleans()), max_size=80))
def test_a_candidate_is_2q_over_keys(
    probation: float | None, asked: list[tuple[int, bool]]
) -> None:
    """``known`` says that it was asked for before, and went; without probation it is LRU."""
    trial = _Lists(probation, 10)
    most = 10 if probation is None else int(10 * probation)
    once: list[int] = []  # oldest first
    again: list[int] = []
    hits = 0
    for number, known in asked:
        trial.requested([(bytes([number]), known)])
        hits += number in once or number in again
        reused = number in once or number in again or known or probation is None
        once = [other for other in once if other != number]
        again = [other for other in again if other != number]
        (again if reused else once).append(number)
        if len(once) + len(again) > 10:
            (once if len(once) > most or not again else again).pop(0)
        assert trial.hits == hits


def test_adaptive_watches_a_sample_of_a_large_memory() -> None:
    policy = Adaptive()
    policy.fit(100_000, 1)
    chance = random.Random(1)
    keys = [chance.randbytes(32) for _ in range(5000)]
    policy.requested(keys)
    lists = [trial for trial in policy._trials if isinstance(trial, _Lists)]
    (learned,) = [trial for trial in policy._trials if isinstance(trial, _Learned)]
    watched = len(lists[-1]._again)
    assert 400 < watched < 600, "a tenth of them"
    policy.requested(keys)
    assert [trial.hits for trial in lists] == [watched] * len(lists)
    assert learned.hits == watched == len(learned._kept)


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
