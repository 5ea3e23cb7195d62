"""An engine's KV belongs to its model: caches, stores and files of other models are not used."""

from __future__ import annotations

import argparse
import gc
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeep.cli import main
from kvkeep.cli.model import load
from kvkeep.cli.tiers import open_store
from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.engine import Engine, Runner, SamplingParams
from kvkeep.serve.models import bundled_model
from kvkeep.store import KVStore, model_identity

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

FEW = SamplingParams(max_tokens=6)
PAGE = 8


def runner_of(model, num_pages=32):
    geometry = KVGeometry.from_config(model.config, dtype="float32")
    return Runner(model, geometry, num_pages=num_pages, page_size=PAGE)


def answer(engine, tokens):
    return engine.generate([tokens], FEW)[0]


def test_a_runner_is_the_model_it_was_given(make_model):
    """The identity is of the model before its attention was replaced and its layers packed."""
    identity = model_identity(make_model("llama"))
    one, two = runner_of(make_model("llama")), runner_of(make_model("llama"), num_pages=16)
    assert one.identity == two.identity == identity
    assert runner_of(make_model("llama", rms_norm_eps=0.1)).identity != identity


def test_a_model_is_taken_over_once(make_model):
    runner = runner_of(make_model("llama"))
    with pytest.raises(IllegalStep, match="taken over by a Runner before"):
        runner_of(runner.model)


# --- one cache, one memory -------------------------------------------------------------------


def test_two_runners_on_one_cache_are_refused(make_model, prompt):
    """The second would read pages of the first from tensors of its own."""
    cache = PagedCache(32, PAGE)
    one, two = runner_of(make_model("llama")), runner_of(make_model("llama"))
    first = Engine(one, cache)
    told = answer(first, prompt(30, 1))
    with pytest.raises(InvalidValue, match="give each runner a PagedCache of its own"):
        Engine(two, cache)
    again = answer(first, prompt(30, 1))
    assert (again.tokens, again.cached_tokens) == (told.tokens, 29)


def test_two_caches_on_one_runner_are_refused(make_model, prompt):
    """Each would overwrite the other's pages under the same ids."""
    runner = runner_of(make_model("llama"))
    first = Engine(runner, PagedCache(32, PAGE))
    told = answer(first, prompt(30, 1))
    running = first.add(prompt(20, 2), FEW)
    second = Engine(runner, PagedCache(32, PAGE))
    for step in (first.step, lambda: first.add(prompt(30, 1), FEW)):
        with pytest.raises(IllegalStep, match="give each cache a runner of its own"):
            step()
    first.abort(running)
    assert answer(second, prompt(30, 1)).tokens == told.tokens


def test_an_engine_after_an_engine_goes_on_with_its_cache(make_model, prompt):
    cache, runner = PagedCache(32, PAGE), runner_of(make_model("llama"))
    first = Engine(runner, cache)
    told = answer(first, prompt(30, 1))
    first.close()
    del first
    again = answer(Engine(runner, cache), prompt(30, 1))
    assert (again.tokens, again.cached_tokens) == (told.tokens, 29)


def test_a_cache_outlives_its_runner_empty(make_model, prompt):
    cache, runner = PagedCache(32, PAGE), runner_of(make_model("llama"))
    told = answer(Engine(runner, cache), prompt(30, 1))
    del runner
    gc.collect()
    other = runner_of(make_model("llama"))
    with pytest.raises(InvalidValue, match="memory that is gone"):
        Engine(other, cache)
    cache.clear()
    again = answer(Engine(other, cache), prompt(30, 1))
    assert (again.tokens, again.cached_tokens) == (told.tokens, 0)


# --- one store, one model --------------------------------------------------------------------


def test_a_store_of_another_model_is_refused(make_model):
    one, two = runner_of(make_model("llama")), runner_of(make_model("llama", rms_norm_eps=0.1))
    tiers = ["memory://16MiB"]
    for named in ({"model": "mine@1"}, {"model": "mine", "revision": one.identity}):
        with KVStore(one.geometry, **named, tiers=tiers, block_tokens=PAGE) as store:
            Engine(one, PagedCache(32, PAGE), store=store).close()
            with pytest.raises(InvalidValue, match="'mine' holds KV of the model loaded-"):
                Engine(two, PagedCache(32, PAGE), store=store)
            Engine(one, PagedCache(32, PAGE), store=store).close()


# --- a model that changes while it is served -------------------------------------------------


@torch.no_grad()
def in_place(model):
    model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)


def through_data(model):
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(1.5)


def epsilon(model):
    model.model.norm.variance_epsilon = 0.1


