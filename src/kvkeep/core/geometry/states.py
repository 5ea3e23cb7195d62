"""Read the states of layers that are not attention, family by family.

A convolution keeps its last inputs, in the model's dtype; what recurs is kept in float32. Both as
Transformers' caches have it: an engine whose convolutions keep one input less takes a little less
room. The grid is the chunk in which the kernel computes prompts: only
there a resumed state continues exactly as an uninterrupted pass does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.dtypes import DTYPES, normalise_dtype
from kvkeep.core.geometry.groups import StateTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.geometry.fields import ConfigFields

__all__ = ["STATEFUL", "model_dtype", "read_state"]

_DELTA_GRID: Final = 64  # the chunk of the kernels of delta rules

_State = tuple[tuple[StateTensor, ...], int]


def read_state(fields: ConfigFields) -> _State:
    """Return the tensors of one layer's state, and its grid in tokens.

    Raises:
        UnsupportedModel: the shapes of this family are not known, or a field is missing.
    """
    reader = STATEFUL.get(fields.base_family)
    if reader is None:
        types = {*fields.texts("layer_types"), *fields.texts("layers_block_type")}
        raise UnsupportedModel(
            f"{fields.family or 'this model'} has layers of type {', '.join(sorted(types))}; the "
            f"states of these families are known: {', '.join(STATEFUL)}"
        )
    return reader(fields)


def model_dtype(fields: ConfigFields) -> str:
    """Return the element type in which the model computes; float32 if none is named."""
    named = fields.value("dtype") or fields.value("torch_dtype") or "float32"
    dtype = normalise_dtype(named)
    return dtype if DTYPES[dtype] > 1 else "bfloat16"


def _conv(
    fields: ConfigFields, kernel: int, parts: tuple[int, ...], units: tuple[int, ...] = ()
) -> StateTensor:
    shape = (sum(parts), kernel)
    return StateTensor("conv", shape, model_dtype(fields), 0, parts, units, follows=True)


def _delta(fields: ConfigFields) -> _State:
    """Gated delta rule: Qwen3-Next, Qwen3.5, OLMo Hybrid."""
    heads = fields.number("num_attention_heads")
    keys = fields.number("linear_num_key_heads") or heads or fields.needed("linear_num_key_heads")
    values = fields.number("linear_num_value_heads") or keys
    key_dim = fields.number("linear_key_head_dim")
    if key_dim is None:
        key_dim = 3 * fields.needed("hidden_size") // (4 * keys)  # OLMo Hybrid
    value_dim = fields.number("linear_value_head_dim") or 2 * key_dim
    return _delta_state(fields, (keys, key_dim), (values, value_dim))


def _kimi_delta(fields: ConfigFields) -> _State:
    """Kimi's delta rule, whose keys have as many heads as its values: Kimi Linear, Bailing."""
    part = fields.part("linear_attn_config")
    heads = part.number("num_heads") if part else None
    width = part.number("head_dim") if part else None
    heads = heads or fields.number("linear_num_heads") or fields.needed("num_attention_heads")
    width = width or fields.number("linear_head_dim") or fields.needed("head_dim")
    return _delta_state(fields, (heads, width), (heads, width))


def _delta_state(fields: ConfigFields, key: tuple[int, int], value: tuple[int, int]) -> _State:
    part = fields.part("linear_attn_config")
    kernel = part.number("short_conv_kernel_size") if part else None
    kernel = kernel or fields.number("linear_conv_kernel_dim", "short_conv_kernel_size") or 4
    (keys, key_dim), (values, value_dim) = key, value
    parts = (keys * key_dim, keys * key_dim, values * value_dim)
    recurrent = StateTensor("recurrent", (values, key_dim, value_dim), "float32", 0)
    return (_conv(fields, kernel, parts, (keys, keys, values)), recurrent), _DELTA_GRID


def _mamba2(fields: ConfigFields) -> _State:
    """Mamba-2: a convolution over x, B and C, and a state of each head."""
    heads = fields.needed("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if "mamba_n_heads" in fields:
        named = "mamba_d_head"
    else:
        named = next(
            (name for name in ("mamba_head_dim", "mamba_headdim") if name in fields), "head_dim"
        )
    if named not in fields or fields.value(named) == "auto" or fields.family == "zamba2":
        width = _inner(fields) // heads
    else:
        width = fields.needed(named)
    size = fields.needed("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.number("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    kernel = fields.number("mamba_d_conv", "conv_kernel") or 4
    parts = (heads * width, groups * size, groups * size)
    recurrent = StateTensor("recurrent", (heads, width, size), "float32", 0)
    grid = fields.needed("mamba_chunk_size", "chunk_size")
    return (_conv(fields, kernel, parts, (heads, groups, groups)), recurrent), grid


def _inner(fields: ConfigFields) -> int:
    """Return the inner width of a Mamba layer."""
    if (given := fields.number("mamba_d_ssm")) is not None:
        return given
    return (fields.number("mamba_expand", "expand") or 2) * fields.needed("hidden_size")


def _mamba(fields: ConfigFields) -> _State:
    """Mamba: a state for each inner channel."""
    inner = fields.number("intermediate_size") or _inner(fields)
    return _scan(fields, inner, (inner,))


def _jamba(fields: ConfigFields) -> _State:
    inner = _inner(fields)
    return _scan(fields, inner, (inner,))


def _zamba(fields: ConfigFields) -> _State:
    inner, heads = _inner(fields), fields.number("n_mamba_heads") or 2
    return _scan(fields, inner, (heads, inner // heads))


def _scan(fields: ConfigFields, inner: int, channels: tuple[int, ...]) -> _State:
    size = fields.needed("mamba_d_state", "state_size")
    kernel = fields.number("mamba_d_conv", "conv_kernel") or 4
    recurrent = StateTensor("recurrent", (*channels, size), "float32", 0)
    return (_conv(fields, kernel, (inner,)), recurrent), 1


def _short_conv(fields: ConfigFields) -> _State:
    """Short convolutions of LFM: nothing recurs."""
    return (_conv(fields, fields.needed("conv_L_cache"), (fields.needed("hidden_size"),)),), 1


def _lightning(fields: ConfigFields) -> _State:
    """Lightning attention of MiniMax, whose state is in the model's dtype."""
    heads = fields.needed("num_attention_heads")
    width = fields.number("head_dim") or fields.needed("hidden_size") // heads
    shape = (heads, width, width)
    return (StateTensor("recurrent", shape, model_dtype(fields), 0, follows=True),), 1


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
