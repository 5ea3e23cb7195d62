"""Published configurations of models whose layers differ, with bytes counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.core.geometry import AttentionShape, KVGeometry

KIB, MIB = 2**10, 2**20
LONG = 128 * KIB

# As published, cut to what concerns KV and states.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "dtype": "bfloat16", "num_hidden_layers": 48, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear", "dtype": "bfloat16", "num_hidden_layers": 27,
    "hidden_size": 2304, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4], "short_conv_kernel_size": 4,
    },
}  # fmt: skip
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h", "torch_dtype": "bfloat16", "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "chunk_size": 128,
}  # fmt: skip
JAMBA_MINI: dict[str, Any] = {
    "model_type": "jamba", "torch_dtype": "bfloat16", "num_hidden_layers": 32,
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
FALCON_MAMBA_7B: dict[str, Any] = {
    "model_type": "falcon_mamba", "torch_dtype": "bfloat16", "num_hidden_layers": 64,
    "hidden_size": 4096, "intermediate_size": 8192, "expand": 16, "state_size": 16,
    "conv_kernel": 4,
}  # fmt: skip
FALCON_H1_34B: dict[str, Any] = {
    "model_type": "falcon_h1", "torch_dtype": "bfloat16", "num_hidden_layers": 72,
    "hidden_size": 5120, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
    "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_n_groups": 2,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_chunk_size": 128,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "torch_dtype": "bfloat16", "num_hidden_layers": 16,
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip
MINIMAX_01: dict[str, Any] = {
    "model_type": "minimax", "torch_dtype": "bfloat16", "num_hidden_layers": 80,
    "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
}  # fmt: skip
ZAMBA_7B: dict[str, Any] = {
    "model_type": "zamba", "torch_dtype": "bfloat16", "num_hidden_layers": 76,
    "hidden_size": 3712, "num_attention_heads": 16, "num_key_value_heads": 16, "n_mamba_heads": 2,
    "attn_layer_period": 6, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
LLAMA_4_SCOUT: dict[str, Any] = {
    "model_type": "llama4", "torch_dtype": "bfloat16", "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "attention_chunk_size": 8192, "no_rope_layers": [],
    },
}  # fmt: skip
MIMO_V2_FLASH: dict[str, Any] = {
    "model_type": "mimo_v2_flash", "torch_dtype": "bfloat16", "num_hidden_layers": 48,
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192,
    "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "sliding_window": 128, "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1] + ([0] + [1] * 5) * 7 + [0],
}  # fmt: skip
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text", "dtype": "bfloat16", "num_hidden_layers": 30,
    "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "sliding_window": 1024,
}  # fmt: skip
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "sliding_window": 1024,
    },
}  # fmt: skip

# Bytes of one layer: by token, or of its state.
DELTA = (2 * 16 * 128 + 32 * 128) * 4 * 2 + 32 * 128 * 128 * 4
KIMI_DELTA = 3 * 32 * 128 * 4 * 2 + 32 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("config", "groups", "token", "state"),
    [
        (QWEN3_NEXT, {"state": 36, "full": 12}, 12 * 2 * 512 * 2, 36 * DELTA),
        (KIMI_LINEAR, {"state": 20, "latent": 7}, 7 * 576 * 2, 20 * KIMI_DELTA),
        (
            NEMOTRON_H_8B, {"state": 24, "full": 4}, 4 * 8 * 256 * 2,
            24 * ((8192 + 2 * 8 * 128) * 4 * 2 + 128 * 64 * 128 * 4),
        ),
        (
            JAMBA_MINI, {"state": 28, "full": 4}, 4 * 8 * 256 * 2,
            28 * (8192 * 4 * 2 + 8192 * 16 * 4),
        ),
        (FALCON_MAMBA_7B, {"state": 64}, 0, 64 * (8192 * 4 * 2 + 8192 * 16 * 4)),
        (
            FALCON_H1_34B, {"full": 72, "state": 72}, 72 * 4 * 256 * 2,
            72 * ((4096 + 2 * 2 * 256) * 4 * 2 + 32 * 128 * 256 * 4),
        ),
        (LFM2, {"state": 10, "full": 6}, 6 * 8 * 128 * 2, 10 * 2048 * 3 * 2),
        (MINIMAX_01, {"state": 70, "full": 10}, 10 * 8 * 256 * 2, 70 * 64 * 128 * 128 * 2),
        (
            ZAMBA_7B, {"state": 76, "full": 13}, 13 * 16 * 928 * 2,
            76 * (7424 * 4 * 2 + 7424 * 16 * 4),
        ),
    ],
)  # fmt: skip
def test_states_beside_attention(
    config: dict[str, Any], groups: dict[str, int], token: int, state: int
) -> None:
    geometry = KVGeometry.from_config(config)
    assert {group.kind: len(group.layers) for group in geometry.groups} == groups
    assert geometry.bytes_per_token == token
    assert geometry.bytes_per_state == state
    assert geometry.bytes_for(LONG) == LONG * token + state
    assert geometry.layers == len({layer for group in geometry.groups for layer in group.layers})
    assert not geometry.plain


def test_a_gemma_3_of_128k_tokens_is_counted_as_by_hand() -> None:
    geometry = KVGeometry.from_config(GEMMA_3_27B)
    layer = 2 * 16 * 128 * 2  # K and V of 16 heads of 128 in bfloat16
    full, window = 10, 52  # every sixth of 62 layers is full
    by_hand = full * layer * LONG + window * layer * 1024
    assert geometry.bytes_for(LONG) == by_hand
    assert abs(geometry.bytes_for(LONG, page_size=16) / by_hand - 1) < 0.02
    assert geometry.bytes_per_token * LONG > 5 * by_hand  # pages hold every layer's tokens
    assert geometry.plain
    assert geometry.sequences_in("80GiB", LONG) == 80 * 2**30 // by_hand


def test_chunks() -> None:
    geometry = KVGeometry.from_config(LLAMA_4_SCOUT)
    chunk, full = geometry.groups
    assert (chunk.kind, len(chunk.layers), chunk.span) == ("chunk", 36, 8192)
    assert (full.kind, full.layers) == ("full", tuple(range(3, 48, 4)))
    layer = 2 * 8 * 128 * 2
    assert geometry.bytes_for(LONG, page_size=16) == layer * (36 * 8192 + 12 * LONG)
    assert geometry.plain
    assert geometry.windows[0] == 8192
    assert geometry.with_dtype("fp8").groups == geometry.groups
    assert KVGeometry.of(geometry.groups, tp=2).groups == geometry.groups


def test_layers_of_several_shapes() -> None:
    geometry = KVGeometry.from_config(MIMO_V2_FLASH)
    full, window = geometry.groups
    assert (full.shape, len(full.layers)) == (AttentionShape(4, 192, 128), 9)
    assert (window.shape, window.span) == (AttentionShape(8, 192, 128), 129)
    assert geometry.bytes_per_token == (9 * 4 + 39 * 8) * 320 * 2
    geometry = KVGeometry.from_config(GEMMA_4)
    window, full = geometry.groups
    assert (window.shape, len(window.layers)) == (AttentionShape(8, 256), 25)
    assert (full.shape, len(full.layers)) == (AttentionShape(2, 512), 5)
    assert geometry.bytes_for(LONG) == (25 * 8 * 512 * 1024 + 5 * 2 * 1024 * LONG) * 2
    even = {"num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 16}
    assert KVGeometry.from_config(GEMMA_4 | even | {"attention_k_eq_v": False}).plain


def test_layers_that_change_fields() -> None:
    changed = {"per_layer_config": {"01": {"head_dim": 64}, "3": {"num_key_value_heads": 1}}}
    even: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    even |= {"model_type": "llama", "hidden_size": 128}
    geometry = KVGeometry.from_config({**even, "head_dim": 32, **changed})
    assert [(group.layers, group.shape) for group in geometry.groups] == [
        ((0, 2), AttentionShape(2, 32)),
        ((1,), AttentionShape(2, 64)),
        ((3,), AttentionShape(1, 32)),
    ]


@pytest.mark.parametrize(
    ("config", "tp", "token", "state"),
    [
        (QWEN3_NEXT, 2, 12 * 512 * 2, 36 * DELTA // 2),
        # Two KV heads for four ranks: each holds one. Keys of delta rules are divided.
        (QWEN3_NEXT, 4, 12 * 512 * 2, 36 * DELTA // 4),
        (KIMI_LINEAR, 8, 7 * 576 * 2, 20 * KIMI_DELTA // 8),
        # Two groups of B and C for four ranks: each holds one.
        (
            FALCON_H1_34B, 4, 72 * 256 * 2,
            72 * ((1024 + 2 * 256) * 4 * 2 + 8 * 128 * 256 * 4),
        ),
        (MINIMAX_01, 8, 10 * 256 * 2, 70 * 8 * 128 * 128 * 2),
    ],
)  # fmt: skip
def test_ranks(config: dict[str, Any], tp: int, token: int, state: int) -> None:
    geometry = KVGeometry.from_config(config, tp=tp)
    assert (geometry.bytes_per_token, geometry.bytes_per_state) == (token, state)
    assert geometry == KVGeometry.of(KVGeometry.from_config(config).groups, tp=tp)


def test_ranks_that_cannot_share_a_state() -> None:
    with pytest.raises(InvalidValue, match="tp is 3 and the conv state has 16 heads or groups"):
        KVGeometry.from_config(QWEN3_NEXT | {"num_key_value_heads": 3}, tp=3)
    with pytest.raises(InvalidValue, match="tp is 3 and the model has 4 KV heads"):
        KVGeometry.from_config(FALCON_H1_34B, tp=3)


def test_states_follow_the_models_dtype_but_not_an_8_bit_cache() -> None:
    geometry = KVGeometry.from_config(QWEN3_NEXT)
    conv, recurrent = geometry.groups[0].state
    assert (conv.dtype, recurrent.dtype) == ("bfloat16", "float32")
    wide = geometry.with_dtype("float32")
    assert wide == KVGeometry.from_config(QWEN3_NEXT, dtype="float32")
    assert {tensor.dtype for tensor in wide.groups[0].state} == {"float32"}
    assert wide.with_dtype("bf16") == geometry
    small = geometry.with_dtype("fp8")
    assert small.groups == geometry.groups
    assert small.bytes_per_token == geometry.bytes_per_token // 2
    assert small == KVGeometry.from_config(QWEN3_NEXT, dtype="fp8")


@pytest.mark.parametrize(
    ("config", "grid"),
    [(QWEN3_NEXT, 64), (KIMI_LINEAR, 64), (NEMOTRON_H_8B, 128), (JAMBA_MINI, 1), (LFM2, 1)],
)
def test_grids(config: dict[str, Any], grid: int) -> None:
    grids = {group.kind: group.grid for group in KVGeometry.from_config(config).groups}
    assert grids.pop("state") == grid
    assert set(grids.values()) == {1}


def test_what_needs_one_shape_says_what_the_model_has() -> None:
    geometry = KVGeometry.from_config(QWEN3_NEXT)
    with pytest.raises(
        UnsupportedModel,
        match="KVStore needs a model with K and V of one shape in every layer; of the 48 layers "
        "with a cache, this one keeps a recurrent state in 36 and full attention in 12",
    ):
        geometry.needs_plain("KVStore")
    with pytest.raises(UnsupportedModel, match="a convolution's state in 10"):
        KVGeometry.from_config(LFM2).pages_in("24GiB", 16)
    KVGeometry.from_config(GEMMA_3_27B).needs_plain("KVStore")
    KVGeometry(2, 1, 12, latent_dim=8).needs_plain("KVStore")
