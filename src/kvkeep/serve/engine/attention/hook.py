"""The attention function that Transformers models call in place of their own.

A model whose ``attn_implementation`` is `ATTENTION` calls `paged_attention` with its queries, keys
and values; the `PagedBatch` of the forward pass comes with them as a keyword argument. No mask
function is registered under that name, so Transformers builds no masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import IllegalStep, UnsupportedModel
from kvkeep.serve.engine.attention.dense import Scoring

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvkeep.serve.engine.attention.batch import PagedBatch

__all__ = ["ATTENTION", "is_paged", "paged_attention", "register", "switch_attention"]

ATTENTION = "kvkeep_paged"


def is_paged(model: PreTrainedModel) -> bool:
    """Whether ``model`` attends over pages."""
    return _implementation(model) == ATTENTION


def switch_attention(model: PreTrainedModel, implementation: str) -> None:
    """Let ``model`` call the attention that is registered as ``implementation``.

    Raises:
        UnsupportedModel: it does not let its attention be replaced.
    """
    model.set_attn_implementation(implementation)
    if _implementation(model) != implementation:
        raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")


def _implementation(model: PreTrainedModel) -> str | None:
    name: str | None = model.config.get_text_config()._attn_implementation
    return name


def register() -> None:
    """Register `paged_attention` with Transformers; may be called again."""
    from transformers import AttentionInterface  # noqa: PLC0415 - seconds to import

    AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_batch: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one Transformers layer: [1, heads, T, dim] comes in, [1, T, heads, dim] goes out.

    ``s_aux`` are attention sinks, as Transformers' interface calls them. Windows come from the
    geometry, which `survey` compares with the model.

    Raises `UnsupportedModel` for a layer with a mask of its own, or without a ``layer_idx``.
    `prove` runs every layer once, so that this fails the loading and not a request.
    """
    if paged_batch is None:
        raise IllegalStep("this model attends over kvkeep's pages; run it with Runner.forward")
    layer = getattr(module, "layer_idx", None)
    if attention_mask is not None or not isinstance(layer, int):
        what = "a mask of its own" if attention_mask is not None else "no number of its layer"
        raise UnsupportedModel(
            f"{type(module).__name__} hands its attention {what}: it needs more than causal "
            "attention with K and V of each token"
        )
    out = paged_batch.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Scoring(scaling, softcap, s_aux),
    )
    return out[None], None
