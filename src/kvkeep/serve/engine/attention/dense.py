"""Attention to gathered keys, whole or in part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Scoring", "attend", "attend_partial", "with_sinks"]


class Scoring(NamedTuple):
    """A model's parameters for computing scores from queries and keys.

    ``scale`` None is one over the square root of the head dimension. ``softcap`` bounds the scores
    by a tanh (Gemma 2), which torch's fused kernels do not support. ``sinks`` [heads] are scores of
    a key without a value, which each query sees besides its own (gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attend with [n, heads, queries, dim] to [n, heads, keys, dim].

    ``mask`` is added to the scores; None: each query sees every key, or with ``causal`` query i the
    keys up to i. ``scoring.sinks`` are of a shape that fits [n, heads, queries].
    """
    if scoring.softcap is None and scoring.sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scale
        )
    assert not causal, "with softcap or sinks, pass a mask"
    out, lse = attend_partial(query, key, value, scoring, mask=mask)
    if scoring.sinks is not None:
        out = with_sinks(out, lse, scoring.sinks)
    return out.to(query.dtype)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the attention ``out`` […, dim] as if each query saw a sink, too.

    ``lse`` […] are the log-sum-exps of the scores without ``sinks``, whose shape fits. A sink takes
    part in the softmax and adds nothing: it scales the output by e^lse / (e^lse + e^sink).
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]
    return (out.to(share.dtype) * share).to(out.dtype)


def attend_partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to some of a query's keys, to be merged with attention to the others; without sinks.

    Shapes as for `attend`. Returns the output and the log-sum-exp of the scores (LSE), float32 [n,
    heads, queries]. Sums are float32 or wider.
    """
    alike = query.shape[-1] == value.shape[-1]
    if scoring.softcap is None and alike and query.device.type == "cpu":
        # `scaled_dot_product_attention` calls this operator on a CPU, but does not return its LSE.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scoring.scale
        )
        return out, lse
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
