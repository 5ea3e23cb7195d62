"""What one forward pass computes: pieces of sequences in one row, and how each attends.

A batch is one row of tokens, whatever it is made of: a cold prompt, the rest of a prompt whose
beginning is cached, one decoded token, several speculated ones. Every piece attends to the pages
of its own sequence, from position 0 to each token's own:

    tokens   [ a b c d e | x | p q ]       three pieces
    start      0           57  16          where each begins in its sequence
    attends    0…4         0…57 0…17       its pages hold what came before
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvkeep.engine.attention import attend

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from kvkeep.pages.tensors import PagedTensors

    IntArray = npt.NDArray[np.int32]

__all__ = ["PagedBatch", "Piece"]

# Queries of a long piece are attended to in rows of this many, so that masks stay small and keys
# beyond the causal edge are not multiplied at all.
QUERY_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one sequence that a forward pass computes.

    ``tokens`` are the new ids, ``start`` the position of the first in its sequence, ``pages`` the
    sequence's page table: it covers ``start + len(tokens)`` tokens, and the first ``start`` of
    them are computed already. ``outputs`` is of how many of its last tokens logits are wanted:
    none in the middle of a prompt, one to decode, each token's to verify drafts.
    """

    tokens: IntArray
    start: int
    pages: IntArray
    outputs: int = 1

    def __post_init__(self) -> None:
        assert len(self.tokens) > 0, "a piece has at least one token"
        assert self.start >= 0
        assert 0 <= self.outputs <= len(self.tokens), "logits are those of tokens of the piece"

    @property
    def stop(self) -> int:
        """The position after the last token: the keys its last token attends to."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Consecutive queries of one piece, and the keys they see: [keys_from, keys_to)."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None  # bool [queries, keys], or None: plain causal from key 0


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A piece of several tokens, with the keys it sees under one window."""

    rows: slice
    pages: torch.Tensor  # int64
    length: int
    cold: bool  # every key it sees is in the batch itself
    steps: list[_Rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Singles:
    """All pieces of one token: attended to together, keys padded to the longest."""

    rows: torch.Tensor  # int64 [n]
    pages: torch.Tensor  # int64: the table of each, one after the other, padded
    mask: torch.Tensor  # bool [n, 1, 1, keys]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    spans: list[_Span]
    singles: _Singles | None


class PagedBatch:
    """The pieces of one forward pass, laid out as one row of T tokens.

    ``input_ids`` and ``positions`` are int64 [1, T], ``slots`` int64 [T] (where each token's K and
    V go), ``outputs`` int64 [n] (the rows whose logits are wanted, piece after piece). Made for one
    forward pass, and thrown away after it. Thread safety: none.
    """

    def __init__(self, pieces: Sequence[Piece], tensors: PagedTensors) -> None:
        assert pieces, "a batch has at least one piece"
        self.pieces = list(pieces)
        self.tensors = tensors
        self.device = tensors.device
        ends = np.cumsum([len(piece.tokens) for piece in self.pieces])
        self._begins = [0, *ends[:-1].tolist()]
        self.input_ids = self._row(np.concatenate([piece.tokens for piece in self.pieces]))
        self.positions = self._row(
            np.concatenate([np.arange(piece.start, piece.stop) for piece in self.pieces])
        )
        self.slots = torch.cat(
            [tensors.slots(piece.pages, piece.start, piece.stop) for piece in self.pieces]
        )
        wanted = [
            np.arange(end - piece.outputs, end)
            for end, piece in zip(ends.tolist(), self.pieces, strict=True)
        ]
        self.outputs = torch.from_numpy(np.concatenate(wanted)).to(self.device)
        # One plan per window: layers of the same window share masks and padded tables.
        self._plans: dict[int | None, _Plan] = {}

    def _row(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64))[None].to(self.device)

    def run(self, model: PreTrainedModel) -> torch.Tensor:
        """The forward pass; returns the logits of ``outputs``: [n, vocabulary], n may be 0."""
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
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store K and V of the new tokens, then attend from each to all that it may see.

        ``query`` [T, heads, dim], ``key`` and ``value`` [T, kv_heads, dim]; returns
        [T, heads, dim]. ``window`` counts the keys a token sees, itself included.
        """
        self.tensors.store(layer, self.slots, key, value)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._planned(window)
        out = torch.empty_like(query)
        for span in plan.spans:
            if span.cold:
                keys, values = key[span.rows], value[span.rows]
            else:
                keys, values = self.tensors.gather(layer, span.pages, span.length)
            for step in span.steps:
                out[step.rows] = attend(
                    query[step.rows].transpose(0, 1)[None],
                    keys[step.keys].transpose(0, 1)[None],
                    values[step.keys].transpose(0, 1)[None],
                    mask=step.mask,
                    scale=scale,
                    softcap=softcap,
                )[0].transpose(0, 1)
        if plan.singles is not None:
            out[plan.singles.rows] = self._attend_singles(
                layer, query, plan.singles, scale, softcap
            )
        return out

    def _attend_singles(
        self,
        layer: int,
        query: torch.Tensor,
        singles: _Singles,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        n, length = singles.mask.shape[0], singles.mask.shape[-1]
        keys, values = (
            part.view(n, length, *part.shape[1:]).transpose(1, 2)
            for part in self.tensors.gather(layer, singles.pages, n * length)
        )
        # The query heads of one KV head stand where queries would: nothing is repeated.
        grouped = query[singles.rows].view(n, keys.shape[1], -1, query.shape[-1])
        out = attend(grouped, keys, values, mask=singles.mask, scale=scale, softcap=softcap)
        return out.flatten(1, 2)

    def _planned(self, window: int | None) -> _Plan:
        spans: list[_Span] = []
        singles: list[tuple[int, Piece]] = []
        for begin, piece in zip(self._begins, self.pieces, strict=True):
            if len(piece.tokens) == 1:
                singles.append((begin, piece))
            else:
                spans.append(self._span(begin, piece, window))
        return _Plan(spans, self._singles(singles, window) if singles else None)

    def _span(self, begin: int, piece: Piece, window: int | None) -> _Span:
        page_size = self.tensors.page_size
        # Keys before the window of the first query are not gathered at all.
        first_page = 0 if window is None else max(0, piece.start + 1 - window) // page_size
        base = first_page * page_size
        steps: list[_Rows] = []
        for start in range(piece.start, piece.stop, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, piece.stop)
            low = base if window is None else max(base, start + 1 - window)
            at = begin - piece.start
            steps.append(
                _Rows(
                    rows=slice(at + start, at + stop),
                    keys=slice(low - base, stop - base),
                    mask=self._mask(start, stop, low, window),
                )
            )
        return _Span(
            rows=slice(begin, begin + len(piece.tokens)),
            pages=torch.from_numpy(piece.pages[first_page:].astype(np.int64)).to(self.device),
            length=piece.stop - base,
            cold=piece.start == 0,
            steps=steps,
        )

    def _mask(self, start: int, stop: int, low: int, window: int | None) -> torch.Tensor | None:
        """Which of the keys [low, stop) each query of [start, stop) sees."""
        if start == low == 0 and (window is None or window >= stop):
            return None
        queries = torch.arange(start, stop, device=self.device)[:, None]
        keys = torch.arange(low, stop, device=self.device)[None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)

    def _singles(self, singles: list[tuple[int, Piece]], window: int | None) -> _Singles:
        page_size = self.tensors.page_size
        firsts = [
            0 if window is None else max(0, piece.stop - window) // page_size
            for _, piece in singles
        ]
        lasts = [-(-piece.stop // page_size) for _, piece in singles]
        width = max(last - first for first, last in zip(firsts, lasts, strict=True))
        table = np.zeros((len(singles), width), np.int64)  # the padding is page 0, masked below
        for row, (first, last, (_, piece)) in enumerate(zip(firsts, lasts, singles, strict=True)):
            table[row, : last - first] = piece.pages[first:last]
        position = np.array(firsts)[:, None] * page_size + np.arange(width * page_size)
        stops = np.array([piece.stop for _, piece in singles])[:, None]
        seen = position < stops
        if window is not None:
            seen &= position >= stops - window
        return _Singles(
            rows=torch.tensor([begin for begin, _ in singles], device=self.device),
            pages=torch.from_numpy(table).flatten().to(self.device),
            mask=torch.from_numpy(seen)[:, None, None].to(self.device),
        )
