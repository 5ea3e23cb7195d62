"""The model of the proof: a Llama of random weights, and its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from gpu_parts.figures import Setting

__all__ = ["ModelShape", "make_model", "shape_of"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama; the names are those of its configuration in Transformers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    dtype: str

    @property
    def geometry(self) -> KVGeometry:
        """The model's KV."""
        return KVGeometry(
            self.num_hidden_layers, self.num_key_value_heads, self.head_dim, self.dtype
        )


# The first has the shape of Llama 3.2 1B. A CPU computes float32 faster than bfloat16.
_SHAPES = {
    "full": ModelShape(2048, 8192, 16, 32, 8, 64, 128_256, "bfloat16"),
    "small": ModelShape(384, 1024, 6, 6, 2, 64, 4096, "float32"),
    "smallest": ModelShape(64, 128, 2, 2, 1, 32, 256, "float32"),
}


def shape_of(setting: Setting) -> ModelShape:
    """Return the shape of the model for a size."""
    return _SHAPES[setting.size]


def make_model(setting: Setting) -> Any:
    """Return a Transformers model of random weights, made on the device, the same at every call."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - may be absent

    shape = shape_of(setting)
    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, tie_word_embeddings=True, max_position_embeddings=65_536,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))  # type: ignore[no-untyped-call]
    return model.to(setting.device).eval()
