"""Requests of sessions in the engine: turns, parallel answers, and preempted ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import ReturnAware
from kvkeep.serve.engine import Engine, Limits, SamplingParams, Tokenizer
from kvkeep.serve.models import bundled_model

pytestmark = pytest.mark.model

PAGE = 4
PROMPT = np.random.default_rng(3).integers(0, 160, 16)


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench("llama", page_size=PAGE, num_pages=32)


def run(engine, tokens, *, n=1, max_tokens=9, **told):
    """Run one request to its end; return the tokens of its answers."""
    params = SamplingParams(temperature=1.0, seed=5, n=n, max_tokens=max_tokens)
    request = engine.add(tokens, params, **told)
    while engine.has_work:
        for delta in engine.step():
            if delta.completion is not None:
                done = delta.completion
    return request, [choice.tokens for choice in done.choices]


def test_who_yields_and_comes_again_replaces_nobody(bench):
    """Five answers in a pool for three take turns, and none of their pages counts as dead."""
    cache = PagedCache(32, PAGE)
    engine = Engine(bench.runner, cache, limits=Limits(max_running=8, step_tokens=64))
    _, answers = run(engine, PROMPT, n=5, max_tokens=36, session="s")
    assert engine.stats().preempted > 0
    assert len(set(answers)) == 5
    stats = cache.stats()
    assert (stats.pages_dead, stats.sessions) == (0, 1)
    told = Engine(bench.runner, PagedCache(32, PAGE), limits=Limits(max_running=8, step_tokens=64))
    assert run(told, PROMPT, n=5, max_tokens=36)[1] == answers, "the answers are the same without"
    assert cache.session("s").close() == stats.pages_cached > 0


def test_mistakes_are_told_at_once(bench):
    engine = Engine(bench.runner, PagedCache(32, PAGE))
    for told in ({"session": ""}, {"session": "s" * 257}):
        with pytest.raises(InvalidValue):
            engine.add(PROMPT, **told)
    assert not engine.has_work


def test_the_engine_says_how_answers_end(bench, monkeypatch):
    """Conversations are told apart by the token that ended their answers, without a parser."""
    policy = ReturnAware()
    engine = Engine(bench.runner, PagedCache(32, PAGE, eviction=policy))
    _, (answer,) = run(engine, PROMPT)
    _, (other,) = run(engine, [*PROMPT, *answer, 1], max_tokens=5)
    (wait,) = policy.returns
    assert wait.answer_kind[0] == "length"
    assert wait.turns == 2
    end = int(other[2])
    monkeypatch.setattr(bench.runner, "end_tokens", frozenset({end}))
    run(Engine(bench.runner, engine.cache), [*PROMPT, *answer, 1], max_tokens=5)
    ends = {wait.answer_kind[0] for wait in policy.returns}
    assert f"stop {end}" in ends


def test_marks_in_an_answer_tell_ends_apart(bench):
    """Many models end tool calls and final answers alike; the tokens of a call have names."""
    tokenizer = Tokenizer.load(bundled_model())
    end, user, assistant = (
        tokenizer.encode(f"<|{name}|>")[-1] for name in ("end", "user", "assistant")
    )
    for inside, expected in (
        ([], f"stop {end}"),
        ([user, assistant], f"stop {end} after {assistant}"),
        ([assistant, user], f"stop {end} after {user}"),
    ):
        engine = Engine(bench.runner, PagedCache(32, PAGE), tokenizer)
        request = engine.add(PROMPT, SamplingParams(max_tokens=30))
        (answer,) = request.live
        for token in [100, *map(int, inside), 101, 102, int(end)]:
            answer.accept(token, None, ends=frozenset({int(end)}), longest=100)
        assert (answer.ended.stop, answer.ended.tokens) == (expected, 4 + len(inside))
        engine.abort(request)
