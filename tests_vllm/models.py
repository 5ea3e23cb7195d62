"""Small random models: large enough weights that a wrong byte of KV changes what they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

VOCABULARY = 512


def make_llama(path: Path, seed: int = 0, **config: Any) -> str:
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**_sizes(config))), path)


def make_gemma(path: Path) -> str:
    """Five layers of six see a window of 48 tokens: two groups, or more."""
    torch.manual_seed(0)
    config = _sizes({"num_hidden_layers": 6, "sliding_window": 48, "sliding_window_pattern": 6})
    return _save(Gemma3ForCausalLM(Gemma3TextConfig(**config)), path)


def make_gpt_oss(path: Path) -> str:
    """Every other layer sees a window of 48 tokens, and all have sinks."""
    torch.manual_seed(0)
    config = _sizes({
        "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    })  # fmt: skip
    return _save(GptOssForCausalLM(GptOssConfig(**config)), path)


def make_mistral(path: Path) -> str:
    """All layers see a window of 80 tokens: one group."""
    torch.manual_seed(0)
    return _save(MistralForCausalLM(MistralConfig(**_sizes({"sliding_window": 80}))), path)


def make_qwen_next(path: Path) -> str:
    """Three delta rules and an attention, in bfloat16: four groups, and blocks of 64 tokens.

    vLLM enlarges blocks until the KV of one is as large as a state, so the heads of the attention
    are large here, and those of the delta rules small.
    """
    torch.manual_seed(0)
    config = _sizes({
        "hidden_size": 64, "num_key_value_heads": 4, "head_dim": 64, "linear_num_value_heads": 2,
        "linear_num_key_heads": 1, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0, 1, 2],
    })  # fmt: skip
    return _save(Qwen3NextForCausalLM(Qwen3NextConfig(**config)), path)


def make_lfm2(path: Path) -> str:
    """Three short convolutions before an attention, so that each of their states matters."""
    torch.manual_seed(0)
    config = _sizes({
        "layer_types": ["conv", "conv", "conv", "full_attention"], "full_attn_idxs": [3],
        "conv_L_cache": 3, "conv_bias": False, "block_dim": 128, "conv_dim": 128,
        "block_ff_dim": 256, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    })  # fmt: skip
    return _save(Lfm2ForCausalLM(Lfm2Config(**config)), path)


def make_adapter(path: Path, seed: int) -> str:
    """A LoRA of rank 4 on queries, keys and values that changes a lot."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{start}.lora_A.weight"] = torch.randn(4, 128, generator=generator) * 0.3
            tensors[f"{start}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.3
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"], "base_model_name_or_path": "llama",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def _sizes(more: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096, "initializer_range": 0.1, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more,
    }  # fmt: skip


def _save(model: PreTrainedModel, path: Path) -> str:
    model.to(torch.float32).save_pretrained(str(path))
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(str(path))
    return str(path)
