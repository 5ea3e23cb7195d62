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

from kvkeep.serve.engine.attention.part import PartBatch
from kvkeep.serve.engine.attention.plan import CPU, GPU, PlacedPiece

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from kvkeep.core.groups.tensors import LayerPages
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.memory import KVMemory
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

    Of a hybrid model, ``rows`` are `SequenceGroups.tables`: for each window int32 [pages, pool
    pages of a row], -1 where a row is no longer kept. ``state`` is `SequenceGroups.state`, the pool
    pages of the running state, which the pass updates. A piece that starts at 0 begins with an
    empty state, whatever lies in these pages.
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


class PagedBatch:
    """The pieces of one forward pass, laid out as one row of T tokens.

    ``input_ids`` and ``positions`` are int64 [1, T], ``outputs`` int64 [n] (the rows that need
    logits, piece after piece), ``parts`` the pieces over each part of ``memory``. A batch is made
    for one forward pass. Attention calls are sized by ``grain`` (None: the device's). Thread
    safety: none.
    """

    def __init__(
        self, pieces: Sequence[Piece], memory: KVMemory, *, grain: Grain | None = None
    ) -> None:
        assert pieces, "a batch has at least one piece"
        self.pieces = list(pieces)
        self.memory = memory
        self.device = memory.device
        ends = np.cumsum([len(piece.tokens) for piece in self.pieces])
        self.begins: list[int] = [0, *ends[:-1].tolist()]
        self.input_ids = self._row(np.concatenate([piece.tokens for piece in self.pieces]))
        positions = [np.arange(piece.start, piece.stop) for piece in self.pieces]
        self.positions = self._row(np.concatenate(positions))
        wanted = [
            np.arange(end - piece.outputs, end)
            for end, piece in zip(ends.tolist(), self.pieces, strict=True)
        ]
        self.outputs = self._row(np.concatenate(wanted))[0]
        grain = grain or (CPU if self.device.type == "cpu" else GPU)
        self.parts = [
            PartBatch(
                [self._placed(number, part) for number in range(len(self.pieces))],
                part.tensors, scratch=memory.scratch, grain=grain, kernel=kernel,
            )
            for part, kernel in zip(memory.parts, memory.kernels, strict=True)
        ]  # fmt: skip

    def _row(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64))[None].to(self.device)

    def _placed(self, number: int, part: LayerPages) -> PlacedPiece:
        piece = self.pieces[number]
        pages = piece.pages if part.window is None else piece.rows[part.window][:, part.page]
        return PlacedPiece(self.begins[number], piece.start, piece.stop, pages)

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
        scoring: Scoring,
    ) -> torch.Tensor:
        """Store K and V of the new tokens, then attend from each to all keys that it may see.

        ``query`` is [T, heads, dim], ``key`` and ``value`` are [T, kv_heads, dim]; returns [T,
        heads, dim]. The latents of a layer that keeps these are stored before, by `store_latent`.
        """
        home = self.memory.homes[layer]
        part = self.parts[home.part]
        if not home.shared and home.latent is None:
            part.store(home.at, key, value)
        return part.attend(
            home.at, query, key, value, reach=home.reach, scoring=scoring, latent=home.latent
        )

    def store_latent(self, layer: int, latent: torch.Tensor) -> None:
        """Store the latents [T, width] of the new tokens."""
        home = self.memory.homes[layer]
        self.parts[home.part].store(home.at, latent[:, None])
