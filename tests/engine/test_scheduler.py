"""The engine against a naive one, driven at random: any mix, any pool, aborts at any time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workload import drive

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Limits, SamplingParams

pytestmark = pytest.mark.model

PAGE = 4
FAMILIES = [5, 17, 33]
"""Lengths at which prompts leave what they share."""


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench("llama", page_size=PAGE, num_pages=64)


@pytest.fixture(scope="module")
def answers(bench):
    """What each request gives alone, from an engine without reuse; computed once."""
    known = {}

    def alone(tokens, params):
        key = (tuple(tokens), params)
        if key not in known:
            engine = Engine(bench.runner, PagedCache(64, PAGE, reuse=False))
            known[key] = [one.tokens for one in engine.generate([tokens], params)[0].choices]
        return known[key]

    return alone


@st.composite
def requests(draw):
    """A prompt from a few families with common prefixes, and parameters."""
    trunk = np.random.default_rng(draw(st.integers(0, 1))).integers(0, 160, 40)
    at = draw(st.sampled_from(FAMILIES))
    own = np.random.default_rng(draw(st.integers(0, 5))).integers(0, 160, draw(st.integers(0, 6)))
    params = SamplingParams(
        max_tokens=draw(st.sampled_from([1, 2, 9, 20])),
        n=draw(st.sampled_from([1, 1, 2, 3])),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        seed=7,
        draft_tokens=draw(st.sampled_from([0, 0, 4])),
    )
    how = {"store": draw(st.booleans()), "namespace": draw(st.sampled_from(["", "", "other"]))}
    return [*trunk[:at], *own], params, how


@given(
    asked=st.lists(requests(), min_size=1, max_size=8),
    joins=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    aborts=st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=8, max_size=8),
    max_running=st.sampled_from([3, 5, 16]),
    step_tokens=st.sampled_from([16, 40, 200]),
    held=st.sampled_from([0, 30, 44]),
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_answer_is_what_it_would_be_alone(
    *, bench, answers, asked, joins, aborts, max_running, step_tokens, held
):
    cache = PagedCache(64, PAGE)
    # Another user of the cache holds pages, which makes the pool smaller.
    other = cache.open(np.zeros(held * PAGE, np.int32), "held") if held else None
    limits = Limits(max_running=max_running, step_tokens=step_tokens)
    engine = Engine(bench.runner, cache, limits=limits)
    running, deltas = drive(engine, asked, joins, aborts, most_steps=2000)
    for number, (_, tokens, params, abort) in running.items():
        mine = deltas.get(number, [])
        whole = answers(tokens, params)
        streamed = [
            sum((delta.tokens for delta in mine if delta.index == index), ())
            for index in range(params.n)
        ]
        done = mine[-1].completion if mine else None
        if abort is None:
            assert done is not None
            assert [choice.tokens for choice in done.choices] == streamed == whole
        for got, expected in zip(streamed, whole, strict=True):
            assert got == expected[: len(got)]
    if other is not None:
        other.close()
    assert cache.stats().sequences == 0
    cache.clear()
    assert cache.stats().pages_free == 64
