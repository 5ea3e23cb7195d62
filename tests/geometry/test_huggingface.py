"""Configurations as they lie on the hub, what they say, and which are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue, KVKeepError, UnsupportedModel
from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from pathlib import Path

# As published, cut to what concerns KV.
LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN_25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
QWEN_3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
GEMMA_2: dict[str, Any] = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
PIXTRAL: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "sliding_window": None,
    },
    "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LLAMA_31_8B, 131072),
        (QWEN_25_7B, 57344),
        (DEEPSEEK_V3, 70272),
        (QWEN_3_06B, 28 * 8 * 256 * 2),  # a head_dim that is not hidden / heads
        (GPT2, 12 * 768 * 2 * 2),  # multi-head
        (GEMMA_2 | {"dtype": "bfloat16"}, 26 * 4 * 512 * 2),
        (PIXTRAL, 40 * 8 * 256 * 2),
    ],
)
def test_bytes_a_token(config: dict[str, Any], wanted: int) -> None:
    assert KVGeometry.from_config(config).bytes_per_token == wanted


def test_dtype_and_tp_are_for_the_caller_to_choose() -> None:
    geometry = KVGeometry.from_config(LLAMA_31_8B, dtype="fp8", tp=4)
    assert geometry == KVGeometry(32, 8, 128, "float8_e4m3fn", tp=4)
    with pytest.raises(InvalidValue, match="dtype is 'fp7'"):
        KVGeometry.from_config(LLAMA_31_8B, dtype="fp7")
    with pytest.raises(InvalidValue, match="tp is 3"):
        KVGeometry.from_config(LLAMA_31_8B, tp=3)


def test_a_latent_is_read_as_one() -> None:
    geometry = KVGeometry.from_config(DEEPSEEK_V3)
    assert geometry == KVGeometry(61, 1, 576, latent_dim=512)


SIX: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 6, "num_attention_heads": 2, "hidden_size": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, [None] * 6),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 6),
        ({"model_type": "mistral", "sliding_window": 4}, [4] * 6),
        (
            {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False},
            [None] * 6,
        ),
        (
            {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True,
             "max_window_layers": 4},
            [None] * 4 + [4] * 2,
        ),
        ({"model_type": "gemma2", "sliding_window": 4}, [4, None] * 3),
        ({"model_type": "gemma3_text", "sliding_window": 4}, [4] * 5 + [None]),
        (
            {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 3},
            [4, 4, None] * 2,
        ),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 4,
                "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4,
            },
            [None] * 2 + [4] * 4,
        ),
        (
            {
                "model_type": "llama4_text",
                "attention_chunk_size": 8,
                "layer_types": ["chunked_attention", "full_attention"] * 3,
            },
            [8, None] * 3,
        ),
        (
            {
                "model_type": "gpt_neo",
                "window_size": 256,
                "attention_types": [[["global", "local"], 3]],
            },
            [None, 256] * 3,
        ),
        # The last layers attend over the KV of earlier ones.
        (
            {
                "model_type": "gemma3n_text",
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
            },
            [4, 4, None, 4],
        ),
    ],
)  # fmt: skip
def test_windows(config: dict[str, Any], windows: list[int | None]) -> None:
    geometry = KVGeometry.from_config(SIX | config)
    assert geometry.windows == tuple(windows)
    assert geometry.layers == len(windows)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_encoder_decoder": True, "model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "bert"}, "bert is an encoder"),
        ({"model_type": "modernbert"}, "modernbert does not generate text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "keys and values of another input"),
        ({"model_type": "deepseek_v32"}, "keeps an index key"),
        ({"model_type": "mymamba"}, "does not know the family 'mymamba'"),
        ({"model_type": ""}, "names no model_type"),
        ({"model_type": 3}, "model_type is 3"),
        ({"model_type": "jamba", "per_layer_config": {"5": {"skip": ["mlp"]}}}, "skips"),
        ({"per_layer_config": {"five": {}}}, "does not read this configuration of llama"),
        ({"model_type": "internlm2", "per_layer_config": {}}, "layers of different shapes"),
        ({"model_type": "internlm2", "per_layer_config": []}, "layers of different shapes"),
        ({"model_type": "internlm2", "per_layer_config": 5}, "layers of different shapes"),
        ({"num_hidden_layers": 6.0}, "does not read this configuration of llama"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": [4]}}, r"kv_n_heads is \[4\]"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 6,
          "layer_types": ["full_attention"] * 6}, "leaves no layer"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 5}, "does not read this"),
        ({"model_type": "internlm2", "num_attention_heads": 3}, "3 attention heads do not divide"),
        ({"model_type": "internlm2", "num_key_value_heads": [2, 4]}, "one whole number of at"),
        ({"model_type": "minicpm", "num_hidden_layers": None}, "names no num_hidden_layers"),
        ({"model_type": "kimi_k2", "kv_lora_rank": 4}, "names no qk_rope_head_dim"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        KVGeometry.from_config(SIX | config)


def test_an_encoder_set_up_as_a_decoder_is_one() -> None:
    assert KVGeometry.from_config(SIX | {"model_type": "bert", "is_decoder": True}).layers == 6


def test_the_whole_is_asked_before_its_text_part() -> None:
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        KVGeometry.from_config(
            {"model_type": "llava", "is_encoder_decoder": True, "text_config": SIX}
        )


FAMILIES = ["llama", "internlm2", "gpt_neo", "falcon", "mpt", "gemma3_text", "gemma4_text"]
FAMILIES += ["llama4_text", "mimo_v2_flash", "deepseek_v3", "qwen3_next", "kimi_linear", "jamba"]
FAMILIES += ["falcon_h1", "nemotron_h", "zamba2", "mamba", "lfm2", "minimax", "llava"]
FIELDS = [*SIX, "layer_types", "architectures", "text_config", "attn_config", "quantization_config"]
FIELDS += ["sliding_window", "max_window_layers", "head_dim", "dtype", "kv_lora_rank", "v_head_dim"]
FIELDS += ["per_layer_config", "hybrid_override_pattern", "linear_attn_config", "conv_L_cache"]
FIELDS += ["no_rope_layers", "full_attn_idxs", "attn_layer_period", "mamba_n_heads", "num_heads"]
FIELDS += ["multi_query", "attention_types", "sliding_window_pattern", "num_kv_shared_layers"]
rubbish = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.sampled_from(["", "auto", "full_attention", "conv", "LG", "M*-", "bfloat16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.sampled_from(FAMILIES), st.dictionaries(st.sampled_from(FIELDS), rubbish, max_size=4))
def test_rubbish_is_refused_with_our_own_error(family: str, rubbish: dict[str, Any]) -> None:
    try:
        geometry = KVGeometry.from_config(SIX | {"model_type": family} | rubbish)
    except KVKeepError as error:
        assert str(error)  # noqa: PT017 - what is not refused has to be a geometry
    else:
        assert geometry.bytes_for(1) > 0


def test_a_path_is_a_directory_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_31_8B))
    wanted = KVGeometry(32, 8, 128)
    for path in (file, str(file), tmp_path, str(tmp_path)):
        assert KVGeometry.from_config(path) == wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "holds list, not a configuration"),
        (b"{}", "names no model_type"),
    ],
)
def test_a_file_that_holds_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=message):
        KVGeometry.from_config(tmp_path)


def test_a_path_with_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"cannot read .*config.json: No such file"):
        KVGeometry.from_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="a local directory is needed"):
        KVGeometry.from_config("meta-llama/Llama-3.1-8B")
    with pytest.raises(UnsupportedModel, match="cannot read"):
        KVGeometry.from_config("\0")


@pytest.mark.parametrize("wrong", [None, 3, [LLAMA_31_8B], object()])
def test_what_is_no_configuration(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"config is \w+; a Hugging Face configuration"):
        KVGeometry.from_config(wrong)