@pytest.mark.parametrize("change", [in_place, through_data, epsilon])
def test_a_model_that_changes_is_noticed_at_the_next_request(make_model, prompt, change):
    """Its packed layers would go on with the old weights, for some batch sizes."""
    runner = runner_of(make_model("llama"))
    engine = Engine(runner, PagedCache(32, PAGE))
    answer(engine, prompt(30, 1))
    change(runner.model)
    for _ in range(2):
        with pytest.raises(IllegalStep, match="the model that this runner serves was changed"):
            engine.add(prompt(30, 1), FEW)
    assert not engine.has_work


def test_a_busy_engine_looks_once_a_second(make_model, prompt, monkeypatch):
    runner = runner_of(make_model("llama"))
    engine = Engine(runner, PagedCache(32, PAGE))
    looks, check, now = [], runner.check_model, [100.0]
    monkeypatch.setattr(runner, "check_model", lambda: (looks.append(now[0]), check()))
    monkeypatch.setattr("kvkeep.serve.engine.engine.time.monotonic", lambda: now[0])
    for at in (100.0, 100.2, 100.9, 101.0, 101.5):
        now[0] = at
        engine.add(prompt(5, 1), FEW)
    assert looks == [100.0, 101.0]


# --- what `kvkeep serve` does ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(bundled_model(), tmp_path / "model")
    return tmp_path / "model"


def serve(folder, tokens, *, store=True, meanwhile=None):
    """Run a server once: load, open the store, answer, close; return tokens and cached tokens."""
    args = argparse.Namespace(
        model=folder, memory="16MiB", page_size=16, device="cpu", block_tokens=None,
        tiering="inclusive",
    )  # fmt: skip
    runner, tokenizer = load(args, dtype="float32")
    if meanwhile is not None:
        meanwhile()
    tier = f"file://{folder.parent}/store?size=256MiB"
    opened = open_store(args, runner, name="model", tiers=[tier]) if store else None
    engine = Engine(runner, runner.cache(), tokenizer, store=opened)
    completion = answer(engine, tokens)
    engine.close()
    if opened is not None:
        opened.close()
    return completion.tokens, completion.cached_tokens


def edit(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rescale(folder, factor):
    """Replace the weights as an update does: write to another name, then rename."""
    file = folder / "model.safetensors"
    scaled = {name: (value.float() * factor).to(value.dtype)
              for name, value in load_file(file).items()}  # fmt: skip
    save_file(scaled, folder / "new", metadata={"format": "pt"})
    (folder / "new").rename(file)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(10, 4000, 400)


def test_a_server_after_a_server_finds_its_kv(folder, tokens):
    first, cached = serve(folder, tokens)
    assert cached == 0
    assert serve(folder, tokens) == (first, 399)
    moved = folder.rename(folder.parent / "moved")
    assert serve(moved, tokens) == (first, 399)


YARN = {"rope_theta": 32000.0, "rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": YARN},
        {"rms_norm_eps": 1e-2},
    ],
    ids=["rope_theta", "yarn", "rms_norm_eps"],
)
def test_an_edited_configuration_is_another_model(folder, tokens, fields):
    before, _ = serve(folder, tokens)
    edit(folder, **fields)
    expected, _ = serve(folder, tokens, store=False)
    assert expected != before or "yarn" in str(fields)
    assert serve(folder, tokens) == (expected, 0)
    assert serve(folder, tokens) == (expected, 399)


def test_weights_that_are_replaced_while_they_are_loaded(folder, tokens):
    """KV computed with the old weights is not found by a server with the new ones."""
    serve(folder, tokens, meanwhile=lambda: rescale(folder, 1.2))
    expected, _ = serve(folder, tokens, store=False)
    assert serve(folder, tokens) == (expected, 0)


def test_pickled_weights_beside_other_safetensors(folder, tokens):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.ones(3)}, folder / "extra.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    serve(folder, tokens)
    halved = {name: value / 2 for name, value in weights.items()}
    torch.save(halved, folder / "pytorch_model.bin")
    expected, _ = serve(folder, tokens, store=False)
    assert serve(folder, tokens) == (expected, 0)


def test_an_adapter_beside_the_model_that_is_swapped(folder, tokens, make_adapter):
    make_adapter(folder, seed=1)
    serve(folder, tokens)
    make_adapter(folder, seed=2)
    expected, _ = serve(folder, tokens, store=False)
    assert serve(folder, tokens) == (expected, 0)


@pytest.fixture
def make_adapter():
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    def make(folder, seed):
        base = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
        torch.manual_seed(seed)
        base.add_adapter(
            peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
        )
        base.save_pretrained(folder.parent / f"adapter{seed}")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(folder.parent / f"adapter{seed}" / name, folder)

    return make


# --- models that cannot be served ------------------------------------------------------------


def test_a_model_that_cannot_be_served_is_one_line(tmp_path, capsys):
    """Doge passes its attention a mask of its own, which once ended in an assertion."""
    import transformers

    config = transformers.DogeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, keep_window_size=8,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["serve", "--port", "0", "--memory", "1MiB", "--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvkeep: error: DogeAttention hands its attention a mask of its own")
