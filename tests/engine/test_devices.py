"""The engine on a GPU says what the model alone says on a CPU; the CPU is the other variant."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_families import amplified
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.engine import Engine, Runner, SamplingParams
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3"]  # plain, windows, and both


@pytest.fixture(params=DEVICES)
def make(request, make_bench):
    def make(family: str):
        return make_bench(family, page_size=8, num_pages=96, device=request.param)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_of_shared_prefixes(make, prompt, family):
    bench = make(family)
    first, second = prompt(75, 1), prompt(75, 1)
    second[50:] = prompt(25, 2)
    with bench.cache.open(first) as sequence:
        bench.assert_right(sequence, bench.compute(sequence))
    with bench.cache.open(second) as sequence:
        assert sequence.num_cached == 50
        bench.assert_right(sequence, bench.compute(sequence))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_many_at_once(make, prompt, family):
    bench = make(family)
    prompts = [prompt(length, length) for length in (3, 40, 17, 64)]
    engine = Engine(bench.runner, bench.cache)
    for done, tokens in zip(
        engine.generate(prompts, SamplingParams(max_tokens=5)), prompts, strict=True
    ):
        bench.assert_greedy(tokens, done.tokens, 5)
    bench.cache.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_from_memory_and_a_disk(make, prompt, family, tmp_path):
    bench = make(family)
    runner, tokens = bench.runner, prompt(90, 3)
    expected = bench.greedy(tokens, 5)
    loaded = []

    def ask(store):
        bench.spoil()
        engine = Engine(runner, runner.cache(), store=store, load_timeout=30.0)
        (done,) = engine.generate([tokens], SamplingParams(max_tokens=5))
        assert engine.close(30)
        assert [*done.tokens] == expected
        loaded.append(done.loaded_tokens)

    for asked in (2, 1):  # cold and from memory; then from the disk
        with KVStore(
            runner.geometry, model="tiny@1", block_tokens=16,
            tiers=["memory://16MiB", f"file://{tmp_path}?size=64MiB"],
            snapshots=runner.layout is not None,
        ) as store:  # fmt: skip
            for _ in range(asked):
                ask(store)
            assert store.flush(30)
    assert loaded[0] == 0
    assert min(loaded[1:]) >= 64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2", "deepseek_v3", "gpt_oss"])
def test_answers_of_models_with_states_and_latents(family, device):
    plain = amplified(family)
    geometry = KVGeometry.from_config(plain.config, dtype="float32")
    runner = Runner(amplified(family).to(device), geometry, num_pages=1600, page_size=4)
    engine = Engine(runner, runner.cache())
    tokens = np.random.default_rng(6).integers(3, 64, 70, dtype=np.int32)
    prompts = [tokens, tokens[:40], tokens[::-1].copy()]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, again = (  # computed, then from the pool
        [[*done.tokens] for done in engine.generate(prompts, params)] for _ in range(2)
    )
    with torch.inference_mode():
        for prompt, answer in zip(prompts, first, strict=True):
            ids = torch.tensor([[*prompt.tolist(), *answer[:-1]]])
            logits = plain(ids, use_cache=False).logits[0, -4:]
            assert logits.argmax(-1).tolist() == answer
    assert again == first
    engine.cache.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_store_takes_and_fills_tensors_of_the_device(device, make_bench):
    geometry = make_bench("llama", page_size=8, num_pages=8).runner.geometry
    shape = (geometry.layers, 2, 64, geometry.kv_heads, geometry.head_dim)
    kv = torch.randn(shape).to(device)
    with KVStore(geometry, model="tiny@1", tiers=["memory://8MiB"], block_tokens=16) as store:
        store.put(range(64), kv)
        found, count = store.get(range(64), out=torch.zeros_like(kv))
        assert count == 64
        assert found.device == kv.device
        assert torch.equal(found, kv)
        assert torch.equal(store.get(range(64))[0], kv.cpu())
