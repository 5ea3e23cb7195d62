"""Read what each layer has: attention of which reach, a state, both or nothing.

Configurations list the kinds, or have a period or pattern from which their family derives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvkeep.core.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.geometry.fields import ConfigFields

__all__ = ["LayerKind", "read_layers"]

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Families with several attentions per layer, each with its own KV.
_ATTENTIONS_PER_LAYER: Final = {"longcat_flash": 2}
_LISTS: Final = ("layer_types", "layers_block_type", "block_types")
# Names of kinds in configurations → ours.
_KINDS: Final[dict[str, str]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "hybrid": "hybrid",
    "mlp": "nothing",
    "moe": "nothing",
}
_LETTERS: Final = {"M": "state", "*": "full", "-": "nothing", "E": "nothing"}
_PATTERN: Final = ("sliding_window_pattern", "_sliding_window_pattern")
# Default period of full layers in families that may omit it.
_PATTERN_OF_FAMILY: Final = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma4": 6,
    "gemma4_unified": 6,
    "cohere2": 4,
    "gpt_oss": 2,
    "olmo3": 4,
}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer has.

    Attributes:
        attention: its reach; None for a layer without attention.
        span: tokens of its window or chunk.
        state: whether it keeps a state.
    """

    attention: Literal["full", "window", "chunk"] | None
    span: int | None = None
    state: bool = False


def read_layers(fields: ConfigFields) -> list[LayerKind]:
    """Return what each layer has that stores something of its own, the others included.

    Raises:
        UnsupportedModel: the configuration contradicts itself, or has layers of unknown kinds.
    """
    layers = fields.number(*_LAYERS)
    kinds = _kinds(fields, layers) if layers is not None else _listed(fields)
    if not kinds:
        fields.needed(*_LAYERS)
    if layers is not None and len(kinds) != layers:
        raise UnsupportedModel(
            f"the configuration has {len(kinds)} layer types for {layers} layers"
        )
    kinds *= _ATTENTIONS_PER_LAYER.get(fields.family, 1)
    # The last layers of some families attend over the KV of earlier ones and store none.
    shared = fields.number("num_kv_shared_layers", least=0) or 0
    if shared >= len(kinds):
        raise UnsupportedModel("num_kv_shared_layers leaves no layer that stores KV of its own")
    spans = _spans(fields, kinds)
    return [spans[kind] for kind in kinds[: len(kinds) - shared]]


def _spans(fields: ConfigFields, kinds: list[str]) -> dict[str, LayerKind]:
    found = {
        "full": LayerKind("full"),
        "state": LayerKind(None, state=True),
        "hybrid": LayerKind("full", state=True),
        "nothing": LayerKind(None),
    }
    if "sliding" in kinds:
        before = fields.number("sliding_window_size") if fields.family == "mimo_v2_flash" else None
        # MiMo counts the tokens before the one that attends.
        span = fields.needed("sliding_window", "window_size") if before is None else before + 1
        found["sliding"] = LayerKind("window", span)
    if "chunked" in kinds:
        found["chunked"] = LayerKind("chunk", fields.needed("attention_chunk_size"))
    return found


def _kinds(fields: ConfigFields, layers: int) -> list[str]:
    """Return "full", "sliding", "chunked", "state", "hybrid" or "nothing" for each layer."""
    if kinds := _listed(fields):
        if fields.base_family.startswith("gemma4"):
            kinds[-1] = "full"  # Transformers changes it so
        return kinds
    if (of_family := _OF_FAMILY.get(fields.base_family)) is not None:
        return of_family(fields, layers)
    return _sliding(fields, layers)


def _listed(fields: ConfigFields) -> list[str]:
    for name in _LISTS:
        if types := fields.texts(name):
            if other := sorted(set(types) - set(_KINDS)):
                raise UnsupportedModel(
                    f"{fields.family or 'this model'} has layers of type {', '.join(other)}; known "
                    f"are {', '.join(_KINDS)}"
                )
            return [_KINDS[kind] for kind in types]
    pattern = fields.text("hybrid_override_pattern")
    if set(pattern) - set(_LETTERS):
        raise UnsupportedModel(
            f"hybrid_override_pattern is {pattern!r}; the letters M, *, - and E are known"
        )
    return [_LETTERS[letter] for letter in pattern]


def _sliding(fields: ConfigFields, layers: int) -> list[str]:
    window = fields.number("sliding_window", least=0)
    if not window or fields.value("use_sliding_window") is False:
        return ["full"] * layers
    if (pattern := _pattern(fields)) is not None:
        kinds = [pattern[layer % len(pattern)] for layer in range(layers)]
        return [*kinds[:-1], "full"] if fields.base_family.startswith("gemma4") else kinds
    # Qwen2: the first layers are full, the others slide.
    full = min(layers, fields.number("max_window_layers", least=0) or 0)
    return ["full"] * full + ["sliding"] * (layers - full)


def _pattern(fields: ConfigFields) -> list[str] | None:
    """Return the kinds that repeat: 4 means three sliding layers and a full one, as "LLLG" does."""
    given = next((name for name in _PATTERN if name in fields), None)
    if given is None:
        period = _PATTERN_OF_FAMILY.get(fields.base_family)
    elif isinstance(fields.value(given), str):
        return ["full" if letter == "G" else "sliding" for letter in fields.text(given)] or None
    else:
        period = fields.number(given)
    return None if period is None else ["sliding"] * (period - 1) + ["full"]


