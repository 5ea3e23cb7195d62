"""What is learned online: near the truth, unmoved by outliers, and quick when speeds change."""

from __future__ import annotations

import json
import math
import threading
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.cost import (
    CostModel,
    LearnedPrefill,
    LearnedTransfer,
    OnlineFit,
    PrefillCost,
    TransferCost,
)
from kvkeep.core.errors import InvalidValue

TRUE = PrefillCost(seconds_fixed=0.01, seconds_per_token=1e-4, seconds_per_token_pair=4e-8)
SPANS = [(0, 16), (0, 256), (0, 1024), (1024, 2048), (3072, 4096), (4000, 4096)]
EXTREME = st.sampled_from([0.0, 5e-324, 1e-300, 1e-12, 1e-3, 1.0, 1e12])
ASKED = [(0, 64), (0, 512), (0, 4096), (2048, 4096), (4080, 4096)]


def test_nothing_is_known_before_anything_happened():
    learned = LearnedPrefill()
    assert not learned.known
    assert learned.error == 1
    assert learned.prefill_s(0, 100) == 0
    assert not LearnedTransfer().known
    assert LearnedTransfer().seconds(1) == 0


@settings(deadline=None)
@given(st.integers(0, 1 << 30))
def test_it_finds_the_truth_among_noise_and_outliers(seed):
    rng, learned, late = Random(seed), LearnedPrefill(), 1
    for _ in range(150):
        span = rng.choice(SPANS)
        # Two in a row are as many as can be told from a machine that has become slower.
        late = 30 if late == 1 and rng.random() < 0.08 else 1
        learned.observe([span], TRUE.prefill_s(*span) * rng.lognormvariate(0, 0.05) * late)
    for span in ASKED:
        assert learned.prefill_s(*span) == pytest.approx(TRUE.prefill_s(*span), rel=0.35)
    assert learned.error < 0.25


def test_one_pass_tells_the_cost_of_a_token():
    learned = LearnedPrefill()
    learned.observe([(0, 1000)], 0.5)
    assert learned.prefill_s(0, 2000) == pytest.approx(1.0)
    assert learned.error > 0.4  # one observation proves little


def test_passes_over_several_prompts_teach_as_well():
    learned = LearnedPrefill()
    rng = Random(1)
    for _ in range(120):
        pieces = [rng.choice(SPANS) for _ in range(rng.randrange(1, 4))]
        fixed = (len(pieces) - 1) * TRUE.seconds_fixed  # one pass: once
        learned.observe(pieces, sum(TRUE.prefill_s(*one) for one in pieces) - fixed)
    for span in ASKED:
        assert learned.prefill_s(*span) == pytest.approx(TRUE.prefill_s(*span), rel=0.02)


def test_a_machine_that_becomes_slower_is_noticed_at_once_at_every_length():
    learned = LearnedPrefill()
    for _ in range(20):
        for span in SPANS:
            learned.observe([span], TRUE.prefill_s(*span))
    for _ in range(9):
        learned.observe([(0, 256)], 3 * TRUE.prefill_s(0, 256))
    for span in ASKED:
        assert learned.prefill_s(*span) == pytest.approx(3 * TRUE.prefill_s(*span), rel=0.3)
    for _ in range(9):
        learned.observe([(0, 256)], TRUE.prefill_s(0, 256))
    for span in ASKED:
        assert learned.prefill_s(*span) == pytest.approx(TRUE.prefill_s(*span), rel=0.3)


def test_many_short_passes_do_not_make_it_forget_long_ones():
    learned = LearnedPrefill()
    for _ in range(5):
        for span in SPANS:
            learned.observe([span], TRUE.prefill_s(*span))
    for _ in range(3000):
        learned.observe([(0, 64)], TRUE.prefill_s(0, 64))
    assert learned.prefill_s(0, 4096) == pytest.approx(TRUE.prefill_s(0, 4096), rel=0.05)


