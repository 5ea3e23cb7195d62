"""What each layer of a model caches, from its configuration: attention, a state, both or nothing.

The tests compare it with the caches that Transformers fills. What cannot be read for certain is
refused: a geometry that is almost right makes wrong pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.configuration import ConfigSource, read_configuration
from kvkeep.core.geometry.groups import AttentionShape, LayerGroup
from kvkeep.core.geometry.shape import KVGeometry
from kvkeep.core.geometry.states import STATEFUL, read_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.geometry.configuration import ConfigFields

__all__ = ["read_geometry"]

# Families that no field gives away, "_text" left out, and what they keep.
_REFUSED: Final[dict[str, str]] = {
    "blt": "keeps KV of bytes and of patches",
    "cpmant": "attends in both directions over its prompt",
    "diffusion_gemma": "generates by diffusion, over a canvas that attends in both directions",
    "inkling": "keeps states of convolutions inside its attention",
    "inkling2": "keeps states of convolutions inside its attention",
    "openai-gpt": "keeps no KV cache",
    "recurrent_gemma": "keeps a recurrent state in its modules, outside of caches",
    "reformer": "keeps hashes and hidden states",
    "rwkv": "keeps a recurrent state of a form that is not known",
    "xlnet": "keeps hidden states of the text before",
    "xlstm": "keeps a recurrent state of a form that is not known",
    "zaya": "keeps states of convolutions and a delayed value inside its attention",
}
# Fields set only by models that keep something of no known kind, and what that is.
_MARKS: Final[dict[str, str]] = {
    "add_cross_attention": "keys and values of another input",
    "cross_attention_layers": "keys and values of images in some layers",
    "index_head_dim": "an index key beside K and V",
    "indexer_head_dim": "an index key beside K and V",
    "compress_ratios": "compressed tokens",
    "compress_rates": "compressed tokens",
}
# Kinds of layers in configurations → ours: attention "full", "window" or "chunk", and "state".
_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "sliding_attention": ("window",),
    "chunked_attention": ("chunk",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "conv": ("state",),
    "hybrid": ("full", "state"),
    "mlp": (),
    "moe": (),
}


def read_geometry(config: ConfigSource, *, dtype: str | None, tp: int) -> KVGeometry:
    """See `KVGeometry.from_config`."""
    read = read_configuration(config)
    _check_servable(read.text)
    groups = [group.with_dtype(read.dtype) for group in _groups(read.text, read.layers)]
    if not groups:
        raise UnsupportedModel(f"{read.text.family} has no layer that keeps anything")
    notes = read.notes if dtype is None else ()
    return KVGeometry.of(groups, dtype=dtype or read.dtype, tp=tp, notes=notes)


def _check_servable(text: ConfigFields) -> None:
    """Refuse a model that keeps something of no known kind."""
    if text.base_family in _REFUSED:
        raise UnsupportedModel(
            f"{text.family} {_REFUSED[text.base_family]}; K and V or a latent of each token, and "
            "states of known families are supported"
        )
    for mark, kept in _MARKS.items():
        if text.flag(mark):
            raise UnsupportedModel(f"{text.family} keeps {kept} (it sets {mark})")


def _groups(text: ConfigFields, layers: list[ConfigFields]) -> Iterator[LayerGroup]:
    """Yield a group for each layer and each thing that it caches."""
    for number, (kinds, layer) in enumerate(zip(_kinds(text, layers), layers, strict=False)):
        if skipped := layer.value("skip"):
            raise UnsupportedModel(f"{text.family} skips {skipped} in layer {number}")
        for kind in kinds:
            if kind == "state":
                state, grid = read_state(layer)
                yield LayerGroup("state", (number,), state=state, grid=grid)
            else:
                yield _attention(number, kind, layer)


def _kinds(text: ConfigFields, layers: list[ConfigFields]) -> list[tuple[str, ...]]:
    """Return what each layer caches, as the caches of Transformers decide it."""
    types = text.texts("layer_types") or text.texts("layers_block_type")
    if not types:
        if text.base_family in STATEFUL:
            text.needed("layer_types")
        local = text.texts("attention_layers")  # GPT-Neo
        types = [_only_type(layer, number, local) for number, layer in enumerate(layers)]
    if unknown := sorted(set(types) - set(_KINDS)):
        raise UnsupportedModel(
            f"{text.family} has layers of type {', '.join(unknown)}; known are {', '.join(_KINDS)}"
        )
    if len(types) != len(layers):
        raise UnsupportedModel(
            f"the configuration has {len(types)} layer types for {len(layers)} layers"
        )
    # The last layers of some families attend over the KV of earlier ones and store none.
    shared = text.number("num_kv_shared_layers", least=0) or 0
    if shared >= len(types):
        raise UnsupportedModel("num_kv_shared_layers leaves no layer that stores KV of its own")
    return [_KINDS[name] for name in types[: len(types) - shared]]


def _only_type(layer: ConfigFields, number: int, local: list[str]) -> str:
    if layer.number("sliding_window", least=0) or (local and local[number] == "local"):
        return "sliding_attention"
    return "chunked_attention" if layer.flag("attention_chunk_size") else "full_attention"


def _attention(number: int, kind: str, layer: ConfigFields) -> LayerGroup:
    span = None
    if kind == "window":
        span = layer.needed("sliding_window", "window_size")
    elif kind == "chunk":
        span = layer.needed("attention_chunk_size")
    latent_dim = layer.number("kv_lora_rank")
    if latent_dim is not None:
        width = latent_dim + layer.needed("qk_rope_head_dim")
        return LayerGroup(
            "latent", (number,), AttentionShape(1, width, latent_dim=latent_dim), span
        )
    heads = _kv_heads(layer)
    if kind == "window" and layer.family == "mimo_v2_flash":
        heads *= 2  # as its model does
    shape = AttentionShape(heads, _head_dim(layer), layer.number("v_head_dim"))
    return LayerGroup(kind, (number,), shape, span)  # type: ignore[arg-type]


def _kv_heads(layer: ConfigFields) -> int:
    if layer.family == "falcon" and not layer.flag("new_decoder_architecture"):
        return 1 if layer.flag("multi_query") else layer.needed("num_attention_heads")
    attention = layer.part("attn_config")  # MPT
    nested = attention.number("kv_n_heads") if attention is not None else None
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return nested or layer.needed(*names)


def _head_dim(layer: ConfigFields) -> int:
    named = layer.number("head_dim")
    return named or layer.needed("hidden_size") // layer.needed("num_attention_heads")
