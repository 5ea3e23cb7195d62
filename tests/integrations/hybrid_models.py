"""Small random models of the families with windows, latent KV and states.

Their weights are amplified: with those of a new model, a state that is wrong hardly shows.
"""

from __future__ import annotations

import torch
import transformers
from random_models import SHAPE

SHAPES = {name: value for name, value in SHAPE.items() if name != "initializer_range"}
SHAPES["num_hidden_layers"] = 4
BY_TURNS = ["linear_attention", "full_attention"] * 2
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": BY_TURNS,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32,
    "mamba_expand": 2, "mamba_n_groups": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "q_lora_rank": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = {
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": LATENT | EXPERTS | {"q_lora_rank": None, "linear_attn_config": {
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
        "kda_layers": [1, 3], "full_attn_layers": [2, 4]}},
    "bailing_hybrid": LATENT | {
        "q_lora_rank": None, "layer_types": BY_TURNS, "num_experts": 16,
        "moe_intermediate_size": 32},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": MAMBA | LOCAL | {
        "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "chunk_size": 32, "n_groups": 1},
    "zamba2": {
        "mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 32, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "gpt_oss": LOCAL | {"sliding_window": 9},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "gemma4_text": WINDOWS | {
        "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 16},
    "olmo3": {"sliding_window": 9},
    "llama4_text": LOCAL | {"attention_chunk_size": 16, "intermediate_size_mlp": 64},
    "mimo_v2_flash": {
        "sliding_window": 9, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32},
    "mistral": {"sliding_window": 9},
    "deepseek_v2": LATENT | {"first_k_dense_replace": 4, "n_routed_experts": 4},
    "deepseek_v3": LATENT | {
        "first_k_dense_replace": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "head_dim": 8},
    "minicpm3": LATENT,
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 16},
    "minimax": {"layer_types": BY_TURNS, "num_local_experts": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 32, "n_groups": 1},
}  # fmt: skip

REFUSED = {
    "jamba": "JambaForCausalLM does not go on exactly from a snapshot: .* the KV of layer 1 is off",
    "minimax": "MiniMaxForCausalLM cannot go on .* MiniMax uses cache of its own",
    "mamba2": "Mamba2ForCausalLM has states alone",
}


def build_hybrid(family, **changes):
    """A random model of the family, the same at every call."""
    config = transformers.AutoConfig.for_model(family, **{**SHAPES, **FAMILIES[family], **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1 and "norm" not in name:
                weights.mul_(8)
    return model
