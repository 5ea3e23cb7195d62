"""Read a model's KV shape from its Hugging Face configuration, without Transformers.

Families name the same number differently (``num_hidden_layers``, ``n_layer``, …) and leave out
their defaults. The tests compare the results with caches that Transformers fills. A configuration
that cannot be read for certain is refused: a geometry that is almost right makes wrong pages.
"""

from __future__ import annotations

from typing import Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.families import check_servable
from kvkeep.core.geometry.fields import ConfigFields, ConfigSource
from kvkeep.core.geometry.shape import KVGeometry
from kvkeep.core.geometry.windows import read_windows

__all__ = ["read_geometry"]

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "kv_channels", "dim_head")
# Families with several attentions per layer, each with its own KV.
_ATTENTIONS_PER_LAYER: Final = {"longcat_flash": 2}


def read_geometry(config: ConfigSource, *, dtype: str | None, tp: int) -> KVGeometry:
    """See `KVGeometry.from_config`."""
    fields = ConfigFields.read(config)
    check_servable(fields)
    layers = fields.needed(*_LAYERS) * _ATTENTIONS_PER_LAYER.get(fields.family, 1)
    windows = read_windows(fields, layers)
    # The last layers of some families attend over the KV of earlier ones and store none.
    layers -= fields.number("num_kv_shared_layers", least=0) or 0
    if layers < 1:
        raise UnsupportedModel("num_kv_shared_layers leaves no layer that stores KV of its own")
    dtype = dtype or fields.value("dtype") or fields.value("torch_dtype") or "float32"
    latent_dim = fields.number("kv_lora_rank")
    if latent_dim is not None:
        return KVGeometry.mla(
            layers,
            latent_dim=latent_dim,
            rope_dim=fields.needed("qk_rope_head_dim"),
            dtype=dtype,
            windows=windows[:layers],
            tp=tp,
        )
    return KVGeometry(
        layers,
        _kv_heads(fields),
        _head_dim(fields),
        dtype,
        value_dim=fields.number("v_head_dim"),
        windows=windows[:layers],
        tp=tp,
    )


def _kv_heads(fields: ConfigFields) -> int:
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1  # Falcon, GPT-BigCode
    if fields.flag("multi_query_attention"):
        return fields.needed("multi_query_group_num")  # ChatGLM
    nested = fields.part("attn_config")
    if nested is not None and (heads := nested.number("kv_n_heads")) is not None:
        return heads  # MPT, DBRX
    return fields.number(*_KV_HEADS) or fields.needed(*_HEADS)


def _head_dim(fields: ConfigFields) -> int:
    if (explicit := fields.number(*_HEAD_DIM)) is not None:
        return explicit
    hidden, heads = fields.needed(*_HIDDEN), fields.needed(*_HEADS)
    if hidden % heads:
        raise UnsupportedModel(
            f"{heads} attention heads do not divide a hidden size of {hidden}, and the "
            "configuration names no head_dim"
        )
    return hidden // heads
