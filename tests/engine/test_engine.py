"""Continuous batching: what is scheduled when, and that scheduling never changes the tokens."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from kvkeep.core.errors import InvalidValue, QueueFull
from kvkeep.serve.engine import Engine, Limits, SamplingParams

pytestmark = pytest.mark.model

PAGE = 4


class Watched:
    """Wraps a runner and records what each pass computes; can fail on a given prompt."""

    def __init__(self, runner, poison=None):
        self._runner = runner
        self.passes = []
        self.poison = poison

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, pieces):
        self.passes.append([(piece.start, piece.stop) for piece in pieces])
        if self.poison is not None and any(self.poison in piece.tokens for piece in pieces):
            raise RuntimeError("a poisoned token")
        return self._runner.forward(pieces)

    @property
    def computed(self):
        return sum(stop - start for one in self.passes for start, stop in one)


@pytest.fixture
def bench(make_bench):
    bench = make_bench("llama", page_size=PAGE, num_pages=96)
    yield bench
    assert_nothing_is_held(bench)


def assert_nothing_is_held(bench):
    bench.cache.check()
    assert bench.cache.stats().sequences == 0
    bench.cache.clear()
    assert bench.cache.stats().pages_free == bench.cache.num_pages


def make(bench, poison=None, **limits):
    runner = Watched(bench.runner, poison)
    return Engine(runner, bench.cache, limits=Limits(**limits)), runner


def few(count, **more):
    return SamplingParams(max_tokens=count, **more)


def finish(engine):
    """Step until no request is left; return the completions by request id."""
    done = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                done[delta.request.id] = delta.error
            elif delta.completion is not None:
                done[delta.request.id] = delta.completion
    return done


# --- joining and leaving ---------------------------------------------------------------------


def test_requests_join_and_leave_at_every_step(bench, prompt):
    engine, runner = make(bench)
    first = engine.add(prompt(10, 1), few(8))
    engine.step()
    engine.step()
    second = engine.add(prompt(7, 2), few(3))
    engine.step()
    # The newest token of the first, and the whole prompt of the second, in one pass.
    assert runner.passes[-1] == [(11, 12), (0, 7)]
    engine.step()
    assert runner.passes[-1] == [(12, 13), (7, 8)]
    done = finish(engine)
    assert list(done[first.id].tokens) == bench.greedy(prompt(10, 1), 8)
    assert list(done[second.id].tokens) == bench.greedy(prompt(7, 2), 3)
    assert len(runner.passes) == 8  # the second request cost the first no step


def test_long_prompts_are_computed_in_what_decoding_leaves_of_a_step(bench, prompt):
    engine, runner = make(bench, step_tokens=8, max_running=4)
    engine.add(prompt(3, 1), few(12))
    engine.step()
    engine.add(prompt(20, 2), few(2))
    engine.step()
    assert runner.passes[-1] == [(3, 4), (0, 7)]
    engine.step()
    assert runner.passes[-1] == [(4, 5), (7, 14)]
    assert all(sum(stop - start for start, stop in one) <= 8 for one in runner.passes)
    done = finish(engine)
    assert list(done[2].tokens) == bench.greedy(prompt(20, 2), 2)


def test_no_more_run_than_may(bench, prompt):
    engine, runner = make(bench, max_running=2)
    for seed in range(5):
        engine.add(prompt(6, seed), few(3))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 3)
    done = finish(engine)
    assert len(done) == 5
    assert max(map(len, runner.passes)) == 2


def test_a_full_queue_takes_nothing_more(bench, prompt):
    engine, _ = make(bench, max_waiting=2)
    kept = [engine.add(prompt(6, seed), few(2)) for seed in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait"):
        engine.add(prompt(6, 9), few(2))
    engine.step()
    engine.add(prompt(6, 9), few(2))  # the others run now
    assert len(finish(engine)) == 3
    assert engine.stats().requests == 3
    assert kept[0].id == 1


def test_an_aborted_request_gives_its_pages_back_at_once(bench, prompt):
    engine, _ = make(bench, step_tokens=8, max_running=2)
    going = engine.add(prompt(6, 1), few(6))
    decoding = engine.add(prompt(6, 2), few(50, n=1))
    for _ in range(3):
        engine.step()
    prefilling = engine.add(prompt(40, 3), few(5))
    waiting = engine.add(prompt(6, 4), few(5))
    engine.abort(decoding)
    engine.step()
    engine.abort(prefilling)
    engine.abort(waiting)
    engine.abort(waiting)  # a second abort changes nothing
    assert bench.cache.stats().sequences == engine.num_running == 1
    done = finish(engine)
    assert list(done) == [going.id]
    assert engine.stats().aborted == 3


def test_a_failing_pass_ends_its_requests_and_no_others(bench, prompt):
    poisoned = np.where(prompt(9, 2) == 5, 6, prompt(9, 2))
    poisoned[4] = 5
    healthy = [np.where(prompt(9, seed) == 5, 6, prompt(9, seed)) for seed in (3, 4)]
    engine, runner = make(bench, poison=5)
    engine.add(poisoned, few(3))
    done = finish(engine)
    assert isinstance(done[1], RuntimeError)
    assert bench.cache.stats().sequences == 0
    runner.poison = None
    engine.add(healthy[0], few(3))
    assert list(finish(engine)[2].tokens) == bench.greedy(healthy[0], 3)
    assert engine.stats().failed == 1


# --- sharing ---------------------------------------------------------------------------------


def test_what_another_computes_right_now_is_waited_for(bench, prompt):
    shared = prompt(40, 1)
    prompts = [np.concatenate((shared, [seed], prompt(5, seed))) for seed in range(2, 6)]
    engine, runner = make(bench, step_tokens=16, max_running=8)
    for one in prompts:
        engine.add(one, few(4))
    engine.add(prompt(6, 9), few(4))  # shares no prefix, so it is not deferred
    done = finish(engine)
    # The 40 tokens of full pages are computed once, all others by each.
    own = sum(len(one) - 40 for one in prompts)
    assert runner.computed == 40 + own + 6 + 5 * 3
    assert [done[number].cached_tokens for number in (1, 2, 3, 4, 5)] == [0, 40, 40, 40, 0]
    for number, one in enumerate(prompts, 1):
        assert list(done[number].tokens) == bench.greedy(one, 4)
    assert engine.stats().deferred == 3


def test_who_waited_for_a_prefix_goes_on_when_its_computer_is_gone(bench, prompt):
    engine, _ = make(bench, step_tokens=8, max_running=4)
    leader = engine.add(prompt(40, 1), few(4))
    follower = engine.add(prompt(40, 1), few(4))
    engine.step()
    engine.step()
    assert engine.num_waiting == 1
    engine.abort(leader)
    done = finish(engine)
    assert done[follower.id].cached_tokens == 16  # what the aborted leader had computed
    assert list(done[follower.id].tokens) == bench.greedy(prompt(40, 1), 4)


def test_other_namespaces_and_prompts_that_are_not_stored_are_not_waited_for(bench, prompt):
    engine, runner = make(bench, step_tokens=200)
    engine.add(prompt(40, 1), few(2), namespace="a")
    engine.add(prompt(40, 1), few(2), namespace="b")
    engine.add(prompt(40, 2), few(2), store=False)
    engine.add(prompt(40, 2), few(2), store=False)
    done = finish(engine)
    assert runner.passes[0] == [(0, 40)] * 4
    assert {one.cached_tokens for one in done.values()} == {0}


def test_what_is_not_stored_reads_and_leaves_nothing(bench, prompt):
    engine, _ = make(bench)
    engine.add(prompt(20, 1), few(2))
    finish(engine)
    before = bench.cache.stats().pages_cached
    secret = engine.add([*prompt(20, 1), *prompt(20, 2)], few(9, n=3, temperature=1.0), store=False)
    done = finish(engine)
    assert done[secret.id].cached_tokens == 20
    assert bench.cache.stats().pages_cached == before


def test_the_longest_cached_prefix_goes_first(bench, prompt):
    engine, _ = make(bench, max_running=1)
    engine.generate([prompt(32, 1)], few(1))
    cold = engine.add(prompt(32, 2), few(1))
    cold_too = engine.add(prompt(32, 3), few(1))
    warm = engine.add([*prompt(32, 1), 7], few(1))
    half = engine.add([*prompt(32, 1)[:16], 7], few(1))
    assert list(finish(engine)) == [warm.id, half.id, cold.id, cold_too.id]


def test_nobody_is_overtaken_for_ever(bench, prompt):
    engine, _ = make(bench, max_running=1, max_overtaken=3)
    engine.generate([prompt(32, 1)], few(1))
    cold = engine.add(prompt(32, 2), few(1))
    warm = [engine.add([*prompt(32, 1), 7], few(1))]
    order = []
    while engine.has_work:
        order += [delta.request.id for delta in engine.step() if delta.completion is not None]
        if len(warm) < 10:
            warm.append(engine.add([*prompt(32, 1), 7], few(1)))
    assert order.index(cold.id) == 3


# --- several answers -------------------------------------------------------------------------


def test_answers_fork_from_one_prefill(bench, prompt):
    engine, runner = make(bench)
    request = engine.add(prompt(23, 1), few(6, n=4, temperature=1.0, seed=3))
    done = finish(engine)[request.id]
    assert runner.passes[0] == [(0, 23)]
    assert [len(one) for one in runner.passes[1:]] == [4] * 5
    assert len({choice.tokens for choice in done.choices}) > 1
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    # The same tokens alone, with busy neighbours, or in a pool that is too small.
    again = engine.add(prompt(23, 1), few(6, n=4, temperature=1.0, seed=3))
    engine.add(prompt(9, 2), few(9, temperature=1.0))
    assert finish(engine)[again.id].choices == done.choices


def test_greedy_answers_of_one_request_are_the_same(bench, prompt):
    engine, _ = make(bench)
    request = engine.add(prompt(23, 1), few(6, n=3))
    done = finish(engine)[request.id]
    assert [list(choice.tokens) for choice in done.choices] == [bench.greedy(prompt(23, 1), 6)] * 3


@pytest.mark.parametrize("num_pages", [96, 16, 11])
def test_forks_come_through_a_pool_too_small_for_all(make_bench, prompt, num_pages):
    bench = make_bench("llama", page_size=PAGE, num_pages=num_pages)
    wide = make_bench("llama", page_size=PAGE, num_pages=96)
    params = few(14, n=4, temperature=1.0, seed=5)
    results = []
    for one in (wide, bench):
        engine, _ = make(one)
        request = engine.add(prompt(19, 1), params)
        results.append(finish(engine)[request.id].choices)
    assert results[0] == results[1]
    assert (engine.stats().preempted > 0) == (num_pages < 96)
    assert_nothing_is_held(bench)


def test_more_answers_than_run_at_once_are_refused(bench, prompt):
    engine, _ = make(bench, max_running=4)
    with pytest.raises(InvalidValue, match="5 answers are more than run at once"):
        engine.add(prompt(5, 1), few(1, n=5))
    with pytest.raises(InvalidValue, match="logit_bias has token 160"):
        engine.add(prompt(5, 1), few(1, logit_bias=((160, 1.0),)))


# --- preemption ------------------------------------------------------------------------------


def test_what_survives_is_not_computed_again(make_bench, prompt):
    """Two answers outgrow the pool; the preempted one finds most of its pages still cached."""
    bench = make_bench("llama", page_size=PAGE, num_pages=24)
    engine, runner = make(bench)
    prompts = [prompt(30, 1), prompt(30, 2)]
    for one in prompts:
        engine.add(one, few(20))
    done = finish(engine)
    assert engine.stats().preempted > 0
    needed = 2 * (30 + 19)
    assert runner.computed - needed < 30 + 20  # recomputed: less than one whole answer
    for number, one in enumerate(prompts, 1):
        assert list(done[number].tokens) == bench.greedy(one, 20)
    assert_nothing_is_held(bench)


@pytest.mark.parametrize(("family", "num_pages"), [("mistral", 60), ("gemma3", 46)])
def test_windows_come_through_preemption_and_sharing(make_bench, prompt, family, num_pages):
    bench = make_bench(family, page_size=PAGE, num_pages=num_pages)
    shared = prompt(30, 1)
    prompts = [np.concatenate((shared, prompt(4, seed))) for seed in range(2, 6)]
    engine, _ = make(bench, step_tokens=24, max_running=4)
    for one in prompts:
        engine.add(one, few(20))
    done = finish(engine)
    assert engine.stats().preempted > 0
    for number, one in enumerate(prompts, 1):
        assert list(done[number].tokens) == bench.greedy(one, 20)
    assert_nothing_is_held(bench)


# --- drafts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [96, 12])
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_drafts_change_the_speed_and_never_the_tokens(make_bench, prompt, num_pages, temperature):
    bench = make_bench("llama", page_size=PAGE, num_pages=num_pages)
    tokens = np.tile(prompt(6, 1), 4)
    params = {"temperature": temperature, "seed": 1, "n": 2}
    engine, runner = make(bench)
    engine.add(tokens, few(40 if num_pages > 12 else 20, **params))
    plain = finish(engine)[1]
    passes = len(runner.passes)
    runner.passes.clear()
    drafted = engine.add(tokens, few(len(plain.tokens), draft_tokens=5, **params))
    done = finish(engine)[drafted.id]
    assert [one.tokens for one in done.choices] == [one.tokens for one in plain.choices]
    stats = engine.stats()
    assert stats.drafted_tokens > 0
    assert stats.accepted_drafts <= stats.drafted_tokens
    if stats.accepted_drafts and num_pages > 12:
        assert len(runner.passes) < passes
    assert_nothing_is_held(bench)


def test_what_a_draft_wrote_is_never_published(bench, prompt):
    """Rejected drafts were computed into pages, which no other prompt may find."""
    engine, _ = make(bench)
    tokens = np.tile(prompt(5, 1), 6)
    (one,) = engine.generate([tokens], few(30, draft_tokens=8))
    assert list(one.tokens) == bench.greedy(tokens, 30)
    whole = [*tokens, *one.tokens]
    again = engine.generate([whole[: len(tokens) + at] for at in (3, 8, 17, 30)], few(4))
    for at, other in zip((3, 8, 17, 30), again, strict=True):
        assert list(other.tokens) == bench.greedy(whole[: len(tokens) + at], 4)


# --- chance ----------------------------------------------------------------------------------


def test_seeds_reproduce_whatever_else_is_in_the_batch(bench, prompt):
    params = few(12, temperature=1.0, top_p=0.9, seed=42)
    engine, _ = make(bench)
    alone = engine.generate([prompt(11, 1)], params)[0].tokens
    noise = [few(9, temperature=1.3) for _ in range(4)]
    prompts = [prompt(8, seed) for seed in range(5, 9)]
    mixed = engine.generate([*prompts, prompt(11, 1)], [*noise, params])
    assert mixed[-1].tokens == alone
    other = engine.generate([prompt(11, 1)] * 2, few(12, temperature=1.0))
    assert other[0].tokens != other[1].tokens  # no seed: new draws each time


def test_logprobs_are_those_of_the_model(bench, prompt):
    import torch

    engine, _ = make(bench)
    (one,) = engine.generate([prompt(11, 1)], few(5, logprobs=2))
    (choice,) = one.choices
    logits = bench.expected([*prompt(11, 1), *one.tokens])[10:-1]
    expected = torch.log_softmax(logits, -1)
    for row, (token, entry) in enumerate(zip(one.tokens, choice.logprobs, strict=True)):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert entry.top[0][0] == token  # greedy takes the likeliest
        assert len(entry.top) == 2


def test_a_prompt_is_lent_for_the_call_alone(bench, prompt):
    engine, _ = make(bench, step_tokens=16, max_running=4)
    first = prompt(40, 1).astype(np.int32)
    lent = array("i", first)
    asked = [engine.add(first, few(4)), engine.add(lent, few(4))]
    row = first.copy()
    lent.append(0)  # a buffer that is still exported cannot grow
    engine.step()
    first[:] = lent[0] = 159  # between two chunks of the prompt
    done = finish(engine)
    for request in asked:
        assert request.prompt.tolist() == row.tolist()
        assert [*done[request.id].tokens] == bench.greedy(row, 4)
