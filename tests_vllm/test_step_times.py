"""What computing prompts costs, seen in steps: one after another, overlapping, and idle between."""

from __future__ import annotations

import pytest

from kvkeep.core.cost import LearnedPrefill
from kvkeep.integrations.vllm.choosing import StepTimes
from kvkeep.integrations.vllm.offload.choosing import ScheduleTimes

TOKEN_S, FIXED_S = 1e-3, 5e-3


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def takes(tokens: int) -> float:
    return FIXED_S + TOKEN_S * tokens


@pytest.mark.parametrize("ahead", [1, 2])
def test_steps_teach_what_they_take(ahead: int) -> None:
    """With ``ahead`` steps planned before the first has ended."""
    clock, prefill = Clock(), LearnedPrefill()
    times = StepTimes(prefill, clock=clock)
    sizes = [100, 300, 50, 700, 200, 400, 100, 600, 50] * 4
    begins = iter(range(len(sizes)))
    planned = 0
    for step in begins:
        while planned < min(len(sizes), step + ahead):
            times.planned(planned, [(0, sizes[planned])])
            planned += 1
        clock.now += takes(sizes[step])
        times.ended(step)
        if step % 5 == 4 and ahead == 1:
            clock.now += 10  # idle: the next step counts from its plan
    assert prefill.prefill_s(0, 500) == pytest.approx(takes(500), rel=0.05)


def test_steps_that_are_never_reported_are_forgotten() -> None:
    clock, prefill = Clock(), LearnedPrefill()
    times = StepTimes(prefill, clock=clock)
    for step in range(1000):
        times.planned(step, [(0, 100)])
        clock.now += 1
    assert len(times._under_way) <= 64
    times.ended(10)
    assert not prefill.known
    times.planned(1000, ())
    times.ended(1000)  # nothing that teaches
    assert not prefill.known


@pytest.mark.parametrize("ahead", [1, 2])
def test_plans_teach_what_steps_take(ahead: int) -> None:
    """A tier sees plans alone: each follows the end of the step ``ahead`` before it."""
    clock, prefill = Clock(), LearnedPrefill()
    times = ScheduleTimes(prefill, ahead, clock=clock)
    sizes = [100, 300, 50, 700, 200, 400, 100, 600, 50] * 4
    done = 0
    for step, size in enumerate(sizes):
        if step >= ahead:
            clock.now += takes(sizes[step - ahead])
        times.planned({"one": (done, 1 << 20)})
        done += size
    assert prefill.observations > len(sizes) - 4
    fit = prefill.cost
    assert fit.seconds_per_token == pytest.approx(TOKEN_S, rel=0.1)


def test_plans_with_a_pause_teach_nothing() -> None:
    clock, prefill = Clock(), LearnedPrefill()
    times = ScheduleTimes(prefill, 1, clock=clock)
    for number in range(8):
        times.planned({f"r{number}": (0, 100)})
        clock.now += 100  # it has ended, and nobody asks: the next plan is of another request
    assert not prefill.known
    times.planned({"r": (100, 100)})
    clock.now += 1
    times.planned({"r": (101, 100)})  # a token of an answer
    assert not prefill.known
