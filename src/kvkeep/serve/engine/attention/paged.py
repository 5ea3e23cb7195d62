"""Attention over pages, under the name by which Transformers models find it.

A model whose ``attn_implementation`` is `ATTENTION` hands its queries, keys and values to
`paged_attention`; the `PagedBatch` of the forward pass travels beside them as a keyword. No mask
function is registered under that name, which is how Transformers is told to build none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.core.errors import IllegalStep, UnsupportedModel

if TYPE_CHECKING:
    from kvkeep.serve.engine.attention.batch import PagedBatch

__all__ = ["ATTENTION", "Scoring", "attend", "attend_in_part", "paged_attention", "register"]

ATTENTION = "kvkeep_paged"


class Scoring(NamedTuple):
    """How a model makes scores of its queries and keys.

    ``scale`` None is one over the square root of the head dimension. ``softcap`` bounds the scores
    by a tanh (Gemma 2), which the fused kernels of torch do not know.
    """

    scale: float | None = None
    softcap: float | None = None


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
    """What a Transformers layer calls: [1, heads, T, dim] comes in, [1, T, heads, dim] goes out.

    Raises `UnsupportedModel` for a layer that brings a mask of its own, or no number; `prove` runs
    every layer once, so that this ends the loading and not a request.
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
        window=sliding_window,
        scoring=Scoring(scaling, softcap),
    )
    return out[None], None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Plain attention: [n, heads, queries, dim] over [n, heads, keys, dim].

    ``mask`` is added to the scores; None: each query sees every key, or with ``causal`` query i
    the keys up to i.
    """
    if scoring.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scale
        )
    assert not causal, "written out, a mask says it"
    out, _ = attend_in_part(query, key, value, scoring, mask=mask)
    return out.to(query.dtype)


def attend_in_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of a query's keys, to be put together with that to the others.

    Shapes as for `attend`. Returns what comes out, and the logarithm of the weight of all these
    keys together, float32 [n, heads, queries]. Everything is summed in float32 at least.
    """
    if scoring.softcap is None and query.device.type == "cpu":
        # What `scaled_dot_product_attention` calls on a CPU, which does not hand the weight on.
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scoring.scale
        )
        return out, weight
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = (query.to(wide) * scale) @ key.to(wide).transpose(2, 3)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ value.to(wide)).div_(total)
    return out, top.add_(total.log_())[..., 0]
