"""`PagedBatch`: the pieces of sequences that one forward pass computes, as one row of tokens.

A batch may mix cold prompts, the rest of prompts whose beginning is cached, decoded tokens, and
drafts. Each token of a piece attends to the pages of its own sequence, from position 0 to its own
position:

    tokens   [ a b c d e | x | p q ]       three pieces
    start      0           57  16          where each begins in its sequence
    attends    0…4         0…57 0…17       its pages hold what came before
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvkeep.serve.engine.attention.cascade import Cascade, cascades
from kvkeep.serve.engine.attention.flash import Tables
from kvkeep.serve.engine.attention.long import LongPiece, long_pieces
from kvkeep.serve.engine.attention.plan import CPU, GPU, PlacedPiece, PlanContext
from kvkeep.serve.engine.attention.short import SHORT, ShortGroup, groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from kvkeep.core.pages.prepared import Scratch
    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.flash import Kernel
    from kvkeep.serve.engine.attention.plan import Grain

    IntArray = npt.NDArray[np.int32]

__all__ = ["PagedBatch", "Piece"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one sequence that a forward pass computes.

    ``tokens`` are the new ids, ``start`` the position of the first in its sequence. ``pages`` is
    the sequence's page table: it covers ``start + len(tokens)`` tokens, of which the first
    ``start`` are computed. ``outputs`` is how many of its last tokens need logits: 0 in the middle
    of a prompt, 1 to decode, all to verify drafts.
    """

    tokens: IntArray
    start: int
    pages: IntArray
    outputs: int = 1
    rows: Sequence[IntArray] = ()
    state: IntArray | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) > 0, "a piece has at least one token"
        assert self.start >= 0
        assert 0 <= self.outputs <= len(self.tokens), "logits are those of tokens of the piece"

    @property
    def stop(self) -> int:
        """The position after the last token; its last token attends to this many keys."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How the pieces of a batch attend under one window; each piece is in one of these lists."""

    long: Sequence[LongPiece]
    short: Sequence[ShortGroup]
    cascades: Sequence[Cascade]


class PagedBatch:
    """The pieces of one forward pass, laid out as one row of T tokens.

    ``input_ids`` and ``positions`` are int64 [1, T], ``slots`` int64 [T] (where each token's K and
    V are stored), ``outputs`` int64 [n] (the rows that need logits, piece after piece). A batch is
    made for one forward pass; ``scratch`` is memory to gather into that outlives it. With a
    ``kernel``, attention reads pages in place; without, pages are gathered, in calls sized by
    ``grain`` (None: the device's). Thread safety: none.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        tensors: PagedTensors,
        *,
        scratch: Scratch | None = None,
        kernel: Kernel | None = None,
        grain: Grain | None = None,
    ) -> None:
        assert pieces, "a batch has at least one piece"
        self.pieces = list(pieces)
        self.tensors = tensors
        self.device = tensors.device
        ends = np.cumsum([len(piece.tokens) for piece in self.pieces])
        begins = [0, *ends[:-1].tolist()]
        self._placed = [
            PlacedPiece(piece, begin) for piece, begin in zip(self.pieces, begins, strict=True)
        ]
        self._longest = max(piece.stop for piece in self.pieces)
        self.input_ids = self._row(np.concatenate([piece.tokens for piece in self.pieces]))
        positions = [np.arange(piece.start, piece.stop) for piece in self.pieces]
        self.positions = self._row(np.concatenate(positions))
        size = tensors.page_size
        slots = [
            piece.pages[at // size].astype(np.int64) * size + at % size
            for piece, at in zip(self.pieces, positions, strict=True)
        ]
        self.slots = self._row(np.concatenate(slots))[0]
        self._places = tensors.prepare_store(self.slots)
        wanted = [
            np.arange(end - piece.outputs, end)
            for end, piece in zip(ends.tolist(), self.pieces, strict=True)
        ]
        self.outputs = self._row(np.concatenate(wanted))[0]
        self._scratch = tensors.scratch() if scratch is None else scratch
        self._grain = grain or (CPU if self.device.type == "cpu" else GPU)
        self._kernel = kernel
        self._tables = None if kernel is None else Tables.of(self._placed, self.device)
        # One plan per window: layers of the same window share masks and gathers.
        self._plans: dict[int | None, _Plan] = {}

    def _row(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64))[None].to(self.device)

    def run(self, model: PreTrainedModel) -> torch.Tensor:
        """Run the forward pass; return the logits of ``outputs``: [n, vocabulary], n may be 0."""
        with torch.inference_mode():
            logits: torch.Tensor = model(
                input_ids=self.input_ids,
                position_ids=self.positions,
                use_cache=False,
                logits_to_keep=self.outputs,
                paged_batch=self,
            ).logits
        return logits[0]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Store K and V of the new tokens, then attend from each to all keys that it may see.

        ``query`` is [T, heads, dim], ``key`` and ``value`` are [T, kv_heads, dim]; returns [T,
        heads, dim]. ``window`` counts the keys a token sees, itself included; None: all.
        """
        self.tensors.store(layer, self._places, key, value)
        if window is not None and window >= self._longest:
            window = None  # no sequence is longer than the window
        if self._kernel is not None:
            assert self._tables is not None
            k, v = self._views(layer)
            return self._kernel(query, k, v, self._tables, window=window, scoring=scoring)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._planned(window, query.shape[1] // key.shape[1])
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for piece in plan.long:
            piece.attend(layer, query, key, value, scoring=scoring, out=out)
        for group in plan.short:
            out[group.rows] = group.attend(layer, query, scoring)
        for cascade in plan.cascades:
            cascade.attend(layer, query, scoring, out)
        return out

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of ``layer`` as [pages, page_size, heads, dim], whatever the layout."""
        k, v = self.tensors.k(layer), self.tensors.v(layer)
        return (k, v) if self.tensors.layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def _planned(self, window: int | None, group: int) -> _Plan:
        context = PlanContext(self.tensors, self._scratch, self._grain, window, group)
        long: list[PlacedPiece] = []
        short: list[PlacedPiece] = []
        for one in self._placed:
            kind = short if len(one.piece.tokens) <= SHORT else long
            kind.append(self._within(one, window))
        shared, apart = cascades(short, context)
        return _Plan(long_pieces(long, context), groups(apart, context), shared)

    def _within(self, one: PlacedPiece, window: int | None) -> PlacedPiece:
        """Skip pages before the window of the first query."""
        if window is None:
            return one
        first = max(0, one.piece.start + 1 - window) // self.tensors.page_size
        return PlacedPiece(one.piece, one.begin, first)
