"""Read which layers have a sliding window, in all forms that configurations use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel

if TYPE_CHECKING:
    from kvkeep.core.geometry.fields import ConfigFields

__all__ = ["read_windows"]

_PATTERN: Final = ("sliding_window_pattern", "_sliding_window_pattern")
# Default period of full layers in families that may omit it.
_PATTERN_OF_FAMILY: Final = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}


def read_windows(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, None for full attention.

    The window of a chunked layer is its chunk, the most it sees.

    Raises:
        UnsupportedModel: the configuration contradicts itself.
    """
    kinds = _kinds(fields, layers)
    if len(kinds) != layers:
        raise UnsupportedModel(
            f"the configuration has {len(kinds)} layer types for {layers} layers"
        )
    sizes: dict[str, int | None] = {"full": None}
    if "sliding" in kinds:
        sizes["sliding"] = fields.needed("sliding_window", "window_size")
    if "chunked" in kinds:
        sizes["chunked"] = fields.needed("attention_chunk_size")
    return tuple(sizes[kind] for kind in kinds)


def _kinds(fields: ConfigFields, layers: int) -> list[str]:
    """Return "full", "sliding" or "chunked" for each layer."""
    if types := fields.texts("layer_types"):
        return [kind.removesuffix("_attention") for kind in types]
    if fields.family == "gpt_neo":
        return _gpt_neo(fields, layers)
    window = fields.number("sliding_window", least=0)
    if not window or fields.value("use_sliding_window") is False:
        return ["full"] * layers
    if (pattern := _pattern(fields)) is not None:
        return [pattern[layer % len(pattern)] for layer in range(layers)]
    # Qwen2: the first layers are full, the others slide.
    full = min(layers, fields.number("max_window_layers", least=0) or 0)
    return ["full"] * full + ["sliding"] * (layers - full)


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


def _pattern(fields: ConfigFields) -> list[str] | None:
    """Return the kinds that repeat: 4 means three sliding layers and a full one, as "LLLG" does."""
    given = next((name for name in _PATTERN if name in fields), None)
    if given is None:
        period = _PATTERN_OF_FAMILY.get(fields.family)
    elif isinstance(fields.value(given), str):
        return ["full" if letter == "G" else "sliding" for letter in fields.text(given)] or None
    else:
        period = fields.number(given)
    return None if period is None else ["sliding"] * (period - 1) + ["full"]
