"""Attention over pages, under the name by which Transformers models find it.

A model whose ``attn_implementation`` is `ATTENTION` hands its queries, keys and values to
`paged_attention`; the `PagedBatch` of the forward pass travels beside them as a keyword. No mask
function is registered under that name, which is how Transformers is told to build none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.errors import IllegalStep

if TYPE_CHECKING:
    from kvkeep.engine.batch import PagedBatch

__all__ = ["ATTENTION", "attend", "paged_attention", "register"]

ATTENTION = "kvkeep_paged"


def register() -> None:
    """Make `paged_attention` known to Transformers; calling it again changes nothing."""
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
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What a Transformers layer calls: [1, heads, T, dim] comes in, [1, T, heads, dim] goes out."""
    if paged_batch is None:
        raise IllegalStep("this model attends over kvkeep's pages; run it with Runner.forward")
    assert attention_mask is None, "a mask was built for an attention that makes its own"
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = paged_batch.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Plain attention: [n, heads, queries, dim] over [n, kv_heads, keys, dim].

    ``mask`` is True where a query sees a key; None is causal, with query i at key i. ``softcap``
    bounds the scores by a tanh (Gemma 2), which the fused kernels do not know.
    """
    grouped = query.shape[1] != key.shape[1]
    if softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
