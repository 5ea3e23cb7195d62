"""Attention of a piece of many tokens: a prompt, or a chunk of one.

It is bound by computing. Its queries attend in steps of `Grain.query_rows`, so that few keys beyond
the causal edge are multiplied, and the masks of all steps are parts of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.serve.engine.attention.dense import attend
from kvkeep.serve.engine.attention.plan import ALIGNED, aligned

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
    distance: int  # tokens from the first key to the first query


@dataclass(slots=True, eq=False)
class _Band:
    """The masks of all steps, of up to ``rows`` queries and ``distance`` tokens from the first key.

    A mask depends only on how far a query is from a key, so that of a step is a part of one. It is
    made when it is first asked for: pieces that are plainly causal need none.
    """

    rows: int
    distance: int
    context: PlanContext
    _made: torch.Tensor | None = field(default=None, init=False)

    def mask(self, step: _Step) -> torch.Tensor:
        """Return the mask [queries, keys] of a step; it begins at an aligned address."""
        if self._made is None:
            self._made = self._make()
        queries, keys = (part.stop - part.start for part in (step.rows, step.keys))
        # Queries and keys as far apart as these are on a diagonal, and it has a place that is.
        top = step.distance % ALIGNED
        left = self._most - (step.distance - top)
        return self._made[top : top + queries, left : left + keys]

    @property
    def _most(self) -> int:
        return aligned(self.distance)

    def _make(self) -> torch.Tensor:
        """Return the mask of queries from ``_most`` on and keys from 0 on.

        Behind a long prompt it takes hundreds of MiB: without a window nothing else is allocated.
        """
        tensors, window = self.context.tensors, self.context.window
        height = self.rows + ALIGNED - 1
        shape = (height, aligned(self._most + height))
        hidden = torch.full(shape, float("-inf"), dtype=tensors.dtype, device=tensors.device)
        mask = hidden.triu_(self._most + 1)  # keys behind each query
        if window is not None:
            mask += torch.full_like(mask, float("-inf")).tril_(self._most - window)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class LongPiece:
    """A piece with the keys it sees under one window."""

    rows: slice  # rows of the batch
    gather: Gather | None  # None: all keys it sees are in the batch itself
    causal: bool  # whether the plain causal mask holds, from the first key on
    steps: Sequence[_Step]
    band: _Band

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
                mask=self.band.mask(step),
            )


def long_pieces(pieces: Sequence[PlacedPiece], context: PlanContext) -> list[LongPiece]:
    """Plan each of ``pieces``."""
    if not pieces:
        return []
    rows = min(context.grain.query_rows, max(one.tokens for one in pieces))
    cut = [_steps(one, rows, context) for one in pieces]
    band = _Band(rows, max(step.distance for steps in cut for step in steps), context)
    return [_long_piece(one, steps, band, context) for one, steps in zip(pieces, cut, strict=True)]


def _first_key(one: PlacedPiece, page_size: int) -> int:
    """Return the position of the first of the keys that are at hand."""
    return one.first if _is_cold(one) else one.first // page_size * page_size


def _is_cold(one: PlacedPiece) -> bool:
    """Whether no key lies before the piece."""
    return one.first == one.start


def _steps(one: PlacedPiece, rows: int, context: PlanContext) -> list[_Step]:
    base = _first_key(one, context.page_size)
    at = one.begin - one.start
    steps = []
    for start in range(one.start, one.stop, rows):
        stop = min(start + rows, one.stop)
        low = one.first if context.window is None else max(one.first, start + 1 - context.window)
        steps.append(
            _Step(slice(at + start, at + stop), slice(low - base, stop - base), start - low)
        )
    return steps


def _long_piece(
    one: PlacedPiece, steps: list[_Step], band: _Band, context: PlanContext
) -> LongPiece:
    cold = _is_cold(one)
    pages = None if cold else one.seen_pages(context.page_size)
    return LongPiece(
        rows=slice(one.begin, one.begin + one.tokens),
        gather=None if pages is None else context.tensors.prepare_gather(pages, context.scratch),
        causal=cold and context.window is None,
        steps=steps,
        band=band,
    )
