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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep, UnsupportedModel
from kvkeep.serve.engine.attention.dense import Scoring
from kvkeep.serve.engine.attention.flash import Tables
from kvkeep.serve.engine.attention.memory import EVERYTHING, Reach
from kvkeep.serve.engine.attention.plan import (
    CPU,
    GPU,
    SHORT,
    Cascade,
    LongPiece,
    PlacedPiece,
    PlanContext,
    ShortGroup,
    cascades,
    groups,
    long_pieces,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from kvkeep.core.groups.tensors import LayerPages
    from kvkeep.core.pages.tensors import PagedTensors, Scratch
    from kvkeep.serve.engine.attention.flash import Kernel
    from kvkeep.serve.engine.attention.memory import KVMemory, LatentMaps
    from kvkeep.serve.engine.attention.plan import Grain, Rows

    IntArray = npt.NDArray[np.int32]

__all__ = [
    "ATTENTION", "PagedBatch", "PartBatch", "Piece", "is_paged", "register", "switch_attention",
]  # fmt: skip


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


ATTENTION = "kvkeep_paged"


def is_paged(model: PreTrainedModel) -> bool:
    """Whether ``model`` attends over pages."""
    return _implementation(model) == ATTENTION


def switch_attention(model: PreTrainedModel, implementation: str) -> None:
    """Let ``model`` call the attention that is registered as ``implementation``.

    Raises:
        UnsupportedModel: it does not let its attention be replaced.
    """
    model.set_attn_implementation(implementation)
    if _implementation(model) != implementation:
        raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")


def _implementation(model: PreTrainedModel) -> str | None:
    name: str | None = model.config.get_text_config()._attn_implementation
    return name


def register() -> None:
    """Register `paged_attention` with Transformers; may be called again."""
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_batch: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one Transformers layer: [1, heads, T, dim] comes in, [1, T, heads, dim] goes out.

    A model whose ``attn_implementation`` is `ATTENTION` calls it with its queries, keys and values,
    and the `PagedBatch` of the forward pass. No mask function is registered under that name, so
    Transformers builds no masks.

    ``s_aux`` are attention sinks, as Transformers' interface calls them. Windows come from the
    geometry, which `survey` compares with the model.

    Raises `UnsupportedModel` for a layer with a mask of its own, or without a ``layer_idx``.
    `prove` runs every layer once, so that this fails the loading and not a request.
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
        Scoring(scaling, softcap, s_aux),
    )
    return out[None], None
