"""The engine gives the same tokens as without a cache, whatever the pool does; no page leaks."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, OutOfPages
from kvkeep.serve.engine import Engine, Limits, SamplingParams

pytestmark = pytest.mark.model

PAGE = 4


@pytest.fixture
def bench(make_bench):
    bench = make_bench("llama", page_size=PAGE, num_pages=64)
    yield bench
    assert_nothing_is_held(bench)


@pytest.fixture
def engine(bench):
    return Engine(bench.runner, bench.cache)


def assert_nothing_is_held(bench):
    """Every page is free, or cached and free once the cache is cleared."""
    bench.cache.check()
    assert bench.cache.stats().sequences == 0
    bench.cache.clear()
    assert bench.cache.stats().pages_free == bench.cache.num_pages


def few(count, **more):
    return SamplingParams(max_tokens=count, **more)


class CountingRunner:
    """Wraps a runner and counts the tokens it computes; can fail at a given pass."""

    def __init__(self, runner, fail_at=None, error=RuntimeError):
        self._runner = runner
        self.computed = []
        self._fail_at = fail_at
        self._error = error

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, pieces, **how):
        if len(self.computed) == self._fail_at:
            raise self._error
        self.computed.append([len(piece.tokens) for piece in pieces])
        return self._runner.forward(pieces, **how)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_are_those_without_a_cache(make_bench, prompt, family, page_size):
    bench = make_bench(family, page_size=page_size, num_pages=960 // page_size)
    engine = Engine(bench.runner, bench.cache)
    shared = prompt(40, 1)
    prompts = [
        shared,
        np.concatenate((shared[:32], prompt(6, 2))),
        np.concatenate((shared[:21], prompt(3, 3))),
        shared,
        prompt(5, 4),
    ]
    for expected_cached in ([0, 32, 21, 39, 0], [39, 37, 23, 39, 4]):
        done = engine.generate(prompts, few(8))
        # Tokens of a page that is not full are not shared, so up to a page is computed again.
        for one, most in zip(done, expected_cached, strict=True):
            assert most - page_size < one.cached_tokens <= most
        for tokens, one in zip(prompts, done, strict=True):
            assert list(one.tokens) == bench.greedy(tokens, 8)
            assert (one.prompt_tokens, one.finish_reason) == (len(tokens), "length")
    assert_nothing_is_held(bench)


def test_only_uncached_tokens_are_computed(bench, prompt):
    runner = CountingRunner(bench.runner)
    engine = Engine(runner, bench.cache, limits=Limits(step_tokens=16, max_running=8))
    tokens = prompt(40, 1)
    first = engine.generate([tokens], few(3))
    assert runner.computed == [[16], [16], [8], [1], [1]]
    runner.computed.clear()
    again = engine.generate([tokens, tokens], few(3))
    assert runner.computed == [[1, 1], [1, 1], [1, 1]]
    assert [one.cached_tokens for one in again] == [39, 39]
    assert {one.tokens for one in again} == {first[0].tokens}


def test_a_second_turn_reuses_the_answer(bench, engine, prompt):
    (answer,) = engine.generate([prompt(20, 1)], few(12))
    turn = [*prompt(20, 1), *answer.tokens, *prompt(4, 2)]
    (second,) = engine.generate([turn], few(2))
    assert second.cached_tokens >= 28  # the last generated token was never computed
    assert list(second.tokens) == bench.greedy(turn, 2)


def test_prompts_in_one_call_share(engine, prompt):
    done = engine.generate([prompt(33, 1), prompt(33, 1), prompt(33, 1)], few(1))
    assert [one.cached_tokens for one in done] == [0, 32, 32]


def test_without_reuse_nothing_is_read_or_left(bench, prompt):
    tokens = prompt(33, 1)
    (kept,) = Engine(bench.runner, bench.cache).generate([tokens], few(4))
    runner = CountingRunner(bench.runner)
    cold = PagedCache(bench.cache.num_pages, PAGE, reuse=False)
    done = Engine(runner, cold).generate([tokens, tokens], few(4))
    assert runner.computed[0] == [33, 33]
    assert [one.cached_tokens for one in done] == [0, 0]
    assert {one.tokens for one in done} == {kept.tokens}
    assert cold.stats().pages_free == cold.num_pages


def test_namespaces_do_not_share(engine, prompt):
    tokens = prompt(33, 1)
    reused = [engine.generate([tokens], few(1), namespace=name)[0].cached_tokens for name in "aab"]
    assert reused == [0, 32, 0]


def test_what_does_not_fit_waits(make_bench, prompt):
    """Ten prompts of 8 pages each in a pool of 20 pages."""
    bench = make_bench("llama", page_size=PAGE, num_pages=20)
    prompts = [prompt(29, seed) for seed in range(10)]
    done = Engine(bench.runner, bench.cache).generate(prompts, few(5))
    for tokens, one in zip(prompts, done, strict=True):
        assert list(one.tokens) == bench.greedy(tokens, 5)
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("reuse", [True, False])
def test_the_youngest_gives_way_and_comes_back(make_bench, prompt, reuse):
    """Three prompts fit, but not all that they generate."""
    bench = make_bench("llama", page_size=PAGE, num_pages=18, reuse=reuse)
    runner = CountingRunner(bench.runner)
    prompts = [prompt(20, seed) for seed in range(3)]
    engine = Engine(runner, bench.cache)
    done = engine.generate(prompts, few(30))
    assert len(runner.computed[0]) == 3 or not reuse  # all are admitted at once
    assert engine.stats().preempted > 0
    again = sum(map(sum, runner.computed)) - sum(map(len, prompts)) - 3 * 29
    assert again > 0  # what was evicted or never stored was computed again
    assert again < engine.stats().preempted * 49
    for tokens, one in zip(prompts, done, strict=True):
        assert list(one.tokens) == bench.greedy(tokens, 30)
        assert one.cached_tokens == 0  # at the first admission
    assert_nothing_is_held(bench)


def test_who_gave_way_goes_before_who_has_not_begun(make_bench, prompt):
    bench = make_bench("llama", page_size=PAGE, num_pages=18)
    engine = Engine(bench.runner, bench.cache, limits=Limits(max_running=3))
    deltas = list(engine.stream([prompt(20, seed) for seed in range(5)], few(30)))
    assert bench.cache.stats().out_of_pages > 0
    begun = list(dict.fromkeys(delta.request.id for delta in deltas))
    ended = [delta.request.id for delta in deltas if delta.completion is not None]
    assert begun == ended == [1, 2, 3, 4, 5]


def test_seeds_reproduce_through_preemption(make_bench, prompt):
    prompts = [prompt(20, seed) for seed in range(3)]
    params = [few(30, temperature=1.0, seed=seed) for seed in range(3)]
    wide, tight = (make_bench("llama", page_size=PAGE, num_pages=pages) for pages in (64, 18))
    results = [
        [one.tokens for one in Engine(bench.runner, bench.cache).generate(prompts, params)]
        for bench in (wide, tight)
    ]
    assert tight.cache.stats().out_of_pages > 0
    assert results[0] == results[1]
    other = Engine(wide.runner, wide.cache).generate(prompts, few(30, temperature=1.0, seed=9))
    assert other[0].tokens != results[0][0]


def test_a_sequence_ends_where_the_pool_ends(make_bench, prompt):
    bench = make_bench("llama", page_size=PAGE, num_pages=6)
    engine = Engine(bench.runner, bench.cache)
    for _ in range(2):  # the second time with hits, in a full pool
        (one,) = engine.generate([prompt(18, 1)], few(50))
        assert (len(one.tokens), one.finish_reason) == (6, "length")
        assert list(one.tokens) == bench.greedy(prompt(18, 1), 6)
    (full,) = engine.generate([prompt(24, 1)], few(50))
    assert len(full.tokens) == 1
    # A hit that ends inside a page needs source and copy at once, in a pool with no page left.
    turned = np.concatenate((prompt(24, 1)[:22], prompt(2, 2)))
    (last,) = engine.generate([turned], few(50))
    assert list(last.tokens) == bench.greedy(turned, 1)
    assert_nothing_is_held(bench)


def test_a_sequence_ends_where_the_model_ends(make_model, prompt):
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.serve.engine import Runner

    model = make_model("llama", max_position_embeddings=20)
    geometry = KVGeometry.from_config(model.config, dtype="float32")
    runner = Runner(model, geometry, num_pages=32, page_size=PAGE)
    engine = Engine(runner, PagedCache(32, PAGE))
    (one,) = engine.generate([prompt(17, 1)], few(50))
    assert (len(one.tokens), one.finish_reason) == (3, "length")
    with pytest.raises(InvalidValue, match=r"21 tokens.*at most 20"):
        engine.generate([prompt(21, 1)])


def test_an_end_token_ends(bench, prompt):
    tokens = prompt(12, 1)
    expected = bench.greedy(tokens, 6)
    end = next(token for token in expected[1:] if token != expected[0])
    bench.runner.end_tokens = frozenset({end})
    engine = Engine(bench.runner, bench.cache)
    (one,) = engine.generate([tokens], few(6))
    assert one.finish_reason == "stop"
    assert list(one.tokens) == expected[: expected.index(end) + 1]
    (on,) = engine.generate([tokens], few(6, ignore_eos=True))
    assert list(on.tokens) == expected


def test_deltas_come_one_by_one(engine, prompt):
    prompts = [prompt(9, 1), prompt(13, 2)]
    deltas = list(engine.stream(prompts, [few(2), few(4)]))
    for number, count in ((1, 2), (2, 4)):
        mine = [delta for delta in deltas if delta.request.id == number]
        assert len(mine) == count
        assert [delta.completion is not None for delta in mine] == [False] * (count - 1) + [True]
        assert sum((delta.tokens for delta in mine), ()) == mine[-1].completion.tokens
    done = deltas[-1].completion
    assert 0 < done.ttft_s <= done.seconds


def test_no_prompts_are_no_work(engine):
    assert engine.generate([]) == []


# --- nothing leaks ---------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_a_stream_that_is_closed_early_gives_everything_back(bench, engine, prompt, taken):
    stream = engine.stream([prompt(9, 1), prompt(9, 2), prompt(9, 3)], few(8))
    for _ in range(taken):
        next(stream)
    if taken:
        assert bench.cache.stats().sequences > 0
    stream.close()
    assert bench.cache.stats().sequences == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_at", range(6))
def test_an_error_in_any_forward_pass_gives_everything_back(bench, prompt, fail_at, error):
    tokens = [prompt(18, 1), np.concatenate((prompt(18, 1)[:10], prompt(5, 2)))]
    runner = CountingRunner(bench.runner, fail_at, error)
    limits = Limits(step_tokens=10, max_running=4)
    with pytest.raises(error):
        Engine(runner, bench.cache, limits=limits).generate(tokens, few(8))
    assert bench.cache.stats().sequences == 0
    bench.cache.check()
    # Cached KV is right: nothing was published before it was computed.
    done = Engine(bench.runner, bench.cache).generate(tokens, few(8))
    assert [list(one.tokens) for one in done] == [bench.greedy(one, 8) for one in tokens]


def test_when_others_hold_the_pool(bench, engine, prompt):
    others = bench.cache.open(prompt(61 * PAGE, 1))
    with pytest.raises(OutOfPages):
        engine.generate([prompt(20, 2)])
    (cut,) = engine.generate([prompt(8, 2)], few(20))  # fits, and cannot grow
    assert (len(cut.tokens), cut.finish_reason) == (5, "length")
    assert list(cut.tokens) == bench.greedy(prompt(8, 2), 5)
    others.close()
    assert engine.generate([prompt(20, 2)], few(1))


# --- refused before anything starts ----------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[]], "prompt 0: it has no tokens"),
        ([[1], list(range(100)) * 3], "prompt 1: it has 300 tokens and the pool holds 256"),
        ([[1, 160]], "token 160; the model knows 0 … 159"),
        ([[1, -1]], "token ids lie in"),
        (["text"], "need a tokenizer"),
        ("text", "a list of prompts"),
    ],
)
def test_wrong_prompts_are_refused_before_any_work(bench, prompts, says):
    runner = CountingRunner(bench.runner)
    engine = Engine(runner, bench.cache)
    with pytest.raises(InvalidValue, match=says):
        engine.stream(prompts)  # before any iteration
    assert runner.computed == []
    assert bench.cache.stats().opened == 0


def test_params_fit_the_prompts(engine):
    with pytest.raises(InvalidValue, match="2 prompts need as many params, got 1"):
        engine.generate([[1], [2]], [few(1)])
    with pytest.raises(InvalidValue, match="stop texts need a tokenizer"):
        engine.generate([[1]], few(1, stop=("x",)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"step_tokens": 0},
        {"max_running": 9, "step_tokens": 8},
        {"max_waiting": -1},
        {"max_overtaken": -1},
        {"watermark": 1.0},
    ],
)
def test_an_engine_wants_room_to_work(wrong):
    with pytest.raises(InvalidValue):
        Limits(**wrong)


@pytest.mark.parametrize("measures", [(63, PAGE), (64, 8)])
def test_cache_and_runner_have_the_same_measures(bench, measures):
    with pytest.raises(InvalidValue, match="give both the same"):
        Engine(bench.runner, PagedCache(*measures))
