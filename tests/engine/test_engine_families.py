"""Models of all hybrid families served by the engine: the tokens that each gives by itself."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch

from hybrid_families import FAMILIES, NOT_RESUMING, amplified
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.engine import Engine, Limits, Runner, SamplingParams
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

PAGE = 4
PAGES = 3000
SERVED = [family for family in FAMILIES if family not in NOT_RESUMING]
FEW = SamplingParams(max_tokens=6, ignore_eos=True)


class Model:
    """A model by itself, and a runner of it."""

    def __init__(self, family):
        self.plain = amplified(family)
        geometry = KVGeometry.from_config(self.plain.config, dtype="float32")
        self.runner = Runner(copy.deepcopy(self.plain), geometry, num_pages=PAGES, page_size=PAGE)
        self.known = {}

    def alone(self, prompt, count=6, guess=()):
        """The greedy tokens behind ``prompt``, each the likeliest after all tokens before it.

        One pass over ``prompt`` and a ``guess`` of them tells as many as are right, and one more.
        """
        key = tuple(map(int, prompt)), count
        if key not in self.known:
            tokens, ahead = list(key[0]), list(guess)
            with torch.inference_mode():
                while (left := len(key[0]) + count - len(tokens)) > 0:
                    ids = torch.tensor([[*tokens, *ahead[: left - 1]]])
                    logits = self.plain(input_ids=ids, use_cache=False).logits
                    for token in logits[0, len(tokens) - 1 :].argmax(-1).tolist():
                        tokens.append(token)
                        if not ahead or ahead.pop(0) != token:
                            ahead = []
                            break
            self.known[key] = tuple(tokens[-count:])
        return self.known[key]

    def store(self, *tiers, **more):
        whole = self.runner.layout is None
        return KVStore(
            self.runner.geometry, model="tiny@1", tiers=tiers, block_tokens=32,
            snapshots=not whole, **more,
        )  # fmt: skip

    def ruin(self):
        """Fill all pages with what would show in the tokens."""
        groups = self.runner.groups
        if groups is not None:
            pages = np.arange(PAGES, dtype=np.int32)
            filled = torch.full((PAGES, groups.plan.page_bytes), 0x45, dtype=torch.uint8)
            groups.write(pages, filled)


@cache
def model(family):
    return Model(family)


def tokens(count, seed):
    return np.random.default_rng(seed).integers(3, 64, count).tolist()


def answers(engine, prompts, params=FEW):
    done = engine.generate(prompts, params)
    engine.cache.check()
    return done, [tuple(one.choices[0].tokens) for one in done]


TRUNK = tokens(70, 1)
PROMPTS = [[*TRUNK[:at], *tokens(3 + at % 7, at)] for at in (70, 65, 40)]


@pytest.mark.parametrize("family", SERVED)
def test_a_batch_gives_what_each_prompt_gives_alone(family):
    """In chunks that end off the grid; again with what is cached, and with what eviction left."""
    served = model(family)
    served.ruin()
    engine = Engine(served.runner, served.runner.cache(), limits=Limits(step_tokens=37))
    got = answers(engine, PROMPTS)[1]
    want = [served.alone(prompt, guess=one) for prompt, one in zip(PROMPTS, got, strict=True)]
    assert got == want
    params = SamplingParams(max_tokens=6, ignore_eos=True, draft_tokens=3)
    done, again = answers(engine, PROMPTS, params)
    assert again == want
    assert all(one.cached_tokens >= 64 for one in done[:2])
    cache = engine.cache
    cache.evict(cache.stats().pages_used // 2)
    assert answers(engine, PROMPTS)[1] == want


@pytest.mark.parametrize("family", SERVED)
def test_a_pool_that_is_too_small(family):
    """Answers are preempted, and come to the same tokens."""
    served = model(family)
    served.ruin()
    cache = served.runner.cache()
    room = served.runner.plan.pages_for(90) * 3 // 2
    states = 0 if cache.groups is None else cache.groups.state_pages
    other = cache.open([1] * PAGE * (PAGES - room - states))
    engine = Engine(served.runner, cache, limits=Limits(step_tokens=37))
    assert answers(engine, PROMPTS)[1] == [served.alone(prompt) for prompt in PROMPTS]
    other.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "gpt_oss", "kimi_linear"])
def test_forks(family):
    served = model(family)
    served.ruin()
    engine = Engine(served.runner, served.runner.cache())
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=3)
    (done,) = engine.generate(PROMPTS[:1], params)
    assert {tuple(choice.tokens) for choice in done.choices} == {served.alone(PROMPTS[0])}
    engine.cache.check()


@pytest.mark.parametrize("family", SERVED)
def test_a_restart(family, tmp_path):
    """A new process finds KV, windows and states on disk, and gives the same tokens."""
    served = model(family)
    want = [served.alone(prompt) for prompt in PROMPTS]
    for visit in range(2):
        served.ruin()
        with served.store("memory://16MiB", f"file://{tmp_path}/tier?size=256MiB") as store:
            engine = Engine(served.runner, served.runner.cache(), store=store, load_timeout=20)
            done, got = answers(engine, PROMPTS)
            assert got == want
            assert engine.close()
        loaded = sum(one.loaded_tokens for one in done)
        assert loaded >= 64 if visit else loaded == 0
        assert all(one.cached_tokens >= 64 for one in done[:2]) or not visit


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "gpt_oss"])
def test_damaged_records_are_misses(family, tmp_path):
    served = model(family)
    want = served.alone(PROMPTS[0])
    places = "memory://16MiB", f"file://{tmp_path}/tier?size=256MiB"
    with served.store(*places) as store:
        engine = Engine(served.runner, served.runner.cache(), store=store)
        assert answers(engine, PROMPTS[:1])[1] == [want]
        assert engine.close()
    files = sorted(
        path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 2048
    )
    for number, file in enumerate(files):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        file.write_bytes(raw)
        served.ruin()
        with served.store(*places) as store:
            engine = Engine(served.runner, served.runner.cache(), store=store, load_timeout=20)
            assert answers(engine, PROMPTS[:1])[1] == [want], number
            engine.close()
    assert len(files) >= 3


def test_the_next_turn_finds_the_answer_too(tmp_path):
    served = model("lfm2")
    first = SamplingParams(max_tokens=300, ignore_eos=True)
    with served.store("memory://64MiB") as store:
        engine = Engine(served.runner, served.runner.cache(), store=store)
        ((done,), _) = answers(engine, [TRUNK], first)
        assert engine.close()
        turn = [*TRUNK, *done.choices[0].tokens, 5, 6, 7]
        engine = Engine(served.runner, served.runner.cache(), store=store, load_timeout=20)
        ((again,), (got,)) = answers(engine, [turn])
        assert got == served.alone(turn)
        assert again.loaded_tokens >= 256
        engine.close()


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text", "mistral"])
def test_ends_of_blocks_that_have_left_the_window_are_not_stored(family, caplog):
    """The pool has the prompt up to behind the end of a block, and only the window there."""
    served = model(family)
    served.ruin()
    cache = served.runner.cache()
    begun, prompt = tokens(101, 7), [*tokens(101, 7), *tokens(9, 8)]
    answers(Engine(served.runner, cache), [begun])
    with served.store("memory://64MiB") as store:
        limits = Limits(step_tokens=5, max_running=2)
        engine = Engine(served.runner, cache, store=store, limits=limits)
        ((done,), got) = answers(engine, [prompt])
        assert done.cached_tokens == 100
        assert engine.close()
        served.ruin()
        engine = Engine(served.runner, served.runner.cache(), store=store, load_timeout=20)
        ((again,), same) = answers(engine, [prompt])
        assert again.loaded_tokens >= 104
        assert engine.close()
    assert got == same == [served.alone(prompt)]
    assert not caplog.records


@pytest.mark.parametrize("count", range(98, 103))
def test_the_end_of_an_answer_is_stored_though_the_window_begins_inside_a_page(count, caplog):
    plain = amplified("gemma3_text", sliding_window=7)
    geometry = KVGeometry.from_config(plain.config, dtype="float32")
    runner = Runner(plain, geometry, num_pages=400, page_size=PAGE)
    prompt = tokens(90, 9)
    params = SamplingParams(max_tokens=count - 90, ignore_eos=True)
    with KVStore(geometry, model="tiny@1", block_tokens=32, snapshots=True) as store:
        engine = Engine(runner, runner.cache(), store=store)
        ((done,), _) = answers(engine, [prompt], params)
        assert engine.close()
        turn = [*prompt, *done.choices[0].tokens, 5, 6, 7]
        engine = Engine(runner, runner.cache(), store=store, load_timeout=20)
        ((again,), (got,)) = answers(engine, [turn])
        assert again.loaded_tokens >= (count - 1) // PAGE * PAGE
        assert engine.close()
    assert [got] == answers(Engine(runner, runner.cache()), [turn])[1]
    assert not caplog.records


def test_stores_of_the_wrong_kind_are_refused():
    served = model("gemma3_text")
    with (
        KVStore(served.runner.geometry, model="tiny@1", block_tokens=32) as store,
        pytest.raises(InvalidValue, match=r"needs KVStore\(…, snapshots=True\)"),
    ):
        Engine(served.runner, served.runner.cache(), store=store)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "falcon_h1", "lfm2", "lfm3"])
def test_a_hit_is_the_cold_run_bit_for_bit(family, tmp_path):
    """Cold passes end at the checkpoint where a hit begins, so both compute the same sums."""
    served = model(family)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    prompt = [*TRUNK, *TRUNK[:30], 5]
    seen = []
    with served.store("memory://16MiB") as store:
        for _ in range(2):
            served.ruin()
            engine = Engine(served.runner, served.runner.cache(), store=store, load_timeout=20)
            for _ in range(2):
                (done,) = engine.generate([prompt], params)
                seen.append((done.choices[0].tokens, done.choices[0].logprobs))
                reused = done.cached_tokens, done.loaded_tokens
            assert engine.close()
            assert reused[0] >= 64
    assert len(seen) == 4
    assert all(one == seen[0] for one in seen)
