"""How much of a stored prefix an engine loads, on numbers: never much worse than the better way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.core.cost import LearnedPrefill, PrefillCost
from kvkeep.integrations.load_choice import LoadChooser, StoredRun

COST = PrefillCost(seconds_fixed=0.01, seconds_per_token=1e-3, seconds_per_token_pair=1e-7)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def chooser(clock: Clock | None = None, **more: int) -> LoadChooser:
    return LoadChooser(LearnedPrefill(COST), clock=clock or Clock(), **more)


def test_what_is_faster_is_chosen() -> None:
    one = chooser()
    fast = one.choose(0, 1000, [StoredRun(960, "disk", 0.1)])
    assert (fast.tokens, fast.refused) == (960, "")
    assert fast.compute_s == pytest.approx(COST.prefill_s(0, 1000) - COST.prefill_s(960, 1000))
    assert 0.1 < fast.patience < fast.compute_s
    slow = one.choose(0, 1000, [StoredRun(960, "disk", 2.0)])
    assert (slow.tokens, slow.refused, slow.load_s) == (0, "disk", 2.0)
    both = one.choose(0, 1000, [StoredRun(480, "memory", 0.001), StoredRun(960, "disk", 2.0)])
    assert (both.tokens, both.refused) == (480, "disk")
    whole = one.choose(
        0, 1000, [StoredRun(480, "memory", 0.001), StoredRun(960, "disk", 2.0)], divisible=False
    )
    assert (whole.tokens, whole.refused) == (0, "memory")


def test_what_is_unknown_is_tried_and_not_for_long() -> None:
    one = LoadChooser(LearnedPrefill())
    assert one.choose(0, 1000, [StoredRun(960, "disk", None)]).patience == math.inf
    unknown = chooser().choose(0, 1000, [StoredRun(960, "disk", None)])
    assert unknown.tokens == 960
    assert unknown.patience <= 0.25 * unknown.compute_s


def test_a_guess_is_corrected_by_computing_once() -> None:
    """A pass of a few tokens takes as long as one of many, on a GPU: it says little of these."""
    prefill = LearnedPrefill()
    for _ in range(20):
        prefill.observe([(960, 968)], 0.02)  # after hits, a few tokens are left
    one = LoadChooser(prefill)
    assert one.choose(0, 1000, [StoredRun(960, "disk", 0.1)]).tokens == 0
    assert one.choose(0, 1000, [StoredRun(960, "memory", 0.001)]).tokens == 960
    prefill.observe([(0, 1000)], 0.05)
    prefill.observe([(0, 1000)], 0.05)
    assert one.choose(0, 1000, [StoredRun(960, "disk", 0.1)]).tokens == 0
    assert one.choose(0, 1000, [StoredRun(960, "disk", 0.01)]).tokens == 960


def test_requests_before_it_count() -> None:
    one, runs = chooser(), [StoredRun(960, "disk", 0.5)]
    assert one.choose(0, 1000, runs).tokens == 960
    assert one.choose(0, 1000, runs, load_free_s=1.0).tokens == 0
    # While others are computed, there is time to load.
    assert one.choose(0, 1000, runs, load_free_s=1.0, compute_free_s=1.0).tokens == 960
    assert chooser().choose(0, 1000, [StoredRun(960, "disk", 1.2)]).tokens == 0
    busy = chooser().choose(0, 1000, [StoredRun(960, "disk", 1.2)], compute_free_s=1.0)
    assert busy.tokens == 960


def test_passes_of_an_engine_count() -> None:
    assert chooser().compute_s(0, 1000) == pytest.approx(COST.prefill_s(0, 1000))
    passes = chooser(pass_tokens=256)
    assert passes.compute_s(0, 1000) == pytest.approx(COST.prefill_s(0, 1000) + 3 * 0.01)


def test_what_handing_over_takes_counts() -> None:
    one, runs = chooser(), [StoredRun(40, "memory", 0.001)]
    assert one.choose(0, 50, runs).tokens == 40
    for _ in range(5):
        one.handed_over(0.2)
    assert one.choose(0, 50, runs).tokens == 0


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(1, 40), st.floats(1e-4, 3.0), st.sampled_from("abc")),
        min_size=1, max_size=5,
    ),
    computed=st.integers(0, 20),
    extra=st.integers(0, 50),
    ahead=st.floats(0, 2.0),
    queue=st.floats(0, 2.0),
)  # fmt: skip
def test_never_worse_than_computing(
    pieces: list[tuple[int, float, str]], computed: int, extra: int, ahead: float, queue: float
) -> None:
    """If costs are what is known of them: not worse than computing, nor much worse than loading."""
    end, runs = computed * 16, []
    for blocks, seconds, tier in pieces:
        end += blocks * 16
        runs.append(StoredRun(end, tier, seconds))
    tokens = end + extra + 1
    one = chooser()
    found = one.choose(computed * 16, tokens, runs, compute_free_s=ahead, load_free_s=queue)
    loading = queue + sum(run.seconds or 0 for run in runs if run.end <= found.tokens)

    def takes(stop: int, load_s: float) -> float:
        begin = max(ahead, load_s) if stop > computed * 16 else ahead
        return begin + one.compute_s(min(stop, tokens - 1), tokens)

    alone, took = takes(computed * 16, 0), takes(found.tokens, loading)
    assert took <= alone + 1e-9
    best, load_s = alone, queue
    for run in runs:
        load_s += run.seconds or 0
        best = min(best, takes(run.end, load_s))
    assert took <= best + 0.021 * (alone - ahead) + 1e-9
    assert found.patience >= 0


class Tiers(RuleBasedStateMachine):
    """A tier that turns slow and fast, with loads and probes: against its rules, plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.chooser = chooser(self.clock)
        self.doubted = False
        self.next_probe = 0.0
        self.probing = False

    @rule(seconds=st.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def a_load_is_late(self) -> None:
        self.chooser.came_late("disk")
        self.doubted = True

    @precondition(lambda self: not self.probing)
    @rule()
    def a_probe(self) -> None:
        due = self.clock.now >= self.next_probe
        assert self.chooser.take_probe("disk") == due
        if due:
            self.next_probe, self.probing = self.clock.now + 60, True

    @precondition(lambda self: self.probing)
    @rule(seconds=st.floats(0.001, 2.0), came=st.booleans(), factor=st.sampled_from([0.1, 1, 10]))
    def it_ends(self, seconds: float, came: bool, factor: float) -> None:
        self.chooser.probed("disk", seconds, in_time=came, expected=seconds / factor)
        self.probing = False
        pause = min(max(1.0, seconds / 0.1), 10.0) if factor == 1 else max(0.25, seconds)
        self.next_probe = self.clock.now + pause
        if came and factor <= 1:
            self.doubted = False

    @invariant()
    def nothing_is_loaded_in_doubt(self) -> None:
        found = self.chooser.choose(0, 1000, [StoredRun(960, "disk", 0.1)])
        assert (found.tokens == 0) == self.doubted
        other = self.chooser.choose(0, 1000, [StoredRun(960, "other", 0.1)])
        assert other.tokens == 960


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