def test_a_seed_holds_until_more_is_known_and_keeps_the_relation_of_lengths():
    learned = LearnedPrefill(TRUE)
    assert learned.known
    assert learned.error == 1
    for span in ASKED:
        assert learned.prefill_s(*span) == pytest.approx(TRUE.prefill_s(*span), rel=0.01)
    for _ in range(12):
        learned.observe([(0, 512)], 2 * TRUE.prefill_s(0, 512))  # a slower machine than the seed's
    for span in ASKED:
        assert learned.prefill_s(*span) == pytest.approx(2 * TRUE.prefill_s(*span), rel=0.2)
    assert learned.cost.name == TRUE.name


def test_what_took_no_time_or_had_no_tokens_breaks_nothing():
    learned = LearnedPrefill()
    learned.observe([], 1.0)
    learned.observe([(5, 5)], 1.0)
    assert not learned.known
    learned.observe([(0, 10)], 0.0)
    learned.observe([(0, 10)], -1.0)  # a clock that was set back
    assert 0 <= learned.prefill_s(0, 1000) < 1e-3


def test_its_memory_is_bounded():
    fit, rng = OnlineFit(2), Random(2)
    for _ in range(3000):
        fit.learn((2.0 ** rng.randrange(-200, 200), 1.0), rng.random())
    assert len(fit._cells) <= 64
    assert len(fit._recent) <= 32


# --- transfers -----------------------------------------------------------------------------------


class Link:
    """A link of one bandwidth that transfers share behind one latency, by its own clock."""

    def __init__(self, latency: float, each: float) -> None:
        self.now = 100.0
        self.latency, self.each = latency, each
        self.learned = LearnedTransfer(clock=lambda: self.now)

    def move(self, sizes: list[int]) -> None:
        """Move all of ``sizes`` at the same time."""
        for _ in sizes:
            self.learned.begin()
        self.now += self.latency
        for size in sizes:
            self.now += size * self.each
            self.learned.end(size)
        self.now += 1.0  # idle


def test_transfers_that_share_a_link_share_its_bandwidth():
    link, rng = Link(latency=0.01, each=1e-8), Random(3)
    for _ in range(200):
        count = rng.choice([1, 1, 4, 16])
        link.move([rng.choice([1 << 14, 1 << 20, 1 << 23])] * count)
    found = link.learned.cost
    assert found.seconds_fixed == pytest.approx(0.01, rel=0.2)
    assert found.seconds_per_byte == pytest.approx(1e-8, rel=0.2)
    assert link.learned.seconds(1 << 24) == pytest.approx(0.01 + (1 << 24) * 1e-8, rel=0.2)
    assert link.learned.seconds(0) == 0


def test_uninterrupted_transfers_are_observed_in_parts():
    link = Link(latency=0.0, each=1e-6)
    link.learned.begin()
    for _ in range(20):
        link.learned.begin()
        link.now += 1e5 * link.each
        link.learned.end(100_000)
    assert link.learned.observations >= 5
    assert link.learned.cost.seconds_per_byte == pytest.approx(1e-6, rel=0.1)
    link.learned.end(0)


def test_failed_transfers_teach_nothing():
    link = Link(latency=0.0, each=1e-6)
    link.learned.begin()
    link.now += 60
    link.learned.end(None)
    assert not link.learned.known
    link.learned.begin()
    link.learned.begin()
    link.now += 60
    link.learned.end(None)
    link.learned.end(10)  # it waited for the one that failed
    assert not link.learned.known
    link.move([1000])
    assert link.learned.observations == 1
    assert link.learned.running == 0


def test_a_seed_of_a_transfer():
    seed = TransferCost(seconds_fixed=0.002, seconds_per_byte=1e-9)
    learned = LearnedTransfer(seed)
    for size in (1 << 12, 1 << 20, 1 << 28):
        assert learned.seconds(size) == pytest.approx(seed.seconds(size), rel=0.05)


