"""Choosing tokens: what the parameters promise, over many draws."""

from __future__ import annotations

import math

import pytest
import torch

from kvkeep.engine.sampling import SamplingParams, choose, generator
from kvkeep.errors import InvalidValue

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, -1.0])  # likeliest first: 1, 3, 0, 2, 4


def draws(count, logits=LOGITS, **params):
    one = SamplingParams(**{"temperature": 1.0, "seed": 3, **params})
    source = generator(one, CPU)
    return [choose(logits[None], [one], [source])[0] for _ in range(count)]


def test_greedy_takes_the_likeliest_and_needs_no_chance():
    params = SamplingParams()
    assert generator(params, CPU) is None
    rows = torch.stack((LOGITS, LOGITS.flip(0)))
    assert choose(rows, [params, params], [None, None]) == [1, 3]


def test_draws_follow_the_probabilities():
    seen = draws(4000)
    shares = torch.bincount(torch.tensor(seen), minlength=5) / len(seen)
    assert (shares - LOGITS.softmax(-1)).abs().max() < 0.03


def test_temperature_sharpens_and_flattens():
    cold, warm = draws(500, temperature=0.25), draws(500, temperature=4.0)
    assert cold.count(1) > 450
    assert warm.count(1) < 300


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 5e-324, 1e308])
def test_extreme_temperatures_stay_numbers(temperature):
    seen = set(draws(50, temperature=temperature))
    assert seen == {1} if temperature < 1 else seen <= set(range(5))


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {1}), (2, {1, 3}), (5, None), (99, None)])
def test_top_k(top_k, allowed):
    assert set(draws(400, top_k=top_k)) == (allowed or {0, 1, 2, 3, 4})


def test_top_p_keeps_the_fewest_that_reach_it():
    first, second = LOGITS.softmax(-1)[[1, 3]].tolist()
    assert set(draws(300, top_p=first - 0.01)) == {1}
    assert set(draws(300, top_p=first + 0.01)) == {1, 3}
    assert set(draws(300, top_p=first + second + 0.01)) == {1, 3, 0}
    assert set(draws(300, top_p=1e-9)) == {1}


def test_top_k_and_top_p_together():
    """Of the two likeliest, renormalised, the first alone reaches 0.7."""
    assert set(draws(300, top_k=2, top_p=0.7)) == {1}
    assert set(draws(300, top_k=2, top_p=0.8)) == {1, 3}


def test_a_seed_draws_the_same_whatever_runs_beside():
    wanted = draws(20)
    params = SamplingParams(temperature=1.0, seed=3)
    other = SamplingParams(temperature=0.7, seed=9)
    sources = [generator(other, CPU), None, generator(params, CPU)]
    rows = torch.stack((LOGITS.flip(0), LOGITS, LOGITS))
    both = [choose(rows, [other, SamplingParams(), params], sources) for _ in range(20)]
    assert [row[2] for row in both] == wanted
    assert [row[1] for row in both] == [1] * 20
    assert draws(20, seed=4) != wanted


def test_no_seed_draws_anew():
    flat = torch.zeros(1000)
    assert draws(8, flat, seed=None) != draws(8, flat, seed=None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": "end"}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (3,)}, "stop"),
    ],
    ids=str,
)
def test_wrong_values_are_named(wrong, says):
    with pytest.raises(InvalidValue, match=says):
        SamplingParams(**wrong)
