"""Attention of a piece of many tokens: a prompt, or a chunk of one.

It is bound by computing. Its queries attend in steps of `Grain.query_rows`, so that few keys beyond
the causal edge are multiplied, and all steps share one mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.serve.engine.attention.dense import attend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.pages.prepared import Gather
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.latent import LatentMaps
    from kvkeep.serve.engine.attention.plan import PlacedPiece, PlanContext

__all__ = ["LongPiece", "long_pieces"]


class _Step(NamedTuple):
    """Consecutive queries of one piece, and the range of keys that any of them sees."""

    rows: slice
    keys: slice
    mask: torch.Tensor  # [queries, keys]


@dataclass(frozen=True, slots=True, eq=False)
class LongPiece:
    """A piece with the keys it sees under one window."""

    rows: slice  # rows of the batch
    gather: Gather | None  # None: all keys it sees are in the batch itself
    causal: bool  # whether the plain causal mask holds, from the first key on
    steps: Sequence[_Step]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scoring: Scoring,
        out: torch.Tensor,
        latent: LatentMaps | None = None,
    ) -> None:
        """Write the piece's rows of ``out``; all tensors are [T, heads, dim] of the whole batch.

        With ``latent``, the gathered latents are expanded to keys and values by it.
        """
        if self.gather is None:
            keys, values = key[self.rows], value[self.rows]
        else:
            self.gather.fill(layer)
            keys, values = self.gather.keys, self.gather.values
            if latent is not None:
                keys, values = latent.expand(keys[:, 0])
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        # [kv_heads, group, tokens, dim]: the heads that share K and V are a view of it.
        queries = query.reshape(len(query), heads, group, -1).permute(1, 2, 0, 3)
        targets = out.view(len(query), heads, group, -1).permute(1, 2, 0, 3)
        keys, values = (
            part.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for part in (keys, values)
        )
        sinks = None if scoring.sinks is None else scoring.sinks.view(heads, group, 1)
        scoring = scoring._replace(sinks=sinks)
        if self.causal and scoring.softcap is None and sinks is None:
            targets[:, :, self.rows] = attend(
                queries[:, :, self.rows], keys, values, scoring, causal=True
            )
            return
        for step in self.steps:
            targets[:, :, step.rows] = attend(
                queries[:, :, step.rows],
                keys[:, :, step.keys],
                values[:, :, step.keys],
                scoring,
                mask=step.mask,
            )


def long_pieces(pieces: Sequence[PlacedPiece], context: PlanContext) -> list[LongPiece]:
    """Plan each of ``pieces``."""
    if not pieces:
        return []
    spans = [one.stop - one.first // context.page_size * context.page_size for one in pieces]
    band = _band(max(spans), context)
    return [_long_piece(one, band, context) for one in pieces]


def _band(longest: int, context: PlanContext) -> torch.Tensor:
    """Return the mask of ``query_rows`` queries that end at the last of ``longest`` keys.

    A mask depends only on the distance of query and key, so the mask of every step is the lower
    right corner of this one.
    """
    rows = min(context.grain.query_rows, longest)
    distance = torch.arange(longest - rows, longest)[:, None] - torch.arange(longest)
    seen = distance >= 0
    if context.window is not None:
        seen &= distance < context.window
    return context.mask(seen)


def _long_piece(one: PlacedPiece, band: torch.Tensor, context: PlanContext) -> LongPiece:
    size = context.page_size
    cold = one.first == one.start  # no key lies before the piece
    base = one.first if cold else one.first // size * size
    rows, longest = band.shape
    at = one.begin - one.start
    steps = []
    for start in range(one.start, one.stop, rows):
        stop = min(start + rows, one.stop)
        low = one.first if context.window is None else max(one.first, start + 1 - context.window)
        mask = band[rows - (stop - start) :, longest - (stop - low) :]
        steps.append(_Step(slice(at + start, at + stop), slice(low - base, stop - base), mask))
    pages = None if cold else one.seen_pages(size)
    return LongPiece(
        rows=slice(one.begin, one.begin + one.tokens),
        gather=None if pages is None else context.tensors.prepare_gather(pages, context.scratch),
        causal=cold and context.window is None,
        steps=steps,
    )
