"""A piece of many tokens, a prompt or a part of one, attends by itself.

It is bound by computing: its queries attend in rows of `Grain.query_rows`, so that few keys beyond
the causal edge are multiplied, and all rows share one mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.serve.engine.attention.paged import attend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.pages.prepared import Gather
    from kvkeep.serve.engine.attention.paged import Scoring
    from kvkeep.serve.engine.attention.setting import Placed, Setting

__all__ = ["LongPiece", "long_pieces"]


class _Step(NamedTuple):
    """Consecutive queries of one piece, and the keys from the first to the last that is seen."""

    rows: slice
    keys: slice
    mask: torch.Tensor  # [queries, keys]


@dataclass(frozen=True, slots=True, eq=False)
class LongPiece:
    """A piece with the keys it sees under one window."""

    rows: slice  # of the batch
    gather: Gather | None  # None: every key it sees is in the batch itself
    causal: bool  # and it sees all of them, up to each query
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
    ) -> None:
        """All are [T, heads, dim] of the whole batch; writes the piece's rows of ``out``."""
        if self.gather is None:
            keys, values = key[self.rows], value[self.rows]
        else:
            self.gather.fill(layer)
            keys, values = self.gather.keys, self.gather.values
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        # [kv_heads, group, tokens, dim]: the heads that share K and V are a view of it.
        queries = query.reshape(len(query), heads, group, -1).permute(1, 2, 0, 3)
        targets = out.view(len(query), heads, group, -1).permute(1, 2, 0, 3)
        keys, values = (
            part.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for part in (keys, values)
        )
        if self.causal and scoring.softcap is None:
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


def long_pieces(pieces: Sequence[Placed], setting: Setting) -> list[LongPiece]:
    """Plan ``pieces`` one by one."""
    if not pieces:
        return []
    spans = [one.piece.stop - one.first_page * setting.page_size for one in pieces]
    band = _band(max(spans), setting)
    return [_long_piece(one, band, setting) for one in pieces]


def _band(longest: int, setting: Setting) -> torch.Tensor:
    """The mask of ``query_rows`` queries, of which the last is at the last of ``longest`` keys.

    Who sees whom depends on the distance alone: seen from its lower right corner, this is the mask
    of every step.
    """
    rows = min(setting.grain.query_rows, longest)
    distance = torch.arange(longest - rows, longest)[:, None] - torch.arange(longest)
    seen = distance >= 0
    if setting.window is not None:
        seen &= distance < setting.window
    return setting.mask(seen)


def _long_piece(one: Placed, band: torch.Tensor, setting: Setting) -> LongPiece:
    piece, size = one.piece, setting.page_size
    base = one.first_page * size
    rows, longest = band.shape
    at = one.begin - piece.start
    steps = []
    for start in range(piece.start, piece.stop, rows):
        stop = min(start + rows, piece.stop)
        low = base if setting.window is None else max(base, start + 1 - setting.window)
        mask = band[rows - (stop - start) :, longest - (stop - low) :]
        steps.append(_Step(slice(at + start, at + stop), slice(low - base, stop - base), mask))
    cold = piece.start == 0
    last = one.first_page + one.num_pages(size)
    pages = None if cold else piece.pages[one.first_page : last]
    return LongPiece(
        rows=slice(one.begin, one.begin + len(piece.tokens)),
        gather=None if pages is None else setting.tensors.prepare_gather(pages, setting.scratch),
        causal=cold and setting.window is None,
        steps=steps,
    )
