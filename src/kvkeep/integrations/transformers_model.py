"""Shape and limits of a Transformers model's KV."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

from kvkeep.core.errors import UnsupportedModel, require
from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

__all__ = ["geometry_of", "needs_snapshots", "one_pass", "rope_limit", "takes_positions"]

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
    text = model.config.get_text_config()
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


def needs_snapshots(geometry: KVGeometry) -> bool:
    """Return whether a cache of the model holds more, or less, than K and V of every token."""
    groups = geometry.groups
    return len(groups) > 1 or groups[0].kind != "full"


@torch.no_grad()
def one_pass(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Make one pass over some columns, as the chunked prefill of ``generate`` does.

    ``mask`` are all columns up to the last of ``ids``. Returns the logits of the last one at least.
    """
    named: Any = model
    settings: dict[str, Any] = {"use_cache": True}
    if takes_positions(model):
        settings["position_ids"] = positions.to(model.device)
    if named._supports_logits_to_keep():
        settings["logits_to_keep"] = 1
    inputs = named.prepare_inputs_for_generation(
        ids.to(model.device),
        past_key_values=cache,
        attention_mask=mask.to(model.device),
        is_first_iteration=True,
        **settings,
    )
    logits: torch.Tensor = named(**inputs, return_dict=True).logits
    return logits
