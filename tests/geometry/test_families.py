"""Every family of the installed Transformers, saved and read, against what its object says."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from collections.abc import Iterator

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

pytestmark = pytest.mark.model
CONFIGURATIONS = Path(__file__).parent / "configurations"

# Why a family is refused → families that are, in the part that generates text.
REFUSED: dict[str, set[str]] = {
    "is an encoder-decoder": {"bart", "t5", "whisper", "t5gemma", "musicgen", "dia"},
    "is an encoder:": {"bert", "roberta", "xlm", "xmod", "electra", "bert-generation"},
    "does not generate text": {"clip_text_model", "siglip_text_model", "modernbert"},
    "keeps an index key": {
        "axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4",
        "minimax_m3_vl_text", "mistral_large4_text", "glm5_next_text",
    },
    "keeps states of convolutions": {"inkling_text", "inkling2_text", "zaya"},
    "keeps a recurrent state": {"recurrent_gemma", "rwkv", "xlstm"},
    "keeps hidden states": {"xlnet"},
    "keeps no KV cache; K": {"openai-gpt"},
    "keeps keys and values of images": {"mllama_text_model"},
    "attends in both directions": {"cpmant", "diffusion_gemma_text"},
    "has layers of type": {"unlimited_ocr_text", "qwen4_exp_text"},
    "names no num_hidden_layers": {"blt"},
    "names no layer_types": {"lfm2_moe"},  # the class has no default
    "leaves no layer": {"gemma4_unified_assistant"},
}  # fmt: skip
# Models that are wrong about themselves alone.
ALWAYS_LOCAL = {"gpt_neo"}  # its caches keep whole what its local layers never read again


def families() -> Iterator[tuple[str, Any]]:
    """Yield each family with its default configuration, if it has one and a text part."""
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for family in transformers.CONFIG_MAPPING:
        kind = transformers.CONFIG_MAPPING[family]
        if family not in causal and not kind.sub_configs:
            continue
        try:
            config = kind()
            text = config.get_text_config(decoder=True)
        except Exception:  # noqa: BLE001 - a family without a default configuration
            continue
        if family in causal or text is not config:
            yield family, config


def nested(config: Any) -> Any:
    """Return a multimodal model's configuration around ``config``, whose file has no defaults."""
    try:
        return transformers.LlavaConfig(text_config=config)
    except AttributeError:  # Inkling 2 lacks a field that every text part needs
        return config


def heads(layer: Any, kind: str) -> int:
    """KV heads by the attributes that the family's model reads."""
    match layer.model_type:
        case "falcon":
            new = layer.new_decoder_architecture
            many = layer.num_kv_heads if new else layer.num_attention_heads
            return 1 if layer.multi_query and not new else int(many)
        case "mimo_v2_flash" if kind == "sliding_attention":
            return 2 * int(layer.num_key_value_heads)
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


def said(config: Any) -> list[tuple[int, int | None, bool] | None]:
    """Of each layer: elements of a token, window, and whether it has a state; by the object."""
    text = config.get_text_config(decoder=True)
    kinds, arguments = cache_utils.get_layer_types_and_kwargs(text)
    layers: list[tuple[int, int | None, bool] | None] = []
    for kind, given, layer in zip(kinds, arguments, text.per_layer_config, strict=True):
        state = kind in {"linear_attention", "conv", "hybrid"}
        if kind == "dummy":
            layers.append(None)
        elif state and kind != "hybrid":
            layers.append((0, None, True))
        elif getattr(layer, "kv_lora_rank", None):
            layers.append((layer.kv_lora_rank + layer.qk_rope_head_dim, None, state))
        else:
            width = getattr(layer, "head_dim", None)
            width = width or layer.hidden_size // layer.num_attention_heads
            both = width + (getattr(layer, "v_head_dim", None) or width)
            layers.append((heads(layer, kind) * both, given.get("sliding_window"), state))
    return layers


def read(geometry: KVGeometry, layers: int) -> list[tuple[int, int | None, bool] | None]:
    """The same from a geometry."""
    found: list[tuple[int, int | None, bool] | None] = [None] * layers
    for group in sorted(geometry.groups, key=lambda group: group.shape is None):
        for layer in group.layers:
            before = found[layer] or (0, None, False)
            if group.shape is None:
                found[layer] = (*before[:2], True)
            else:
                found[layer] = (group.shape.kv_heads * group.shape.width, group.span, before[2])
    return found