def test_many_threads_observe_at_once():
    learned = LearnedTransfer()

    def work() -> None:
        for _ in range(300):
            learned.begin()
            learned.end(1000)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert learned.running == 0
    assert learned.known


def test_what_turned_is_learned_anew() -> None:
    """A place that took a latency takes a bandwidth now: sizes never observed since follow that."""
    slow, keeps = OnlineFit(2, forgets=True), OnlineFit(2)
    for fit in (slow, keeps):
        for nbytes in (1.0, 2.0, 4.0, 8.0) * 8:
            fit.learn((nbytes, 1.0), 0.005)
        for _ in range(3):
            fit.learn((1.0, 1.0), 0.2)
    assert slow.expect((8.0, 1.0)) == pytest.approx(1.6, rel=0.01)
    assert keeps.expect((8.0, 1.0)) == pytest.approx(0.2, rel=0.3)


def test_one_turn_is_no_outlier() -> None:
    fit = OnlineFit(2, forgets=True)
    for nbytes in (1.0, 2.0, 4.0, 8.0) * 8:
        fit.learn((nbytes, 1.0), 0.1 * nbytes)
    for factor in (50, 1, 30, 0.02):
        fit.learn((4.0, 1.0), 0.4 * factor)
        assert fit.expect((8.0, 1.0)) == pytest.approx(0.8, rel=0.2)


def test_a_size_that_is_new_counts_at_once() -> None:
    fit = OnlineFit(3)
    for _ in range(20):
        fit.learn((8.0, 1.0, 7712.0), 0.02)
    fit.learn((1000.0, 1.0, 500_000.0), 0.05)
    fit.learn((1000.0, 1.0, 500_000.0), 0.05)
    assert fit.expect((1000.0, 1.0, 500_000.0)) < 0.1


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("factor", [3.0, 900.0, 3e3, 1e6])
def test_a_place_of_another_speed_is_learned_in_a_few_observations(factor, forgets):
    """Not only a factor that can be a pace: of many sizes observed before, all said otherwise."""
    random, fit = Random(1), OnlineFit(2, forgets=forgets)
    for _ in range(300):
        nbytes = 2 ** random.uniform(12, 24)
        fit.learn((nbytes, 1.0), nbytes * 1e-9 * random.uniform(0.9, 1.1))
    for speed in (factor * 1e-9, 1e-9):
        for _ in range(8):
            fit.learn((7e5, 1.0), 7e5 * speed * random.uniform(0.9, 1.1))
        assert fit.expect((1e6, 1.0)) == pytest.approx(1e6 * speed, rel=0.3)


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_seconds_that_are_no_number_are_not_learned(seconds):
    learned = LearnedPrefill()
    with pytest.raises(InvalidValue, match=f"{seconds} s for terms"):
        learned.observe([(0, 100)], seconds)
    learned.observe([(0, 100)], 1.0)
    assert learned.prefill_s(0, 100) == pytest.approx(1.0)


@settings(deadline=None)
@given(st.tuples(*[EXTREME] * 5), st.lists(st.sampled_from([0.0, 1e-9, 1e-3, 3.0]), max_size=6))
def test_extreme_costs_stay_costs(seeds, seconds):
    """Those of a file are at the limits of what it may hold; rounding crosses none."""
    fixed, each, pair, latency, byte = seeds
    cost = CostModel(
        PrefillCost(seconds_fixed=fixed, seconds_per_token=each, seconds_per_token_pair=pair),
        reads={"tier": TransferCost(seconds_fixed=latency, seconds_per_byte=byte)},
    )
    for one in (None, *seconds):
        if one is not None:
            cost.prefill.observe([(0, 100)], one)
        assert CostModel.of(json.loads(json.dumps(cost.as_dict(), allow_nan=False)))
        assert 0 <= cost.load_s({"tier": 1e6}) < math.inf
