"""Shape and limits of a Transformers model's KV."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel, require
from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["geometry_of", "rope_limit", "takes_positions"]

# Rotary embeddings that change at all positions once a text exceeds a length.
_LENGTH_DEPENDENT_ROPE: Final = {"dynamic", "longrope"}


def geometry_of(model: PreTrainedModel) -> KVGeometry:
    """Return the shape of the model's KV in Transformers' caches.

    Raises:
        UnsupportedModel: the KV of this model cannot be reused, with the reason.
    """
    transformers = require("transformers", "transformers")
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise UnsupportedModel(
            f"a Transformers model that generates is needed, got {name}; of a wrapper, pass what "
            "it wraps"
        )
    geometry = KVGeometry.from_config(model.config, dtype=str(model.dtype))
    geometry.needs_plain("KeptModel")
    text = model.config.get_text_config()
    if geometry.latent_dim is not None:
        raise UnsupportedModel(
            f"{name} has latent attention, which Transformers caches as keys and values of every "
            "head; keeping these is not supported"
        )
    if model._is_stateful:
        raise UnsupportedModel(f"{name} keeps a recurrent state, not only K and V of its tokens")
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        raise UnsupportedModel(f"{name} attends in both directions: its KV cannot be reused")
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UnsupportedModel(f"{name} lies on {', '.join(sorted(devices))}; one device is needed")
    return geometry


def rope_limit(model: PreTrainedModel) -> int | None:
    """Return the length from which the rotary embedding depends on the text's length, or None."""
    text = model.config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [value for value in ropes.values() if isinstance(value, dict)] or [ropes]:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            name = "original_max_position_embeddings"
            original = rope.get(name) or getattr(text, name, None)
            return int(original or text.max_position_embeddings)
    return None


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the model takes positions; if not, its KV depends on padding."""
    return "position_ids" in inspect.signature(model.forward).parameters