def test_each_family_is_read_as_its_object_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "transformers")
    refused: dict[str, str] = {}
    sized = 0
    for family, config in families():
        text = config.get_text_config(decoder=True)
        try:
            geometry = KVGeometry.from_config(config)
        except UnsupportedModel as error:
            refused[text.model_type] = str(error)
            continue
        sized += 1
        assert geometry.dtype == "bfloat16"
        assert "bfloat16 is assumed" in geometry.notes[0]
        if text.model_type not in ALWAYS_LOCAL:
            wanted = said(config)
            assert read(geometry, len(wanted)) == wanted, family
        for saved in (config, nested(config)) if text is config else (config,):
            saved.save_pretrained(tmp_path)
            assert KVGeometry.from_config(tmp_path) == geometry, (family, saved.model_type)
    assert sized > 200
    known = "|".join(REFUSED)
    assert [why for why in refused.values() if not re.search(known, why)] == []
    for why, expected in REFUSED.items():
        for family in expected & set(refused):
            assert why in refused[family], family
    named = set().union(*REFUSED.values())
    assert len(named & set(refused)) > len(named) / 2  # other versions may lack some


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "layers", "heads", "head_dim", "note"),
    [
        ("gemma3_12b_no_head_dim", 48, 8, 256, ""),
        ("gemma3_4b", 34, 4, 256, ""),
        ("gpt_oss_no_dtype", 24, 8, 64, "no weights are beside it; bfloat16 is assumed"),
        ("mistral_params", 40, 8, 128, "bfloat16 is assumed"),
        ("plamo", 40, 5, 128, ""),  # 8 heads share one
    ],
)
def test_files_that_people_have(
    file: str, layers: int, heads: int, head_dim: int, note: str
) -> None:
    geometry = KVGeometry.from_config(CONFIGURATIONS / f"{file}.json")
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (layers, heads, head_dim)
    assert geometry.bytes_per_token == layers * heads * head_dim * 2 * 2
    assert note in " ".join(geometry.notes)
    assert bool(note) == bool(geometry.notes)


@pytest.mark.parametrize(
    ("file", "family"),
    [
        ("baichuan_m1", "baichuan_m1"),  # heads and windows of other names in every other layer
        ("iquest_loop", "iquestloopcoder"),  # each layer twice
        ("longcat_flash_ngram", "longcat_flash_ngram"),  # two attentions in each layer
        ("minimax_m3_sparse", "minimax_m3"),  # index keys
    ],
)
def test_a_family_that_transformers_does_not_know_is_refused_by_name(
    file: str, family: str
) -> None:
    if family in transformers.CONFIG_MAPPING:
        pytest.skip(f"this Transformers knows {family}")
    with pytest.raises(UnsupportedModel, match=f"does not know the family '{family}'"):
        KVGeometry.from_config(CONFIGURATIONS / f"{file}.json")


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"model_type": "plamo", "hidden_size": 2560, "num_attention_heads": 40,
          "n_shared_head": 8}, 5),
        ({"model_type": "internlm2", "num_attention_heads": 32, "num_key_value_heads": 8}, 8),
        ({"model_type": "chatglm", "num_layers": 2, "multi_query_group_num": 2,
          "kv_channels": 64}, 2),
        ({"n_layers": 2, "dim": 2048, "n_heads": 32, "n_kv_heads": 8}, 8),  # params.json
        ({"model_type": "gpt_bigcode", "n_head": 32, "multi_query": True}, 1),
        ({"model_type": "mpt", "n_heads": 32, "attn_config": {"kv_n_heads": 4}}, 4),
        ({"model_type": "mpt", "n_heads": 32}, 32),
        ({"model_type": "falcon", "num_attention_heads": 32, "multi_query": True}, 1),
        ({"model_type": "falcon", "num_attention_heads": 32, "multi_query": False}, 32),
        ({"model_type": "falcon", "num_attention_heads": 32, "num_kv_heads": 8,
          "new_decoder_architecture": True}, 8),
        ({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": None}, 32),
    ],
)  # fmt: skip
def test_key_value_heads_by_the_names_of_the_family(config: dict[str, Any], heads: int) -> None:
    common = {"num_hidden_layers": 2, "hidden_size": 2048}
    assert KVGeometry.from_config(common | config).kv_heads == heads


@pytest.mark.parametrize(
    "name", ["num_attention_groups", "n_kv_heads", "num_query_groups", "num_kv_groups"]
)
def test_heads_of_an_unknown_name_are_never_all_heads(name: str) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 32, name: 4}
    for family, why in (
        ("step9", "does not know the family 'step9'"),
        ("internlm2", "names no num_key_value_heads; internlm2 needs it to be written"),
        ("", "names no model_type"),
    ):
        with pytest.raises(UnsupportedModel, match=why):
            KVGeometry.from_config(config | {"model_type": family})


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    evil = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(evil))
    with pytest.raises(UnsupportedModel, match="code that comes with a checkpoint is not run"):
        KVGeometry.from_config(tmp_path)


