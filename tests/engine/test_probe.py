"""The proof at load time refuses models that need more than causal attention."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.engine import Runner
from kvkeep.serve.engine.attention import batch, plan
from kvkeep.serve.engine.attention.dense import Scoring

pytestmark = pytest.mark.model

GROUPED = {"intermediate_size": 96, "num_key_value_heads": 2}


def over_pages(model, geometry=None):
    if geometry is None:
        geometry = KVGeometry.from_config(model.config, dtype="float32")
    return Runner(model, geometry, num_pages=64, page_size=4)


def small(name, **more):
    config = getattr(transformers, name)(
        vocab_size=160,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.15,
        **more,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Phi3Config", {"intermediate_size": 96, "num_key_value_heads": 2}),
        ("Olmo2Config", {"intermediate_size": 96, "num_key_value_heads": 2}),
        ("Starcoder2Config", {"intermediate_size": 96, "num_key_value_heads": 2}),
        (
            "MixtralConfig",
            {"intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 4},
        ),
        ("GPTNeoXConfig", {"intermediate_size": 96}),
        ("GPT2Config", {}),
    ],
)
def test_families_beyond_the_five_prove_themselves(name, more):
    assert over_pages(small(name, **more)).num_pages == 64


def test_a_mask_of_its_own_is_found_out():
    """Doge masks by its values, which once ended in an assertion."""
    with pytest.raises(UnsupportedModel, match="DogeAttention hands its attention a mask"):
        over_pages(small("DogeConfig", head_dim=16, keep_window_size=8, **GROUPED))


def gpt_oss():
    model = small(
        "GptOssConfig",
        **GROUPED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def test_attention_sinks_that_are_ignored_are_found_out(monkeypatch):
    over_pages(gpt_oss())
    monkeypatch.setattr(batch, "Scoring", lambda scale, softcap, _: Scoring(scale, softcap))
    with pytest.raises(UnsupportedModel, match="other logits over pages than by itself"):
        over_pages(gpt_oss())


def test_attention_that_does_not_ask_the_interface():
    model = small("StableLmConfig", intermediate_size=96, num_key_value_heads=4)
    with pytest.raises(UnsupportedModel, match="StableLm"):
        over_pages(model)


def test_tokens_that_mix_with_their_neighbours(make_model):
    model = make_model("llama")
    inner = model.model.norm.forward
    model.model.norm.forward = lambda x: inner(x + x.roll(1, dims=1))
    with pytest.raises(UnsupportedModel, match="other logits"):
        over_pages(model)


def test_windows_that_the_geometry_does_not_know(make_model):
    model = make_model("mistral")
    with pytest.raises(UnsupportedModel, match="attention to all tokens in layer 0: there"):
        over_pages(model, KVGeometry(3, 2, 16, "float32"))


@pytest.mark.parametrize("shape", [(3, 4, 16), (3, 2, 8), (2, 2, 16), (4, 2, 16)])
def test_a_geometry_of_another_model(make_model, shape):
    with pytest.raises(UnsupportedModel):
        over_pages(make_model("llama"), KVGeometry(*shape, "float32"))


def test_a_model_over_pages_refuses_to_run_without_them(make_model):
    from kvkeep.core.errors import IllegalStep

    model = make_model("llama")
    over_pages(model)
    with pytest.raises(IllegalStep, match=r"Runner\.forward"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_half_precision_is_proved_too(make_model):
    model = make_model("qwen3").to(torch.bfloat16)
    runner = over_pages(model, KVGeometry.from_config(model.config, dtype="bfloat16"))
    assert runner.geometry.dtype == "bfloat16"


@pytest.mark.parametrize("way", ["short", "long"])
def test_each_way_to_attend_is_proved(make_model, monkeypatch, way):
    """A fault in any way to attend fails the proof, cold or continued."""
    right = plan.attend

    def wrong(query, key, value, scoring, **more):
        if (query.shape[-2] > plan.SHORT) == (way == "long"):
            value = value.flip(2)
        return right(query, key, value, scoring, **more)

    over_pages(make_model("llama"))
    monkeypatch.setattr(plan, "attend", wrong)
    with pytest.raises(UnsupportedModel, match="other logits over pages"):
        over_pages(make_model("llama"))
