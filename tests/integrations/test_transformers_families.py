"""Families of models, windows, rotary scalings, dtypes: cold and warm, one text and a batch."""

from __future__ import annotations

import pytest
import torch
import transformers
from random_models import BLOCK, alone, build, computed, padded, prompt
from transformers import DynamicCache

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.transformers import KeptModel

pytestmark = pytest.mark.model

NEW = 6
TEXTS = [
    prompt(70, seed=1)[0],
    torch.cat((prompt(70, seed=1)[0][:50], prompt(5, seed=2)[0])),
    prompt(6, seed=3)[0],
]
LOADED = sum(map(len, TEXTS)) - len(TEXTS)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
ALTERNATE = ["sliding_attention", "full_attention"] * 2

CASES = {
    "Llama": {},
    "Llama, tied embeddings": {"tie_word_embeddings": True, "initializer_range": 0.3},
    "Llama, one KV head": {"num_key_value_heads": 1},
    "Llama, all heads": {"num_key_value_heads": 4},
    "Llama, linear": {"rope_parameters": SCALED | {"rope_type": "linear"}},
    "Llama, yarn": {"rope_parameters": SCALED | {"rope_type": "yarn"}},
    "Llama, llama3": {
        "rope_parameters": SCALED
        | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "Llama, eager": {"attn_implementation": "eager"},
    "Qwen2": {},
    "Qwen2, windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral": {},
    "Mistral, long window": {"sliding_window": 400},
    "Mixtral": EXPERTS,
    "Gemma": {},
    "Gemma2": {},
    "Gemma2, caps": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
    "Gemma2, long window": {"sliding_window": 64},
    "Gemma3Text": {},
    "Gemma3Text, long window": {"sliding_window": 64},
    "Gemma3nText": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 9,
        "layer_types": ALTERNATE, "laurel_rank": 8, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 160, "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2, "tie_word_embeddings": False,
    },
    "Phi": {},
    "Phi3": {},
    "GptOss": EXPERTS | {"sliding_window": 9},
    "Cohere2": {"sliding_window": 9},
    "Granite": {},
    "Olmo2": {},
    "Glm4": {},
    "Llama4Text": {"num_local_experts": 2, "attention_chunk_size": 32, "intermediate_size_mlp": 64},
    "GPT2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512, "num_key_value_heads": 4},
    "GPTNeoX": {"num_key_value_heads": 4},
}  # fmt: skip


def made(case, **more):
    return build(case.partition(",")[0], **CASES[case], **more)


@pytest.mark.parametrize("case", CASES)
def test_a_family(case, tmp_path):
    """Cold, warm, and after everything was closed and the model loaded again, from disk."""
    model = made(case)
    expected = alone(model, TEXTS, NEW)
    assert len({tuple(answer.tolist()) for answer in expected}) == 3  # or nothing would show
    batch = padded(TEXTS)
    tiers = ["memory://8MiB", f"file://{tmp_path}/kv?size=32MiB"]

    def ask(kept, **how):
        found = kept.generate(**batch, max_new_tokens=NEW, **how)[:, -NEW:]
        assert all(map(torch.equal, found, expected))

    with KeptModel(model, tiers=tiers, block_tokens=BLOCK, loading="all") as kept:
        ask(kept)
        assert kept.last.loaded == 0
        ask(kept)
        assert kept.last.loaded == LOADED
    model = made(case)
    with KeptModel(model, tiers=tiers, block_tokens=BLOCK, loading="all") as kept:
        counts = computed(model)
        for how in ({}, {"cache_implementation": "static"}):
            ask(kept, **how)
            assert kept.last.loaded == LOADED
            assert counts == [len(TEXTS)] * NEW
            counts.clear()
        # One text, which goes on where a batch ended.
        text = torch.cat((TEXTS[1], expected[1], prompt(4, seed=5)[0]))
        found = kept.generate(text[None], max_new_tokens=NEW)[0, -NEW:]
        assert counts[0] in (4, 5)  # of models with windows, the last token is a pass of its own
        assert torch.equal(found, alone(model, [text], NEW)[0])


LOGITS = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["Llama", "Qwen3", "Mistral", "Gemma2, caps", "Gemma3Text", "Phi3"]
)
def test_logits_are_those_of_one_pass(case, dtype):
    """As close as another division of the same text into passes brings them."""
    model = made(case).to(dtype)
    batch = padded(TEXTS)
    expected = model.generate(**batch, **LOGITS).logits[0]
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.1}
    other = model.generate(**padded(TEXTS[1:]), **LOGITS).logits[0]
    with KeptModel(model, tiers=["memory://8MiB"], block_tokens=BLOCK, loading="all") as kept:
        for how in ({}, {}, {"cache_implementation": "static"}):
            found = kept.generate(**batch, **LOGITS, **how).logits[0]
            torch.testing.assert_close(found, expected, **close)
            torch.testing.assert_close(found[1:], other, **close)
        assert kept.last.loaded == LOADED
    spread = (expected[0] - expected[1]).abs().max()
    assert spread > 10 * close["atol"]  # another text's logits would not do


@pytest.mark.parametrize("window", [5, 9, 30, 69, 70, 71, 200])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text"])
def test_windows_of_any_length(family, window):
    """Shorter than a block, longer than the prompt, and at its very end; in a cache with windows.

    The prompt and the end of its answer are stored, whatever left the window between them.
    """
    model = build(family, sliding_window=window)
    expected = alone(model, TEXTS, NEW)
    batch = padded(TEXTS)
    with KeptModel(model, tiers=["memory://8MiB"], block_tokens=BLOCK, loading="all") as kept:
        for already in (False, True):
            cache = DynamicCache(config=model.config)
            found = kept.generate(**batch, past_key_values=cache, max_new_tokens=NEW)[:, -NEW:]
            assert all(map(torch.equal, found, expected))
            assert max(layer.keys.shape[-2] for layer in cache.layers if layer.is_sliding) < window
            assert bool(kept.last.stored) != already
        assert kept.last.loaded == LOADED
        turns = [torch.cat(parts) for parts in zip(TEXTS, expected, strict=True)]
        expected = alone(model, turns, NEW)
        found = kept.generate(**padded(turns), cache_implementation="static", max_new_tokens=NEW)
        assert all(map(torch.equal, found[:, -NEW:], expected))
        assert kept.last.loaded == sum(map(len, turns)) - len(turns)


@pytest.mark.parametrize(
    ("family", "shape", "said"),
    [
        ("RecurrentGemma", {}, "recurrent state"),
    ],
)
def test_what_is_not_kv_is_refused(family, shape, said):
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=3, **shape)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match=said):
        KeptModel(model)
