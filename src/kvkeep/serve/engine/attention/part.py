"""`PartBatch`: the pieces of one forward pass, over the pages of layers that share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvkeep.serve.engine.attention.cascade import Cascade, cascades
from kvkeep.serve.engine.attention.flash import Tables
from kvkeep.serve.engine.attention.long import LongPiece, long_pieces
from kvkeep.serve.engine.attention.memory import EVERYTHING, Reach
from kvkeep.serve.engine.attention.plan import PlacedPiece, PlanContext
from kvkeep.serve.engine.attention.short import SHORT, ShortGroup, groups, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.core.pages.prepared import Scratch
    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.flash import Kernel
    from kvkeep.serve.engine.attention.latent import LatentMaps
    from kvkeep.serve.engine.attention.plan import Grain
    from kvkeep.serve.engine.attention.short import Rows

__all__ = ["PartBatch"]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How the pieces of a batch attend with one reach; each token is in one of these lists."""

    long: Sequence[LongPiece]
    short: Sequence[ShortGroup]
    cascades: Sequence[Cascade]
    short_rows: Rows  # rows in ``short`` and ``cascades``

    def attend_short(
        self, layer: int, query: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Write the rows of ``out`` that are in groups and cascades."""
        for group in self.short:
            out[group.rows] = group.attend(layer, query, scoring)
        for cascade in self.cascades:
            cascade.attend(layer, query, scoring, out)


class PartBatch:
    """Pieces with the page tables of some layers. Thread safety: none.

    With a ``kernel``, attention reads pages in place where the kernel can do what a layer asks for;
    without, pages are gathered into ``scratch``, in calls sized by ``grain``.

    Attributes:
        slots: int64 [T], where each new token's K and V are stored.
    """

    def __init__(
        self,
        placed: Sequence[PlacedPiece],
        tensors: PagedTensors,
        *,
        scratch: Scratch,
        grain: Grain,
        kernel: Kernel | None = None,
    ) -> None:
        self._placed = placed
        self._tensors = tensors
        self._scratch = scratch
        self._grain = grain
        self._kernel = kernel
        self._longest = max(one.stop for one in placed)
        size = tensors.page_size
        positions = [np.arange(one.start, one.stop) for one in placed]
        slots = np.concatenate([
            one.pages[at // size].astype(np.int64) * size + at % size
            for one, at in zip(placed, positions, strict=True)
        ])  # fmt: skip
        self.slots = torch.from_numpy(slots).to(tensors.device)
        self._places = tensors.prepare_store(self.slots)
        # One plan per reach: layers of the same window share masks and gathers.
        self._plans: dict[Reach, _Plan] = {}
        self._tables: dict[Reach, Tables] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor | None = None) -> None:
        """Store K and V, or latents, of the new tokens: [T, kv_heads, dim]."""
        self._tensors.store(layer, self._places, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        reach: Reach,
        scoring: Scoring,
        latent: LatentMaps | None = None,
    ) -> torch.Tensor:
        """Attend from each new token to all keys that it may see, which are stored.

        ``query`` is [T, heads, dim], ``key`` and ``value`` are [T, kv_heads, dim], those of the new
        tokens; returns [T, heads, dim]. With ``latent``, the pages hold latents.
        """
        if reach.span is not None and reach.span >= self._longest:
            reach = EVERYTHING  # no sequence is longer
        if self._kernel is not None and scoring.sinks is None and not reach.chunked:
            k, v = self._views(layer)
            tables = self._kernel_tables(reach)
            return self._kernel(query, k, v, tables, window=reach.span, scoring=scoring)
        plan = self._plans.get(reach)
        if plan is None:
            heads = key.shape[1] if latent is None else 1
            plan = self._plans[reach] = self._planned(reach, query.shape[1] // heads)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for piece in plan.long:
            piece.attend(layer, query, key, value, scoring=scoring, out=out, latent=latent)
        if latent is None:
            plan.attend_short(layer, query, scoring, out)
        elif plan.short or plan.cascades:
            if scoring.scale is None:
                scoring = scoring._replace(scale=query.shape[-1] ** -0.5)
            rows = plan.short_rows
            absorbed = query.new_empty(*query.shape[:2], latent.keys.shape[1])
            absorbed[rows] = latent.absorb(query[rows])
            attended = query.new_empty(*query.shape[:2], latent.values.shape[1])
            plan.attend_short(layer, absorbed, scoring, attended)
            out[rows] = latent.value(attended[rows])
        return out

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of ``layer`` as [pages, page_size, heads, dim], whatever the layout."""
        k, v = self._tensors.k(layer), self._tensors.v(layer)
        return (k, v) if self._tensors.layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def _kernel_tables(self, reach: Reach) -> Tables:
        tables = self._tables.get(reach)
        if tables is None:
            pieces = list(self._seeing(reach))
            tables = Tables.of(pieces, self._tensors.page_size, self._tensors.device)
            self._tables[reach] = tables
        return tables

    def _planned(self, reach: Reach, group: int) -> _Plan:
        window = None if reach.chunked else reach.span
        context = PlanContext(self._tensors, self._scratch, self._grain, window, group)
        long: list[PlacedPiece] = []
        short: list[PlacedPiece] = []
        for one in self._seeing(reach):
            (short if one.tokens <= SHORT else long).append(one)
        shared, apart = cascades(short, context)
        rows = [np.arange(one.begin, one.begin + one.tokens) for one in short]
        return _Plan(
            long_pieces(long, context),
            groups(apart, context),
            shared,
            rows_of(np.concatenate(rows), self._tensors.device) if rows else slice(0),
        )

    def _seeing(self, reach: Reach) -> Iterator[PlacedPiece]:
        """Yield the pieces with the first key that each sees, cut where chunks begin."""
        for one in self._placed:
            if not reach.chunked:
                first = reach.first(one.start)
                yield PlacedPiece(one.begin, one.start, one.stop, one.pages, first)
                continue
            assert reach.span is not None
            start = one.start
            while start < one.stop:
                first = reach.first(start)
                stop = min(one.stop, first + reach.span)
                begin = one.begin + start - one.start
                yield PlacedPiece(begin, start, stop, one.pages, first)
                start = stop
