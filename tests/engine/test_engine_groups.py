"""The engine over a cache with groups of layers, driven at random on symbolic memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic_runner import VOCABULARY, SymbolicRunner, alone
from workload import drive

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec
from kvkeep.serve.engine import Engine, Limits, SamplingParams

PAGE = 4
LAYOUTS = {
    "state": GroupLayout(PAGE, (), StateSpec(5, 2), tail_tokens=24, answer_tokens=8),
    "window": GroupLayout(PAGE, (WindowSpec(9, 2),)),
    "chunk": GroupLayout(PAGE, (WindowSpec(8, 1, chunked=True),)),
    "all": GroupLayout(
        PAGE,
        (WindowSpec(6, 2), WindowSpec(11), WindowSpec(12, chunked=True)),
        StateSpec(3, 2),
        tail_tokens=24,
        answer_tokens=16,
    ),
}


def make(name: str, pages: int, **limits):
    runner = SymbolicRunner(pages, LAYOUTS[name], longest=90)
    cache = PagedCache(pages, LAYOUTS[name])
    return runner, cache, Engine(runner, cache, limits=Limits(**limits))


@st.composite
def requests(draw):
    trunk = np.random.default_rng(draw(st.integers(0, 1))).integers(0, VOCABULARY, 48)
    at = draw(st.sampled_from([5, 17, 33, 48]))
    own = np.random.default_rng(draw(st.integers(0, 5))).integers(0, VOCABULARY, 6)
    params = SamplingParams(
        max_tokens=draw(st.sampled_from([1, 2, 9, 30])),
        n=draw(st.sampled_from([1, 1, 2, 3])),
        draft_tokens=draw(st.sampled_from([0, 0, 3])),
    )
    how = {"store": draw(st.booleans()), "namespace": draw(st.sampled_from(["", "", "other"]))}
    return [*trunk[:at], *own[: draw(st.integers(0, 6))]], params, how


@pytest.mark.parametrize("name", LAYOUTS)
@given(
    asked=st.lists(requests(), min_size=1, max_size=8),
    joins=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    aborts=st.lists(st.one_of(st.none(), st.none(), st.integers(1, 20)), min_size=8, max_size=8),
    max_running=st.sampled_from([3, 5, 16]),
    step_tokens=st.sampled_from([16, 40, 200]),
    held=st.sampled_from([0, 40, 70]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_answer_is_what_it_would_be_alone(
    *, name, asked, joins, aborts, max_running, step_tokens, held
):
    _, cache, engine = make(name, 160, max_running=max_running, step_tokens=step_tokens)
    other = cache.open(np.zeros(held * PAGE, np.int32), "held") if held else None
    running, deltas = drive(engine, asked, joins, aborts, most_steps=3000)
    for number, (_, tokens, params, abort) in running.items():
        mine = deltas.get(number, [])
        done = mine[-1].completion if mine else None
        if abort is None:
            assert done is not None
            assert len(done.choices) == params.n
        whole = alone(tokens, params.max_tokens)
        for index in range(params.n):
            got = [token for delta in mine if delta.index == index for token in delta.tokens]
            assert got == whole[: len(got)]
            assert len(got) == len(whole) or abort is not None
    if other is not None:
        other.close()
    assert cache.stats().sequences == 0
    cache.clear()
    assert cache.stats().pages_free == 160


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_turn_computes_little(name):
    runner, cache, engine = make(name, 400)
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, 50).tolist()
    (first,) = engine.generate([prompt], SamplingParams(max_tokens=20))
    history = [*prompt, *first.choices[0].tokens]
    before = runner.computed
    (second,) = engine.generate([[*history, 1, 2, 3]], SamplingParams(max_tokens=1))
    assert second.cached_tokens >= 56
    assert runner.computed - before == len(history) + 3 - second.cached_tokens
    cache.check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_prompts_that_arrive_together_compute_what_they_share_once(name):
    runner, cache, engine = make(name, 600)
    trunk = np.random.default_rng(4).integers(0, VOCABULARY, 48).tolist()
    prompts = [
        [*trunk, *np.random.default_rng(seed).integers(0, VOCABULARY, 9)] for seed in range(5)
    ]
    engine.generate(prompts, SamplingParams(max_tokens=1))
    assert runner.computed == 48 + 5 * 9
    cache.check()


def test_drafts_are_verified_and_rejected():
    for name in LAYOUTS:
        _, _, engine = make(name, 400)
        prompt = [1, 2, 3, 4] * 9
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=40, draft_tokens=3))
        assert list(done.choices[0].tokens) == alone(prompt, 40)
        stats = engine.stats()
        assert 0 < stats.accepted_drafts < stats.drafted_tokens, name


def test_a_cache_for_another_layout_is_refused():
    runner = SymbolicRunner(64, LAYOUTS["state"], longest=50)
    for wrong in (LAYOUTS["all"], PAGE):
        with pytest.raises(InvalidValue, match="this model needs"):
            Engine(runner, PagedCache(64, wrong))


def test_answers_of_one_request_without_room_for_their_rows_do_not_wait_for_each_other():
    _, cache, engine = make("window", 200)
    prompt = np.random.default_rng(5).integers(0, VOCABULARY, 40).tolist()
    engine.add(prompt, SamplingParams(max_tokens=30, n=3))
    for _ in range(4):
        engine.step()
    scheduler = engine._scheduler
    for answer in reversed(scheduler.running.copy()):  # as an older request would
        scheduler.preempt(answer)
    scheduler.admit()
    assert engine.num_running == 3
    cache.clear()
    other = cache.open([1] * PAGE * (cache.num_available - 1), "held")
    deltas = []
    for _ in range(100):
        deltas += engine.step()
    assert deltas, "no progress"
    other.close()
    while engine.has_work:
        deltas += engine.step()
    assert deltas[-1].error is not None or deltas[-1].completion is not None
    cache.check()
