"""Read the states of layers that are not attention, family by family.

A convolution keeps its last inputs, in the model's dtype; what recurs is kept in float32. Both as
Transformers' caches have it: an engine whose convolutions keep one input less takes a little less
room. The grid is the chunk in which the kernel computes prompts: only
there a resumed state continues exactly as an uninterrupted pass does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.groups import StateTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.geometry.configuration import ConfigFields

__all__ = ["STATEFUL", "read_state"]

_DELTA_GRID: Final = 64  # the chunk of the kernels of delta rules

_State = tuple[tuple[StateTensor, ...], int]


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
