"""The engine over a store that learns which answers are never read again."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from hybrid_families import amplified
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.engine import Engine, Limits, Runner, SamplingParams
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

BLOCK, COUNT, TALKS = 8, 20, 14


def serve(make_bench, prompt, tmp_path, *, family="llama", thinks=True):
    """Conversations of two turns, whose second prompt lacks the answer or contains it.

    Returns the store's figures, those of the tier, and the loaded tokens of all second turns.
    """
    bench = make_bench(family, page_size=4, num_pages=96)
    runner = bench.runner
    loaded = []
    with KVStore(
        runner.geometry,
        model="tiny@1",
        tiers=["memory://8MiB", f"file://{tmp_path}/tier?size=64MiB&policy=returns"],
        block_tokens=BLOCK,
        snapshots=runner.layout is not None,
    ) as store:
        engine = Engine(
            runner, runner.cache(), limits=Limits(max_running=4), store=store, load_timeout=5.0
        )
        for talk in range(TALKS):
            text = prompt(30, 2 * talk)
            (first,) = engine.generate([text], SamplingParams(max_tokens=COUNT))
            assert engine._offload._mover.flush(5.0)
            engine.cache.clear()
            said = [] if thinks else first.tokens
            text = np.concatenate((text, said, prompt(10, 2 * talk + 1))).astype(np.int32)
            (second,) = engine.generate([text], SamplingParams(max_tokens=COUNT))
            engine.cache.clear()
            if talk >= TALKS - 2:
                assert [*second.tokens] == bench.greedy(text, COUNT)
            loaded.append(second.loaded_tokens)
        assert engine.close()
        store.check()
        figures = store.stats()
        conversations = store._tiered.conversations
        conversations.check()
        assert sum(conversations.returns._returns) == pytest.approx(TALKS, rel=0.01)
    return figures, loaded


def test_answers_that_no_prompt_contains_are_written_no_longer(make_bench, prompt, tmp_path):
    figures, loaded = serve(make_bench, prompt, tmp_path)
    assert figures.unread_tokens >= TALKS * (COUNT - 1) // 2  # a quarter of the answers
    assert loaded == [30] * TALKS  # the whole first prompt, as if all was written


def test_answers_that_prompts_contain_are_written(make_bench, prompt, tmp_path):
    figures, loaded = serve(make_bench, prompt, tmp_path, thinks=False)
    assert figures.unread_tokens == 0
    assert min(loaded) >= 45


def test_models_with_windows(make_bench, prompt, tmp_path):
    figures, loaded = serve(make_bench, prompt, tmp_path, family="gemma3")
    assert figures.unread_tokens >= TALKS * (COUNT - 1) // 2
    assert set(loaded) == {28}  # whole pages


def test_an_answer_that_may_be_read_is_held_back_and_written_at_its_end(
    make_bench, prompt, tmp_path
):
    """Answers of one length are never read, those of another always: the end tells which it is."""
    bench = make_bench("llama", page_size=4, num_pages=96)
    with KVStore(bench.runner.geometry, model="tiny@1", block_tokens=BLOCK) as store:
        engine = Engine(bench.runner, bench.runner.cache(), store=store, load_timeout=5.0)
        for talk in range(30):
            text, long = prompt(20, 2 * talk), talk % 2
            (first,) = engine.generate([text], SamplingParams(max_tokens=40 if long else 12))
            said = [] if long else first.tokens
            text = np.concatenate((text, said, prompt(9, 2 * talk + 1))).astype(np.int32)
            engine.generate([text], SamplingParams(max_tokens=1))
        assert store.worth(12) < 12
        before = store.stats().unread_tokens
        engine.cache.clear()
        (first,) = engine.generate([text], SamplingParams(max_tokens=12))
        assert engine._offload._mover.flush(5.0)
        assert store.lookup([*text, *first.tokens]).tokens >= len(text) + 8
        assert store.stats().unread_tokens == before
        engine.generate([text], SamplingParams(max_tokens=40))
        assert store.stats().unread_tokens > before
        assert engine.close()


def holding_back(make_bench, prompt, *, family="llama", talks=14, contained=0):
    """Return an engine in the middle of an answer that it holds back, and its store.

    Of each answer so far, the next prompt ``contained`` some tokens.
    """
    bench = make_bench(family, page_size=4, num_pages=1024)
    runner = bench.runner
    snapshots = runner.layout is not None
    store = KVStore(runner.geometry, model="tiny@1", block_tokens=BLOCK, snapshots=snapshots)
    engine = Engine(runner, runner.cache(), store=store, load_timeout=5.0)
    texts = [prompt(20, 2 * talk) for talk in range(talks)]
    done = engine.generate(texts, SamplingParams(max_tokens=60))
    assert engine._offload._mover.flush(5.0)
    said = [np.array(one.choices[0].tokens[:contained], np.int32) for one in done]
    texts = [
        np.concatenate((text, said[talk], prompt(9, 2 * talk + 1)))
        for talk, text in enumerate(texts)
    ]
    engine.generate(texts, SamplingParams(max_tokens=1))
    assert store.worth(44) <= contained
    request = engine.add(prompt(20, 999), SamplingParams(max_tokens=60))
    while request.live[0].computed < 64:
        engine.step()
    answer = request.live[0]
    assert engine._offload._mover.flush(5.0)
    assert store.lookup(answer.tokens()).tokens <= 20 + contained
    return engine, store, answer


def with_states(kept_answers, *, talks=14):
    """Return an engine of a model with states, its store, and a new answer behind a checkpoint.

    Prompts have 64 tokens and a checkpoint behind 60, answers have 40 and one every 16. Later
    prompts contain ``kept_answers`` of these.
    """
    plain = amplified("lfm2")
    geometry = KVGeometry.from_config(plain.config, dtype="float32")
    runner = Runner(copy.deepcopy(plain), geometry, num_pages=2000, page_size=4)
    layout = dataclasses.replace(runner.layout, answer_tokens=16)
    object.__setattr__(runner.plan, "layout", layout)
    store = KVStore(geometry, model="tiny@1", block_tokens=32, snapshots=True)
    engine = Engine(runner, runner.cache(), store=store, load_timeout=20)
    texts = [few(64, 2 * talk) for talk in range(talks)]
    done = engine.generate(texts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert engine._offload._mover.flush(5.0)
    said = [one.choices[0].tokens[:kept_answers] for one in done]
    texts = [
        np.concatenate((text, tokens, few(9, 2 * talk + 1))).astype(np.int32)
        for talk, (text, tokens) in enumerate(zip(texts, said, strict=True))
    ]
    engine.generate(texts, SamplingParams(max_tokens=1, ignore_eos=True))
    request = engine.add(few(64, 999), SamplingParams(max_tokens=40, ignore_eos=True))
    while request.live[0].computed < 95:
        engine.step()
    assert engine._offload._mover.flush(5.0)
    return engine, store, request.live[0]


def few(count, seed):
    return np.random.default_rng(seed).integers(3, 64, count, dtype=np.int32)


def position(store, tokens):
    """Return the longest position at which the store has a snapshot."""
    found = store.get_snapshot(tokens)
    return 0 if found is None else found.tokens


def test_states_of_answers_that_no_prompt_contains_are_written_no_longer():
    engine, store, answer = with_states(0)
    before, text = store.stats(), answer.request.prompt
    held = answer.trail.snapshots
    assert [len(write.tokens) for write in held] == [76, 92]
    tokens = finish(engine, answer)
    assert engine._offload._mover.flush(5.0)
    after = store.stats()
    assert after.put_tokens == before.put_tokens
    assert after.unread_tokens - before.unread_tokens == 92 - 64
    assert position(store, [*text, *tokens]) == 60
    assert engine._offload._mover._held_bytes == 0
    assert engine.close()
    store.close()


def test_states_of_answers_that_prompts_contain_are_written_at_once():
    engine, store, answer = with_states(40, talks=3)
    assert position(store, answer.tokens()) == 92
    assert not answer.trail.snapshots
    assert store.stats().unread_tokens == 0
    assert engine.close()
    store.close()


def finish(engine, answer):
    """Run until the answer has ended; return its tokens."""
    deltas = []
    while answer.request.id in engine._scheduler.requests:
        deltas += engine.step()
    assert deltas[-1].error is None
    return [*deltas[-1].completion.choices[0].tokens]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_preempted_answer_reads_what_was_held_back(make_bench, prompt, family):
    engine, store, answer = holding_back(make_bench, prompt, family=family)
    text, before = answer.request.prompt, engine.stats().loaded_tokens
    engine._scheduler.preempt(answer)
    assert engine._offload._mover.flush(5.0)
    engine.cache.clear()
    generated = finish(engine, answer)
    assert engine.stats().loaded_tokens - before == 64  # all that was computed
    assert engine.close()
    store.close()
    assert generated == make_bench(family, page_size=4, num_pages=96).greedy(text, 60)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_token_of_an_answer_that_is_read_in_part_is_stored_or_counted(
    make_bench, prompt, family
):
    """A window has passed the end of what is worth storing when that is known."""
    engine, store, answer = holding_back(make_bench, prompt, family=family, contained=18)
    text, before = answer.request.prompt, store.stats()
    tokens = [*text, *finish(engine, answer)]
    assert engine._offload._mover.flush(5.0)
    stored = position(store, tokens) if store.snapshots else store.lookup(tokens).tokens
    after = store.stats()
    assert 20 < stored <= 20 + 18
    assert after.unread_tokens - before.unread_tokens in range(79 - stored, 79 - stored + 4)
    assert engine.close()
    store.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_several_answers_of_a_request_are_held_back_each_for_itself(make_bench, prompt, family):
    """With one ``n`` of them preempted in the middle, which reads what was held back of it."""
    engine, store, first = holding_back(make_bench, prompt, family=family)
    engine.abort(first.request)
    text, before = prompt(20, 777), store.stats()
    sampling = SamplingParams(max_tokens=60, n=3, temperature=1.0, seed=5)
    request = engine.add(text, sampling)
    while len(request.live) < 3 or request.live[0].computed < 60:
        engine.step()
    assert all(answer.trail.held == 20 for answer in request.live)
    engine._scheduler.preempt(request.live[-1])
    assert engine._offload._mover.flush(5.0)
    deltas = []
    while request.id in engine._scheduler.requests:
        deltas += engine.step()
    told = [choice.tokens for choice in deltas[-1].completion.choices]
    assert engine._offload._mover.flush(5.0)
    after = store.stats()
    assert after.unread_tokens - before.unread_tokens in range(2 * 59, 2 * 59 + 59 // BLOCK * BLOCK)
    assert engine.close()
    store.close()
    alone = Engine(engine.runner, engine.runner.cache())
    (done,) = alone.generate([text], sampling)
    assert [choice.tokens for choice in done.choices] == told


@pytest.mark.parametrize("talks", [14, 48])
def test_an_answer_that_is_aborted_is_written_or_counted(make_bench, prompt, talks):
    """No answer was aborted before: what is known of all answers decides, once it is enough."""
    engine, store, answer = holding_back(make_bench, prompt, talks=talks)
    tokens, before = answer.tokens(), store.stats().unread_tokens
    engine.abort(answer.request)
    assert engine._offload._mover.flush(5.0)
    stored = store.lookup(tokens).tokens
    assert stored == (64 if talks == 14 else 20)
    assert store.stats().unread_tokens - before == 64 - stored
    missing = [one for one in store.why(tokens, stored) if one.what == "refused"]
    assert [one.detail for one in missing] == ([] if talks == 14 else ["unread"])
    assert engine.close()
    store.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_store_that_its_owner_closes_fails_no_answer(make_bench, prompt, family):
    engine, store, answer = holding_back(make_bench, prompt, family=family)
    text = answer.request.prompt
    store.close()
    generated = finish(engine, answer)
    assert generated == make_bench(family, page_size=4, num_pages=96).greedy(text, 60)
    engine.close()