# --- families that derive the kinds ----------------------------------------------------------


def _gpt_neo(fields: ConfigFields, layers: int) -> list[str]:
    """Return the kinds of GPT-Neo, from pairs such as ``[[["global", "local"], 12]]``."""
    try:
        pattern = [
            kind for kinds, times in fields.value("attention_types") for kind in kinds * times
        ]
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"attention_types is {fields.value('attention_types')!r}; pairs of kinds and a number "
            "of times are needed"
        ) from error
    return ["sliding" if kind == "local" else "full" for kind in pattern]


def _marked(marks: list[int], layers: int, marked: str, other: str) -> list[str]:
    """Return ``marked`` for the layers whose number is in ``marks``."""
    return [marked if layer in marks else other for layer in range(layers)]


def _every(period: int, offset: int, layers: int, there: str) -> list[str]:
    """Return ``there`` for layers ``offset``, ``offset + period``, …; a state for the others."""
    return [there if layer % period == offset else "state" for layer in range(layers)]


def _interval(fields: ConfigFields, layers: int) -> list[str]:
    period = fields.number("full_attention_interval") or 4
    return _every(period, period - 1, layers, "full")


def _bailing(fields: ConfigFields, layers: int) -> list[str]:
    period = fields.needed("layer_group_size")
    return _every(period, period - 1, layers, "full")


def _olmo_hybrid(_: ConfigFields, layers: int) -> list[str]:
    kinds = _every(4, 3, layers, "full")
    return kinds if "full" in kinds else [*kinds[:-1], "full"]


def _kimi(fields: ConfigFields, layers: int) -> list[str]:
    part = fields.part("linear_attn_config")
    if part is not None and "full_attn_layers" in part:
        from_zero = [number - 1 for number in part.numbers("full_attn_layers")]
        return _marked(from_zero, layers, "full", "state")
    return ["state", *_every(4, 0, layers, "full")[1:]]


def _jamba(fields: ConfigFields, layers: int) -> list[str]:
    period = fields.number("attn_layer_period") or 8
    offset = fields.number("attn_layer_offset", least=0)
    return _every(period, 4 if offset is None else offset, layers, "full")


def _zamba(fields: ConfigFields, layers: int) -> list[str]:
    period = fields.number("attn_layer_period") or 6
    offset = fields.number("attn_layer_offset", least=0)
    rest = _every(period, 4 if offset is None else offset, max(0, layers - 3), "hybrid")
    return ["state", "state", "hybrid", *rest][:layers]


def _unlisted(fields: ConfigFields, _: int) -> list[str]:
    fields.needed("layers_block_type")
    return []


def _lfm(fields: ConfigFields, layers: int) -> list[str]:
    if "full_attn_idxs" not in fields:
        fields.needed("layer_types")
    return _marked(fields.numbers("full_attn_idxs"), layers, "full", "state")


def _lfm3(_: ConfigFields, layers: int) -> list[str]:
    period = ["sliding", "state", "full", "state"]
    return ["state", *(period[layer % 4] for layer in range(1, layers))]


def _minimax(fields: ConfigFields, layers: int) -> list[str]:
    types = fields.numbers("attn_type_list") or [(layer + 1) % 2 for layer in range(layers)]
    return ["full" if full else "state" for full in types]


def _llama4(fields: ConfigFields, layers: int) -> list[str]:
    if "attention_chunk_size" not in fields:
        return ["full"] * layers
    period = fields.number("no_rope_layer_interval") or 4
    rotary = fields.numbers("no_rope_layers") or [(layer + 1) % period for layer in range(layers)]
    return ["chunked" if one else "full" for one in rotary]


def _mimo(fields: ConfigFields, layers: int) -> list[str]:
    pattern = fields.numbers("hybrid_layer_pattern") or [
        layer > 0 and (layer + 1) % 6 for layer in range(layers)
    ]
    return ["sliding" if slides else "full" for slides in pattern]


_OF_FAMILY: Final[dict[str, Callable[[ConfigFields, int], list[str]]]] = {
    "gpt_neo": _gpt_neo,
    "qwen3_next": _interval,
    "qwen3_5": _interval,
    "qwen3_5_moe": _interval,
    "olmo_hybrid": _olmo_hybrid,
    "kimi_linear": _kimi,
    "bailing_hybrid": _bailing,
    "falcon_h1": lambda _, layers: ["hybrid"] * layers,
    "bamba": lambda fields, layers: _marked(
        fields.numbers("attn_layer_indices"), layers, "full", "state"
    ),
    "granitemoehybrid": lambda _, layers: ["state"] * layers,
    "mamba": lambda _, layers: ["state"] * layers,
    "mamba2": lambda _, layers: ["state"] * layers,
    "falcon_mamba": lambda _, layers: ["state"] * layers,
    "jamba": _jamba,
    "zamba": _zamba,
    "zamba2": _unlisted,
    "nemotron_h": _unlisted,
    "lfm2": _lfm,
    "lfm2_moe": _lfm,
    "lfm3": _lfm3,
    "minimax": _minimax,
    "llama4": _llama4,
    "mimo_v2_flash": _mimo,
}
