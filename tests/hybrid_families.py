"""Tiny random models of all families whose layers differ."""

from __future__ import annotations

from typing import Any

import torch
import transformers

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
    "mistral": HEAD | {"sliding_window": WINDOW},
    "gemma2": SLIDING | {"query_pre_attn_scalar": 16},
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


# Their scan ignores the state for more than a token, or they keep it elsewhere.
NOT_RESUMING = {"mamba", "falcon_mamba", "zamba", "zamba2", "jamba", "minimax"}


def configuration(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model; of 4 layers or 5, with windows of 8 tokens."""
    fields = {**TINY, **FAMILIES[family], **changes}
    if family == "mamba2":  # its head_dim is of the state, and it has no attention
        fields = {name: value for name, value in fields.items() if "_heads" not in name} | {
            "num_heads": 8
        }
    return transformers.AutoConfig.for_model(family, **fields)


def amplified(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a random model, the same at every call, whose weights are so large that errors show.

    With the small weights that models begin with, a lost state or an ignored sink hardly changes
    the logits.
    """
    config = configuration(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if weights.dim() > 1:
                    weights.mul_(6)
                elif name.endswith("sinks"):
                    weights.normal_(std=2.0)
    return model.to(dtype).eval()
