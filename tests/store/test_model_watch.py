"""`ModelWatch`: what a live model changes is noticed at the next look, and nothing else is."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.store.identity import ModelWatch


@pytest.fixture
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def attention(model):
    return model.model.layers[1].self_attn


def weight(model):
    return attention(model).k_proj.weight


@torch.no_grad()
def in_place(model):
    weight(model).mul_(1.5)


@torch.no_grad()
def one_element(model):
    weight(model)[3, 7] += 1


def through_data(model):
    weight(model).data.mul_(1.5)


def other_data(model):
    weight(model).data = weight(model).data * 1.5


def transposed_data(model):
    square = attention(model).q_proj.weight
    square.data = square.data.t()


def replaced(model):
    attention(model).k_proj.weight = nn.Parameter(weight(model).detach() * 1.5)


def replaced_by_the_same(model):
    attention(model).k_proj.weight = nn.Parameter(weight(model).detach().clone())


def buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def other_buffer(model):
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 0.5, persistent=False)


def epsilon(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def scaling(model):
    attention(model).scaling *= 2


def swapped(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def added(model):
    attention(model).k_proj.lora_a = nn.Linear(2, 2)


def removed(model):
    del model.model.layers[1]


def deleted(model):
    del attention(model).k_proj.bias
    attention(model).k_proj.bias = nn.Parameter(torch.zeros(16))


def patched(model):
    attention(model).forward = lambda *_, **__: None


def other_class(model):
    class Linear(nn.Linear):
        pass

    attention(model).k_proj.__class__ = Linear


def hook(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def eager(model):
    model.set_attn_implementation("eager")


def config(model):
    model.config.rope_parameters["rope_theta"] = 3.0


def new_attribute(model):
    attention(model).k_proj.disable_adapters = True


NOTICED = [
    in_place, one_element, through_data, other_data, transposed_data, replaced,
    replaced_by_the_same, buffer, other_buffer, epsilon, scaling, swapped, added, removed, deleted,
    patched, other_class, hook, eager, config, new_attribute,
]  # fmt: skip


@pytest.mark.parametrize("change", NOTICED)
def test_a_change_is_noticed(model, change):
    snapshot = ModelWatch(model)
    assert snapshot.changed() is None
    change(model)
    said = snapshot.changed()
    assert said is not None
    assert snapshot.changed() == said  # and stays
    if change is not through_data:
        assert snapshot.changed(samples=False) == said
    assert ModelWatch(model).changed() is None


def test_containers_that_are_changed_in_place(model):
    """As PEFT does with the scaling of its layers, by the name of the adapter."""
    attention(model).lora_scaling = {"a": 2.0}
    attention(model).active = ["a"]
    for change in (
        lambda: attention(model).lora_scaling.update(a=0.0),
        attention(model).active.clear,
        lambda: attention(model).active.append(torch.ones(3)),
    ):
        snapshot = ModelWatch(model)
        assert snapshot.changed() is None
        change()
        assert "layers.1.self_attn" in snapshot.changed()


def test_tensors_that_are_no_buffers(model):
    attention(model).table = torch.ones(3)
    for change in (
        lambda: attention(model).table.mul_(2),
        lambda: setattr(attention(model), "table", torch.ones(3)),
        lambda: setattr(attention(model), "table", 3),
    ):
        snapshot = ModelWatch(model)
        assert snapshot.changed() is None
        change()
        assert "table" in snapshot.changed()


class Factor:
    def __init__(self, value):
        self.value = value


class Times(Factor):
    def __call__(self, _module, _given, out):
        return out * self.value


def test_what_hooks_hold(model):
    vector, other, times = torch.ones(32), nn.Linear(32, 32), Times(1.0)
    shift, empty = torch.ones(32), Factor(1.0)
    del empty.value
    factor, scales = Factor(1.0), [torch.ones(3)]
    attention(model).k_proj.register_forward_hook(
        partial(lambda one, _, __, out: out * one.value, factor)
    )
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + vector + other(out))
    attention(model).v_proj.register_forward_hook(times)
    attention(model).o_proj.register_forward_hook(
        partial(lambda _, __, out, by: out + by, by=shift)
    )
    attention(model).empty = empty
    attention(model).scales = scales
    for change in (
        lambda: vector.mul_(2),
        lambda: other.weight.data.mul_(2),
        lambda: setattr(other, "bias", None),
        lambda: setattr(factor, "value", 2.0),
        lambda: setattr(times, "value", 2.0),
        lambda: shift.add_(1),
        lambda: setattr(empty, "value", 2.0),
        lambda: scales[0].add_(1),
    ):
        snapshot = ModelWatch(model)
        assert snapshot.changed() is None
        change()
        assert snapshot.changed() is not None


def test_code_that_is_replaced(model, monkeypatch):
    block = attention(model)
    code = sys.modules[type(block).__module__]
    for place, name in (
        (type(block), "forward"), (code, "apply_rotary_pos_emb"),
        (nn.functional, "scaled_dot_product_attention"),
    ):  # fmt: skip
        snapshot = ModelWatch(model)
        monkeypatch.setattr(place, name, lambda *_: None)
        assert name in snapshot.changed()
        monkeypatch.undo()
        assert snapshot.changed() is None


def test_attention_that_is_registered_anew(model):
    snapshot = ModelWatch(model)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", lambda *_: None)
    try:
        assert "attention" in snapshot.changed()
    finally:
        AttentionInterface.register("sdpa", before)
    assert snapshot.changed() is None


def test_autocast(model):
    snapshot = ModelWatch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in snapshot.changed()
    assert snapshot.changed() is None


def test_checkpoints_of_gradients_do_not_count(model):
    snapshot = ModelWatch(model)
    model.activation_checkpointing_enable()
    assert snapshot.changed() is None


def test_hooks_of_every_module(model):
    snapshot = ModelWatch(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "global forward hooks" in snapshot.changed()
    finally:
        handle.remove()
    assert snapshot.changed() is None


def test_precision(model):
    snapshot = ModelWatch(model)
    torch.set_float32_matmul_precision("high")
    try:
        assert "precision" in snapshot.changed()
    finally:
        torch.set_float32_matmul_precision("highest")


def computing(model):
    model(torch.arange(20)[None], output_hidden_states=True, output_attentions=False)


def generating(model):
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model.generate(torch.arange(9)[None], **how)
    model.generate(torch.arange(9)[None], num_beams=2, cache_implementation="static", **how)


def notes(model):
    model.config.use_cache, model.config.pad_token_id = False, 3
    model.name_or_path = "elsewhere"
    model.generation_config.temperature = 2.0


@pytest.mark.parametrize(
    "use",
    [computing, generating, notes, lambda model: model.train().eval(), lambda model: None],
    ids=["computing", "generating", "notes", "training mode", "nothing"],
)
def test_what_decides_nothing_is_not(model, use):
    snapshot = ModelWatch(model)
    use(model)
    assert snapshot.changed() is None
    assert snapshot.changed() is None


def test_ropes_that_are_recomputed_are_not():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=16, rope_parameters=rope,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    snapshot = ModelWatch(model)
    with torch.no_grad():
        for tokens in (8, 40, 8):
            model(torch.arange(tokens)[None])
            assert snapshot.changed() is None


def test_a_model_made_in_inference_mode():
    """Its tensors have no versions: bytes tell."""
    with torch.inference_mode():
        model = nn.Linear(64, 64)
        snapshot = ModelWatch(model)
        assert snapshot.changed() is None
        model.weight.mul_(1.5)
        assert snapshot.changed() is not None


def test_every_kind_of_tensor_is_sampled_within_its_memory():
    model = nn.Module()
    for at, tensor in enumerate(
        (
            torch.ones(()), torch.ones(3, dtype=torch.bool), torch.empty(0, 4),
            torch.ones(100, 7)[3:5], torch.ones(9, 9).t(), torch.ones(1).expand(50),
            torch.ones(5, dtype=torch.complex64),
            torch.ones(33, dtype=torch.bfloat16),
        )
    ):  # fmt: skip
        model.register_buffer(f"b{at}", tensor)
    snapshot = ModelWatch(model)
    assert snapshot.changed() is None
    model.b7.data.add_(1)
    assert snapshot.changed() is not None
