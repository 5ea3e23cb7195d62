"""Read what attention stores of a token in each layer: heads and widths of K and V, or a latent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.groups import AttentionShape

if TYPE_CHECKING:
    from kvkeep.core.geometry.fields import ConfigFields
    from kvkeep.core.geometry.layers import LayerKind

__all__ = ["read_shapes"]

_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "kv_channels", "dim_head")
# Fields with the shape of some layers, and the field with the shape of the rest.
_OTHER_SHAPES: Final[dict[str, str]] = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_key_value_heads": "num_key_value_heads",
}
_UNREADABLE: Final = ("num_key_value_heads_per_layer", "block_configs")
# Overrides of a layer that change more than its shape.
_UNKNOWN_OVERRIDES: Final = ("skip", "sliding_window", "attention_chunk_size", "kv_lora_rank")


def read_shapes(fields: ConfigFields, kinds: list[LayerKind]) -> list[AttentionShape | None]:
    """Return the shape of each layer; None for a layer without attention.

    Raises:
        UnsupportedModel: the configuration lacks a field, or has different shapes in a form that is
            not known.
    """
    family = fields.family or "this model"
    for name in _UNREADABLE:
        if fields.flag(name):
            raise UnsupportedModel(f"{family} has layers of different shapes (it sets {name})")
    overrides = _overrides(fields, kinds)
    if not overrides:
        _check_even(fields, family)
        one = _shape(fields) if any(kind.attention for kind in kinds) else None
        return [one if kind.attention else None for kind in kinds]
    return [
        _shape(fields.changed(overrides.get(layer, {}))) if kind.attention else None
        for layer, kind in enumerate(kinds)
    ]


def _overrides(fields: ConfigFields, kinds: list[LayerKind]) -> dict[int, Mapping[str, object]]:
    """Return the fields that layers change, by layer; empty if all have one shape."""
    given = fields.value("per_layer_config")
    if given:
        return _given_overrides(fields, given)
    if fields.base_family in {"gemma4", "gemma4_unified"}:
        wide: dict[str, object] = {"head_dim": fields.number("global_head_dim") or 512}
        heads = fields.number("num_global_key_value_heads")
        if heads is not None and fields.flag("attention_k_eq_v"):
            wide["num_key_value_heads"] = heads
        return {layer: wide for layer, kind in enumerate(kinds) if kind.attention == "full"}
    if fields.family == "mimo_v2_flash":
        named = {common: fields.number(name) for name, common in _OTHER_SHAPES.items()}
        heads = fields.number("swa_num_key_value_heads") or 2 * _kv_heads(fields)
        near = {**named, "num_key_value_heads": heads}
        kept = {name: value for name, value in near.items() if value is not None}
        return {layer: kept for layer, kind in enumerate(kinds) if kind.attention == "window"}
    return {}


def _given_overrides(fields: ConfigFields, given: object) -> dict[int, Mapping[str, object]]:
    family = fields.family or "this model"
    try:
        if not isinstance(given, Mapping):
            raise TypeError
        found: dict[int, Mapping[str, object]] = {
            int(layer): dict(changed) for layer, changed in given.items()
        }
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"per_layer_config is {given!r}; fields by number of the layer are needed"
        ) from error
    for layer, changed in found.items():
        if unknown := [name for name in _UNKNOWN_OVERRIDES if changed.get(name)]:
            raise UnsupportedModel(
                f"{family} changes {', '.join(unknown)} in layer {layer} (per_layer_config)"
            )
    return found


def _check_even(fields: ConfigFields, family: str) -> None:
    for name, common in _OTHER_SHAPES.items():
        if name in fields and fields.value(name) != fields.value(common):
            raise UnsupportedModel(
                f"{family} has layers of different shapes: {name} is {fields.value(name)!r} and "
                f"{common} {fields.value(common)!r}"
            )


def _shape(fields: ConfigFields) -> AttentionShape:
    latent_dim = fields.number("kv_lora_rank")
    if latent_dim is not None:
        width = latent_dim + fields.needed("qk_rope_head_dim")
        return AttentionShape(1, width, latent_dim=latent_dim)
    return AttentionShape(_kv_heads(fields), _head_dim(fields), fields.number("v_head_dim"))


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
    if fields.family in {"zamba", "zamba2"}:  # attend over two hidden states side by side
        own = fields.number("attention_head_dim")
        return own or 2 * fields.needed(*_HIDDEN) // fields.needed(*_HEADS)
    if (explicit := fields.number(*_HEAD_DIM)) is not None:
        return explicit
    hidden, heads = fields.needed(*_HIDDEN), fields.needed(*_HEADS)
    if hidden % heads:
        raise UnsupportedModel(
            f"{heads} attention heads do not divide a hidden size of {hidden}, and the "
            "configuration names no head_dim"
        )
    return hidden // heads
