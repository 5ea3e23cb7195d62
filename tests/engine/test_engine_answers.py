"""The engine over a store that learns which answers are never read again."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.serve.engine import Engine, Limits, SamplingParams
from kvkeep.store import KVStore

pytestmark = pytest.mark.model

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
        conversations = store._tiered.returns.conversations
        conversations.check()
        returned = conversations.returns._tenants
        assert sum(tenant.returns for tenant in returned.values()) == pytest.approx(TALKS, rel=0.01)
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


def holding_back(make_bench, prompt, *, family="llama", talks=14):
    """Return an engine in the middle of an answer that it holds back, and its store."""
    bench = make_bench(family, page_size=4, num_pages=1024)
    runner = bench.runner
    snapshots = runner.layout is not None
    store = KVStore(runner.geometry, model="tiny@1", block_tokens=BLOCK, snapshots=snapshots)
    engine = Engine(runner, runner.cache(), store=store, load_timeout=5.0)
    texts = [prompt(20, 2 * talk) for talk in range(talks)]
    engine.generate(texts, SamplingParams(max_tokens=60))
    assert engine._offload._mover.flush(5.0)
    texts = [np.concatenate((text, prompt(9, 2 * talk + 1))) for talk, text in enumerate(texts)]
    engine.generate(texts, SamplingParams(max_tokens=1))
    assert store.worth(44) == 0
    request = engine.add(prompt(20, 999), SamplingParams(max_tokens=60))
    while request.live[0].computed < 64:
        engine.step()
    answer = request.live[0]
    assert engine._offload._mover.flush(5.0)
    assert store.lookup(answer.tokens()).tokens <= 20
    return engine, store, answer


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