# --- element types --------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_a_dtype_that_is_not_named_is_that_of_the_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert KVGeometry.from_config(tmp_path).dtype == "bfloat16"
    # As quantised checkpoints: bytes, scales in float32, and embeddings in the model's type.
    for shard, tensors in {
        1: {"weights": torch.zeros(4096, dtype=torch.uint8), "scales": torch.zeros(8)},
        2: {"embeddings": torch.zeros(64, 2, dtype=torch.float16)},
    }.items():
        safetensors.save_file(tensors, tmp_path / f"model-{shard}-of-2.safetensors")
    geometry = KVGeometry.from_config(tmp_path / "config.json")
    assert geometry.dtype == "float16"
    assert geometry.notes == ("the configuration names no dtype; float16 is that of the weights",)
    chosen = KVGeometry.from_config(tmp_path, dtype="float32")
    assert (chosen.dtype, chosen.notes) == ("float32", ())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
    named = KVGeometry.from_config(tmp_path)
    assert (named.dtype, named.notes) == ("float32", ())


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\0" * 9]
)
def test_weights_that_are_not_there_yet_say_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "no weights are beside it" in KVGeometry.from_config(tmp_path).notes[0]


def test_the_whole_names_the_dtype_before_its_text_part() -> None:
    whole = {"model_type": "llava", "dtype": "float16", "text_config": LLAMA | {"dtype": "float32"}}
    assert KVGeometry.from_config(whole).dtype == "float16"
    whole.pop("dtype")
    assert KVGeometry.from_config(whole).dtype == "float32"


def test_a_type_of_weights_is_not_that_of_the_cache() -> None:
    geometry = KVGeometry.from_config(LLAMA | {"dtype": "float8_e4m3fn"})
    assert geometry.dtype == "bfloat16"
    assert "float8_e4m3fn is the type of the weights" in geometry.notes[0]


def test_a_quantised_cache_that_the_checkpoint_asks_for_is_said(tmp_path: Path) -> None:
    scheme = {"quant_method": "compressed-tensors",
              "kv_cache_scheme": {"num_bits": 8, "type": "float"}}  # fmt: skip
    config = LLAMA | {"dtype": "bfloat16", "quantization_config": scheme}
    [note] = KVGeometry.from_config(config).notes
    assert "asks for a KV cache of 8-bit float (kv_cache_scheme)" in note
    assert KVGeometry.from_config(config, dtype="fp8").notes == ()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"dtype": "bfloat16"}))
    written = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    [note] = KVGeometry.from_config(tmp_path).notes
    assert "asks for a KV cache of FP8 (kv_cache_quant_algo)" in note


# --- without Transformers -------------------------------------------------------------------------

PUBLISHED: list[dict[str, Any]] = [
    LLAMA | {"dtype": "bfloat16"},
    LLAMA | {"model_type": "mistral", "sliding_window": 8},
    LLAMA | {"model_type": "mistral", "sliding_window": None},
    LLAMA | {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
    LLAMA | {"model_type": "qwen3", "head_dim": 32},
    LLAMA | {"model_type": "gemma3_text", "sliding_window": 8,
             "layer_types": ["sliding_attention", "full_attention"]},
    {"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 32},
    LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8},
    LLAMA | {"model_type": "plamo", "num_key_value_heads": None, "n_shared_head": 2},
]  # fmt: skip
LACKING: list[tuple[dict[str, Any], str]] = [
    (LLAMA | {"num_key_value_heads": None}, "names no num_key_value_heads; llama needs it"),
    (LLAMA | {"num_hidden_layers": None}, "names no num_hidden_layers; llama needs it"),
    (LLAMA | {"model_type": "qwen3", "head_dim": None}, "names no head_dim; qwen3 needs it"),
    (LLAMA | {"model_type": "gpt_oss", "sliding_window": 8}, "names no layer_types; gpt_oss needs"),
    (LLAMA | {"model_type": "deepseek_v3"}, "names no kv_lora_rank; deepseek_v3 needs it"),
    (LLAMA | {"model_type": "qwen3_next"}, "what a model of the family 'qwen3_next' caches: pip"),
    ({"model_type": "gemma3", "text_config": LLAMA}, "a model of the family 'gemma3' caches: pip"),
]
BLOCKED = """
import json, sys
sys.modules["transformers"] = None
from kvkeep.core.geometry import KVGeometry
for config in json.loads(sys.stdin.read()):
    try:
        print(KVGeometry.from_config(config))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_without_transformers_written_fields_give_the_same_or_a_refusal() -> None:
    given = [*PUBLISHED, *(config for config, _ in LACKING)]
    answers = subprocess.run(
        [sys.executable, "-c", BLOCKED], input=json.dumps(given), text=True, check=True,
        capture_output=True,
    ).stdout.splitlines()  # fmt: skip
    for config, answer in zip(PUBLISHED, answers, strict=False):
        assert answer == str(KVGeometry.from_config(config))
    for (config, why), answer in zip(LACKING, answers[len(PUBLISHED) :], strict=True):
        assert answer.startswith("UnsupportedModel"), config
        assert why in answer
