"""Layer groups against the caches that Transformers fills from tiny random models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 20
WINDOW = 8
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD: dict[str, Any] = {"head_dim": 16}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
SLIDING: dict[str, Any] = {
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, **HEAD,
}  # fmt: skip
CONV_AND_FULL: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS | HEAD,
    "qwen3_5_text": DELTA | HEAD,
    "qwen3_5_moe_text": DELTA | EXPERTS | HEAD,
    "olmo_hybrid": DELTA,
    "kimi_linear": LATENT | EXPERTS | {
        "linear_head_dim": 16, "linear_num_heads": 4, "q_lora_rank": None,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,
    },
    "bailing_hybrid": LATENT | EXPERTS | {
        "layer_group_size": 2, "n_group": 1, "topk_group": 1, "head_dim": 16,
    },
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128},
    "bamba": MAMBA2 | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": MAMBA2 | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "chunk_size": 32},
    "mamba": {"state_size": 16},
    "falcon_mamba": {"state_size": 16},
    "zamba": {
        "n_mamba_heads": 2, "mamba_d_state": 8, "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "zamba2": {
        "n_mamba_heads": 8, "mamba_d_state": 32, "num_key_value_heads": 4, "chunk_size": 32,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
    },
    "nemotron_h": HEAD | {
        "hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 32, "n_groups": 2, "chunk_size": 32,
    },
    "lfm2": CONV_AND_FULL | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONV_AND_FULL | EXPERTS | {"num_dense_layers": 1},
    "lfm3": HEAD | {"sliding_window": WINDOW, "num_hidden_layers": 5},
    "minimax": HEAD | {"num_local_experts": 2, "block_size": 8},
    "gemma3_text": SLIDING,
    "gemma3n_text": SLIDING | {
        "num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": SLIDING | {
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    },
    "gpt_oss": SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "olmo3": SLIDING,
    "llama4_text": HEAD | {
        "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 32,
    },
    "mimo_v2_flash": SLIDING | ROUTED | {"num_key_value_heads": 1, "v_head_dim": 8},
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED,
    "minicpm3": LATENT,
    "glm4_moe_lite": LATENT | ROUTED,
}  # fmt: skip

Kept = list[tuple[tuple[int, ...], str]]
"""Shapes and element types of the tensors that one layer keeps."""


def configuration(family: str) -> Any:
    fields = {**TINY, **FAMILIES[family]}
    if family == "mamba2":  # its head_dim is of the state, and it has no attention
        fields = {name: value for name, value in fields.items() if "_heads" not in name} | {
            "num_heads": 8
        }
    return transformers.AutoConfig.for_model(family, **fields)


def filled(config: Any, dtype: Any) -> list[Kept]:
    """What each layer of a model keeps after a prompt of `TOKENS` tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        output = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=True)
    cache = output["past_key_values" if "past_key_values" in output else "cache_params"]
    layers: list[list[Any]] = []
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in ("conv_states", "recurrent_states"):
            tensors += getattr(layer, states, {}).values()
        layers.append(tensors)
    for number, tensor in enumerate(getattr(cache, "linear_cache", [])):  # MiniMax's own
        layers += [[] for _ in range(number + 1 - len(layers))]
        layers[number].append(tensor)
    return [
        sorted(
            (tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
            for tensor in tensors
            if tensor is not None and len(tensor) and tensor.numel()
        )
        for tensors in layers
    ]


def expected(geometry: KVGeometry, layers: int) -> list[Kept]:
    """The same from the geometry."""
    kept: list[Kept] = [[] for _ in range(layers)]
    for group in geometry.groups:
        for layer in group.layers:
            if (shape := group.shape) is not None:
                # Transformers keeps what the next token needs of a window: one less than its span.
                tokens = TOKENS if group.span is None else min(TOKENS, group.span - 1)
                widths = [shape.head_dim, shape.value_dim]
                if shape.latent_dim is not None:
                    widths = [shape.latent_dim, shape.head_dim - shape.latent_dim]
                kept[layer] += [
                    ((shape.kv_heads, tokens, width or 0), geometry.dtype) for width in widths
                ]
            kept[layer] += [(tensor.shape, tensor.dtype) for tensor in group.state]
    return [sorted(tensors) for tensors in kept]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_keeps_what_its_groups_say(family: str, dtype: str) -> None:
    config = configuration(family)
    kept = filled(config, getattr(torch, dtype))
    assert expected(KVGeometry.from_config(config, dtype=dtype), len(kept)) == kept
    config.dtype = getattr(torch, dtype)
    assert expected(KVGeometry.from_config(config), len(kept)) == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_configuration_gives_the_same_groups(family: str, tmp_path: Path) -> None:
    config = configuration(family)
    config.save_pretrained(tmp_path)
    geometry = KVGeometry.from_config(config)
    assert KVGeometry.from_config(tmp_path) == geometry
    assert KVGeometry.from_config(config.to_dict()).groups == geometry.groups


# --- plain models, as their families configure them -------------------------------------------

# Small experts only: on the meta device size costs nothing, but building modules does.
PLAIN = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "cohere2",
    "phi3",
    "olmo3",
    "smollm3",
    "starcoder2",
    "exaone4",
    "falcon",
    "gpt_bigcode",
    "gpt2",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "mpt",
    "minicpm3",
    "gpt_oss",
]


@pytest.mark.parametrize("family", PLAIN)
def test_the_cache_of_a_plain_model_has_this_shape(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    layers = 8 if family != "bloom" else config.num_hidden_layers
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=layers)
    geometry = KVGeometry.from_config(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )
        cache = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
    assert geometry.layers == len(cache.layers)
    for layer, held in enumerate(cache.layers):
        elements = sum(tensor[:, :, 0].numel() for tensor in (held.keys, held.values))
        assert 4 * elements == geometry.bytes_per_token_per_layer  # float32: no dtype is named
        assert held.keys.shape[1] == geometry.kv_heads
        assert geometry.window(layer) == getattr(held, "sliding_window", None)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2", "mistral", "deepseek_v3"])
def test_a_saved_configuration_reads_as_the_object(family: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    wanted = KVGeometry.from_config(config)
    assert KVGeometry.from_config(tmp_path) == wanted
    assert KVGeometry.from_config(config.to_dict()) == wanted
