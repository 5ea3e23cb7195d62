"""What is read off a Transformers model: the shape and limits of its KV, and whose it is."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import TYPE_CHECKING, Final

from kvkeep.errors import UnsupportedModel, require
from kvkeep.geometry import KVGeometry
from kvkeep.store.weights import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "active_adapters",
    "geometry_of",
    "revision_of",
    "rope_limit",
    "takes_positions",
    "weights_state",
]

# Fields of a configuration that change no key and no value.
_NOT_COMPUTED: Final = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "label2id", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
# Rotary embeddings that change for all positions once a text outgrows a length.
_LENGTH_DEPENDENT_ROPE: Final = {"dynamic", "longrope"}


def revision_of(model: PreTrainedModel) -> str:
    """What stands for ``model`` in a namespace: its weights, and how they are computed with.

    `weights_digest`, and a digest of the configuration's fields that are not its class's defaults:
    another rotary scaling gives other keys with the same weights.
    """
    fields = {
        name: value
        for name, value in model.config.to_diff_dict().items()
        if name not in _NOT_COMPUTED
    }
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{weights_digest(model)}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def geometry_of(model: PreTrainedModel) -> KVGeometry:
    """The shape of the model's KV in Transformers' caches, or a refusal."""
    transformers = require("transformers", "transformers")
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise UnsupportedModel(
            f"a Transformers model that generates is needed, got {name}; of a wrapper, pass what "
            "it wraps"
        )
    geometry = KVGeometry.from_config(model.config, dtype=str(model.dtype))
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
    """Tokens from which on the model's rotary embedding depends on the text's length, or None."""
    text = model.config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [value for value in ropes.values() if isinstance(value, dict)] or [ropes]:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            name = "original_max_position_embeddings"
            original = rope.get(name) or getattr(text, name, None)
            return int(original or text.max_position_embeddings)
    return None


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether tokens can be told where they stand: else their KV depends on the padding before."""
    return "position_ids" in inspect.signature(model.forward).parameters


def active_adapters(model: PreTrainedModel) -> str:
    """The adapters (LoRA) that are switched on."""
    active = model.active_adapters() if getattr(model, "_hf_peft_config_loaded", False) else []
    return ",".join(active)


def weights_state(model: PreTrainedModel) -> tuple[int, int, str]:
    """Another value after training steps, ``load_state_dict`` or a change of adapters."""
    every = [parameter for parameter in model.parameters() if not parameter.is_inference()]
    return len(every), sum(parameter._version for parameter in every), active_adapters(model)
