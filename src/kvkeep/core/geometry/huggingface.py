"""What each layer of a model caches, from its configuration: attention, a state, both or nothing.

The tests compare it with the caches that Transformers fills. What cannot be read for certain is
refused: a geometry that is almost right makes wrong pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.configuration import ConfigSource, read_configuration
from kvkeep.core.geometry.groups import AttentionShape, LayerGroup, StateTensor
from kvkeep.core.geometry.shape import KVGeometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
_DELTA_GRID: Final = 64  # the chunk of the kernels of delta rules
_State = tuple[tuple[StateTensor, ...], int]


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


def read_state(fields: ConfigFields) -> _State:
    """Return the tensors of one layer's state, and its grid in tokens.

    Tensors in the model's dtype are given as bfloat16; `StateTensor.with_dtype` changes them.

    Raises:
        UnsupportedModel: the shapes of this family are not known, or a field is missing.
    """
    reader = STATEFUL.get(fields.base_family)
    if reader is None:
        raise UnsupportedModel(
            f"{fields.family} has layers with a state of a form that is not known; the states of "
            f"these families are known: {', '.join(STATEFUL)}"
        )
    return reader(fields)


def _conv(kernel: int, parts: tuple[int, ...], units: tuple[int, ...] = ()) -> StateTensor:
    return StateTensor("conv", (sum(parts), kernel), "bfloat16", 0, parts, units, follows=True)


def _recurrent(*shape: int) -> StateTensor:
    return StateTensor("recurrent", shape, "float32", 0)


def _delta(fields: ConfigFields) -> _State:
    """Gated delta rule: Qwen3-Next, Qwen3.5, OLMo Hybrid."""
    keys = fields.needed("linear_num_key_heads")
    values = fields.needed("linear_num_value_heads")
    key_dim, value_dim = (
        fields.needed("linear_key_head_dim"),
        fields.needed("linear_value_head_dim"),
    )
    parts = (keys * key_dim, keys * key_dim, values * value_dim)
    conv = _conv(fields.needed("linear_conv_kernel_dim"), parts, (keys, keys, values))
    return (conv, _recurrent(values, key_dim, value_dim)), _DELTA_GRID


def _kimi_delta(fields: ConfigFields) -> _State:
    """Kimi's delta rule, whose keys have as many heads as its values: Kimi Linear, Bailing."""
    heads, width = fields.needed("linear_num_heads"), fields.needed("linear_head_dim")
    conv = _conv(fields.needed("linear_conv_kernel_dim"), 3 * (heads * width,), 3 * (heads,))
    return (conv, _recurrent(heads, width, width)), _DELTA_GRID


def _mamba2(fields: ConfigFields) -> _State:
    """Mamba-2: a convolution over x, B and C, and a state of each head."""
    heads = fields.needed("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    width = fields.needed("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    size = fields.needed("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.needed("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = fields.needed("mamba_d_conv", "conv_kernel")
    conv = _conv(kernel, (heads * width, groups * size, groups * size), (heads, groups, groups))
    grid = fields.needed("mamba_chunk_size", "chunk_size")
    return (conv, _recurrent(heads, width, size)), grid


def _mamba(fields: ConfigFields) -> _State:
    """Mamba: a state for each inner channel."""
    inner = fields.needed("intermediate_size")
    conv = _conv(fields.needed("conv_kernel"), (inner,))
    return (conv, _recurrent(inner, fields.needed("state_size"))), 1


def _jamba(fields: ConfigFields) -> _State:
    inner = fields.needed("mamba_expand") * fields.needed("hidden_size")
    conv = _conv(fields.needed("mamba_d_conv"), (inner,))
    return (conv, _recurrent(inner, fields.needed("mamba_d_state"))), 1


def _zamba(fields: ConfigFields) -> _State:
    (conv, recurrent), grid = _jamba(fields)
    heads = fields.needed("n_mamba_heads")
    inner, size = recurrent.shape
    return (conv, _recurrent(heads, inner // heads, size)), grid


def _short_conv(fields: ConfigFields) -> _State:
    """Short convolutions of LFM: nothing recurs."""
    return (_conv(fields.needed("conv_L_cache"), (fields.needed("hidden_size"),)),), 1


def _lightning(fields: ConfigFields) -> _State:
    """Lightning attention of MiniMax, whose state is in the model's dtype."""
    heads = fields.needed("num_attention_heads")
    width = fields.number("head_dim") or fields.needed("hidden_size") // heads
    shape = (heads, width, width)
    return (StateTensor("recurrent", shape, "bfloat16", 0, follows=True),), 1


STATEFUL: Final[dict[str, Callable[[ConfigFields], _State]]] = {
    "qwen3_next": _delta,
    "qwen3_5": _delta,
    "qwen3_5_moe": _delta,
    "olmo_hybrid": _delta,
    "kimi_linear": _kimi_delta,
    "bailing_hybrid": _kimi_delta,
    "falcon_h1": _mamba2,
    "bamba": _mamba2,
    "granitemoehybrid": _mamba2,
    "mamba2": _mamba2,
    "zamba2": _mamba2,
    "nemotron_h": _mamba2,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "jamba": _jamba,
    "zamba": _zamba,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "minimax": _lightning,
}
"""How to read the state of each family, by model type without "_text"."""
