"""The two kinds of model: a Llama, and a hybrid like Qwen3-Next, of about the same size.

Both have the same width, attention heads and tied embeddings. In the hybrid three layers of four
are gated delta rules: they keep a state of fixed size in place of K and V for every token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

__all__ = ["Model", "Size", "build_model"]

Model = LlamaForCausalLM | Qwen3NextForCausalLM

HEAD_DIM = 32
ROPE_BASE = 10_000.0
FULL_INTERVAL = 4  # of the hybrid: each fourth layer is full attention


class Size(NamedTuple):
    """The width of the model, its number of layers, and the inner width of their MLPs."""

    hidden: int
    layers: int
    inner: int


def build_model(vocabulary: int, size: Size, longest: int, *, hybrid: bool) -> Model:
    """Return a model with random weights for prompts of up to ``longest`` tokens.

    Attention is grouped-query: heads of 32, three to a KV head. The delta rules of a hybrid have
    heads of the same size, two for values to one for queries and keys.
    """
    heads = size.hidden // HEAD_DIM
    key_heads = heads // 2
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": longest,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 4,
        "pad_token_id": 4,
    }
    if not hybrid:
        return LlamaForCausalLM(LlamaConfig(**common))
    common["rope_parameters"]["partial_rotary_factor"] = 0.25  # as in Qwen3-Next
    config = Qwen3NextConfig(
        **common,
        layer_types=[
            "linear_attention" if (layer + 1) % FULL_INTERVAL else "full_attention"
            for layer in range(size.layers)
        ],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=2 * key_heads,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        num_experts=0,  # every layer has a plain MLP
    )
    return Qwen3NextForCausalLM(config)
