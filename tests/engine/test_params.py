"""Sampling parameters are checked, with a message that names the fault, when they are made."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvkeep.core.errors import InvalidValue, told
from kvkeep.serve.engine.params import SamplingParams


def test_the_defaults_are_greedy():
    params = SamplingParams()
    assert params.greedy


def test_they_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 0}, {"temperature": 5e-324}, {"temperature": 1e308}, {"top_p": 1},
        {"top_p": 5e-324}, {"top_k": 0}, {"top_k": 10**9}, {"min_p": 0}, {"min_p": 1},
        {"seed": 0}, {"seed": 2**63 - 1}, {"presence_penalty": -2}, {"frequency_penalty": 2.0},
        {"logit_bias": ((0, -100), (5, 100.0))}, {"n": 3},
        {"max_tokens": 1}, {"logprobs": 0}, {"logprobs": 100}, {"draft_tokens": 8},
    ],
    ids=str,
)  # fmt: skip
def test_the_edges_are_allowed(edge):
    params = SamplingParams(**edge)
    assert {name: getattr(params, name) for name in edge} == edge


HUGE = 10**5000
"""More digits than Python writes down."""
NUMBERS = {
    "ignore_eos": [None, 0, "yes"],
    "temperature": [-0.1, math.nan, math.inf, HUGE, "warm", True, None],
    "top_p": [0, 0.0, -1, 1.1, math.nan, "0.5", True],
    "min_p": [-0.1, 1.1, math.nan, None],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf],
    "frequency_penalty": [-2.1, 2.1, "1"],
    "top_k": [-1, 2**31, HUGE, -HUGE, 1.5, True, "3", None],
    "max_tokens": [0, -1, HUGE, True, 1.0],
    "n": [0, HUGE, True, 1.0],
    "draft_tokens": [-1, HUGE, True],
    "seed": [-1, 2**63, HUGE, 1.0, True],
    "logprobs": [-1, 101, True, 1.0],
    "stop": ["end", ("",), (3,), ["end"], None],
    "logit_bias": [
        {3: 1.0}, [(3, 1.0)], ((3,),), ([3, 1.0],), ((-1, 1.0),), (("3", 1.0),), ((3.0, 1.0),),
        ((3, 100.1),), ((3, -101),), ((3, math.nan),), ((3, "1"),), ((3, True),), ((True, 1),),
        ((HUGE, 1.0),), ((2**31, 1.0),), ((3, HUGE),), (HUGE,),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in NUMBERS.items() for value in values],
    ids=told,
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(InvalidValue, match=name):
        SamplingParams(**{name: value})


def test_every_field_is_tested():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(NUMBERS)
