"""The calls of a plan: long pieces one by one, short ones together, shared prefixes once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from kvkeep.core.tokens import common_length
from kvkeep.serve.engine.attention.dense import attend, attend_partial, with_sinks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.tensors import Gather, PagedTensors, Scratch
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.memory import LatentMaps

    IntArray = npt.NDArray[np.int32]

__all__ = [
    "ALIGNED",
    "CPU",
    "GPU",
    "SHORT",
    "Cascade",
    "Grain",
    "LongPiece",
    "PlacedPiece",
    "PlanContext",
    "ShortGroup",
    "aligned",
    "cascades",
    "groups",
    "long_pieces",
    "rows_of",
]

# The elements between rows of a mask, and before it, are multiples of this. Fused kernels read 16
# bytes at once: torch copies a mask with other rows at every layer, and one that begins elsewhere
# is a misaligned address.
ALIGNED: Final = 16


def aligned(count: int) -> int:
    """Return the first multiple of `ALIGNED` that is not below ``count``."""
    return -(-count // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class Grain:
    """The size of attention calls on a kind of device.

    ``query_rows`` tokens of a long piece attend in one call: masks stay small, and few keys beyond
    the causal edge are multiplied. ``call_bytes`` is the cost of one more call, in bytes that could
    be gathered meanwhile: short pieces of different lengths are padded up to it. ``group_bytes``
    bounds the K and V that are gathered for several pieces at once.
    """

    query_rows: int
    call_bytes: int
    group_bytes: int


# Gathered K and V should still be in a core's own cache when they are multiplied.
CPU: Final = Grain(query_rows=128, call_bytes=384 << 10, group_bytes=2 << 20)
# A kernel launch takes some 5 µs, in which a GPU reads 10 MiB; one call is about ten kernels.
GPU: Final = Grain(query_rows=1024, call_bytes=64 << 20, group_bytes=1 << 30)


@dataclass(frozen=True, slots=True, eq=False)
class PlanContext:
    """The terms that all pieces share under one window: memory, grain, and the model's heads.

    ``window`` counts the keys a token sees, itself included; None: all before it. ``group`` query
    heads share one KV head.
    """

    tensors: PagedTensors
    scratch: Scratch
    grain: Grain
    window: int | None
    group: int

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.tensors.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page in one layer."""
        return self.tensors.page_bytes // self.tensors.geometry.layers

    def mask(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the mask to add to scores: 0 where ``seen``, else minus infinity.

        Its rows are `ALIGNED`. Boolean masks would be converted to this at every layer.
        """
        hidden = ~seen.to(self.tensors.device)
        *rows, keys = hidden.shape
        mask = torch.zeros(*rows, aligned(keys), dtype=self.tensors.dtype, device=hidden.device)
        return mask[..., :keys].masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPiece:
    """Consecutive tokens of a sequence, where they lie in the batch, and the keys that they see.

    ``begin`` is the row of the batch where they begin, ``start`` and ``stop`` are their positions
    in the sequence. ``pages`` is the page table of the layers that attend. Keys before the position
    ``first`` are not seen, and pages before it are not read: they are outside of the window or
    chunk, or a cascade attends to them.
    """

    begin: int
    start: int
    stop: int
    pages: IntArray
    first: int = 0

    @property
    def tokens(self) -> int:
        """The number of queries."""
        return self.stop - self.start

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages with keys to attend to."""
        return -(-self.stop // page_size) - self.first // page_size

    def seen_pages(self, page_size: int) -> IntArray:
        """Return the pages with keys to attend to."""
        return self.pages[self.first // page_size : -(-self.stop // page_size)]


# The most tokens of a short piece; drafts have 2 … 9. With 5 tokens and 3 query heads a KV head,
# attending takes as long as gathering the keys, and with 16 three times as long: beyond that a call
# is bound by computing, and padding queries costs more than another call.
SHORT: Final = 16

Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ShortGroup:
    """Short pieces that attend in one call: n pieces, each padded to ``queries`` tokens.

    A padded query repeats the piece's last one, so an output row may be written twice, with the
    same value.
    """

    rows: Rows  # rows of the batch, n * queries
    queries: int
    gather: Gather
    keys: torch.Tensor  # [n, kv_heads, keys, dim], a view of the gathered keys
    values: torch.Tensor
    mask: torch.Tensor | None  # [n, 1, queries * group, keys]

    def attend(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return [n * queries, heads, dim] for ``query`` [T, heads, dim] of the whole batch."""
        if scoring.sinks is not None:
            out = with_sinks(*self.attend_partial(layer, query, scoring), scoring.sinks)
            return out.to(query.dtype)
        self.gather.fill(layer)
        grouped = self._grouped(query)
        out = attend(grouped, self.keys, self.values, scoring, mask=self.mask)
        return self._ungrouped(out)

    def attend_partial(
        self, layer: int, query: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attend` without sinks, with the log-sum-exps [n * queries, heads] beside it."""
        self.gather.fill(layer)
        grouped = self._grouped(query)
        out, lse = attend_partial(grouped, self.keys, self.values, scoring, mask=self.mask)
        return self._ungrouped(out), self._ungrouped(lse[..., None])[..., 0]

    def _grouped(self, query: torch.Tensor) -> torch.Tensor:
        """Put the query heads that share a KV head beside its queries: nothing is repeated."""
        n, heads = self.keys.shape[:2]
        rows = query[self.rows]
        dim = rows.shape[-1]
        split = rows.reshape(n, self.queries, heads, -1, dim)
        return split.transpose(1, 2).reshape(n, heads, -1, dim)

    def _ungrouped(self, out: torch.Tensor) -> torch.Tensor:
        """Reshape [n, kv_heads, queries * group, width] to [n * queries, heads, width]."""
        n, heads, _, width = out.shape
        split = out.reshape(n, heads, self.queries, -1, width)
        return split.transpose(1, 2).reshape(n * self.queries, -1, width)


def groups(pieces: Iterable[PlacedPiece], context: PlanContext) -> list[ShortGroup]:
    """Group short pieces so that padding costs less than separate calls."""
    size, grain = context.page_size, context.grain
    # Sorted apart: drafts among single tokens would pad every piece to their number of queries.
    ordered = sorted(pieces, key=lambda one: (one.tokens > 1, one.num_pages(size)))
    made: list[list[PlacedPiece]] = []
    for one in ordered:
        if made and _joins(one, made[-1], context, grain.call_bytes, grain.group_bytes):
            made[-1].append(one)
        else:
            made.append([one])
    return [_group(members, context) for members in made]


def _joins(
    one: PlacedPiece, group: list[PlacedPiece], context: PlanContext, padding: int, most: int
) -> bool:
    """Whether one call for ``group`` and ``one`` costs less than two.

    ``one`` is at least as long as every piece of the group, so the group is padded to its length.
    """
    longest = group[-1]
    pages = one.num_pages(context.page_size)
    added = len(group) * (pages - longest.num_pages(context.page_size)) * context.page_bytes
    return (
        (one.tokens > 1) == (longest.tokens > 1)
        and added <= padding
        and (len(group) + 1) * pages * context.page_bytes <= most
    )


def _group(members: Sequence[PlacedPiece], context: PlanContext) -> ShortGroup:
    size = context.page_size
    n, width = len(members), max(one.num_pages(size) for one in members)
    table = np.empty((n, width), np.int64)
    for row, one in enumerate(members):
        pages = one.seen_pages(size)
        table[row, : len(pages)] = pages
        # Padded with the piece's own last page: NaN in another sequence's page cannot spread.
        table[row, len(pages) :] = pages[-1]
    gather = context.tensors.prepare_gather(torch.from_numpy(table.ravel()), context.scratch)
    queries = max(one.tokens for one in members)
    stop = max(one.stop - one.first // size * size for one in members)
    start = members[0].first % size if n == 1 else 0
    keys, values = (
        part.view(n, width * size, *part.shape[1:])[:, start:stop].transpose(1, 2)
        for part in (gather.keys, gather.values)
    )
    begins = np.array([one.begin for one in members])
    rows = begins[:, None] + _offsets(members, queries)
    return ShortGroup(
        rows=rows_of(rows.ravel(), context.tensors.device),
        queries=queries,
        gather=gather,
        keys=keys,
        values=values,
        mask=_mask(members, queries, start, stop, context),
    )


def _offsets(members: Sequence[PlacedPiece], queries: int) -> npt.NDArray[np.int64]:
    """Return [n, queries]: the index of each query's token in its piece."""
    lasts = np.array([one.tokens - 1 for one in members])
    return np.arange(queries)[None].clip(max=lasts[:, None])


def _mask(
    members: Sequence[PlacedPiece], queries: int, start: int, stop: int, context: PlanContext
) -> torch.Tensor | None:
    """Return the mask over keys [start, stop) behind each first page; None: all are seen."""
    firsts = np.array([one.first for one in members])
    starts = np.array([one.start for one in members])
    begins = firsts // context.page_size * context.page_size
    keys = begins[:, None, None] + np.arange(start, stop)
    query = (starts[:, None] + _offsets(members, queries))[..., None]
    seen = keys <= query
    if context.window is not None:
        seen &= keys > query - context.window
    elif (begins + start < firsts).any():
        seen &= keys >= firsts[:, None, None]
    if seen.all():
        return None
    return context.mask(torch.from_numpy(seen.repeat(context.group, axis=1))[:, None])


def rows_of(rows: npt.NDArray[np.int64], device: torch.device) -> Rows:
    """Return ``rows`` as a slice if they are consecutive, which avoids a copy."""
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


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


# Cost of a cascade beyond its reads, in calls: one more call, and merging the parts. On one CPU
# core, 16 sequences that save 2 MiB a layer were as fast with a cascade as without.
_CALLS: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class Cascade:
    """Short pieces whose page tables share leading pages; only for attention without a window."""

    rows: Rows  # rows of the batch: all tokens of all pieces
    gather: Gather  # the shared pages; every query sees all of them
    own: Sequence[ShortGroup]  # the other keys; their rows count within ``rows``

    def attend(self, layer: int, query: torch.Tensor, scoring: Scoring, out: torch.Tensor) -> None:
        """Write this cascade's rows of ``out``; tensors are [T, heads, dim] of the batch."""
        mine = query[self.rows]
        shared, shared_lse = self._attend_to_shared(layer, mine, scoring)
        own, own_lse = torch.empty_like(shared), torch.empty_like(shared_lse)
        for group in self.own:
            own[group.rows], own_lse[group.rows] = group.attend_partial(layer, mine, scoring)
        # e^own / (e^own + e^shared)
        fraction = torch.sigmoid(own_lse - shared_lse)[..., None]
        wide = fraction.dtype
        merged = torch.lerp(shared.to(wide), own.to(wide), fraction)
        if scoring.sinks is not None:
            merged = with_sinks(merged, torch.logaddexp(own_lse, shared_lse), scoring.sinks)
        out[self.rows] = merged.to(out.dtype)

    def _attend_to_shared(
        self, layer: int, query: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the partial output [t, heads, dim] and its log-sum-exps [t, heads]."""
        self.gather.fill(layer)
        keys, values = (
            part.transpose(0, 1)[None] for part in (self.gather.keys, self.gather.values)
        )
        tokens, heads, dim = query.shape
        kv_heads = keys.shape[1]
        rows = query.reshape(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        out, lse = attend_partial(rows[None], keys, values, scoring)
        split = (kv_heads, tokens, heads // kv_heads)
        return (
            out.reshape(*split, -1).transpose(0, 1).reshape(tokens, heads, -1),
            lse.reshape(split).transpose(0, 1).reshape(tokens, heads),
        )


def cascades(
    pieces: Sequence[PlacedPiece], context: PlanContext
) -> tuple[list[Cascade], list[PlacedPiece]]:
    """Return the cascades among ``pieces`` that save enough reads, and the pieces in none."""
    if context.window is not None:
        return [], list(pieces)  # each piece sees another part of the shared prefix
    least = -(-_CALLS * context.grain.call_bytes // context.page_bytes)
    size = context.page_size
    tables = [one.pages[: 0 if one.first else one.start // size] for one in pieces]
    found = shared_prefixes(tables, least)
    made = [
        _cascade([pieces[index] for index in chosen], pages, context) for chosen, pages in found
    ]
    inside = {index for chosen, _ in found for index in chosen}
    return made, [one for index, one in enumerate(pieces) if index not in inside]


def shared_prefixes(tables: Sequence[IntArray], least: int) -> list[tuple[list[int], int]]:
    """Find ``tables`` with common leading pages: (indices, number of pages), no table in two.

    A set is returned only if it saves reading ``least`` pages: all its tables but one need not read
    the shared pages. Among tables with the same first page the set that saves most is taken first.
    Cost: for each set found, one comparison of each two neighbours in sorted order.
    """
    families: defaultdict[int, list[int]] = defaultdict(list)
    for index, table in enumerate(tables):
        if len(table):
            families[int(table[0])].append(index)
    found = []
    for family in families.values():
        # Sorted by their bytes, tables with common leading pages are neighbours.
        rest = sorted(family, key=lambda index: tables[index].tobytes())
        while len(rest) > 1:
            common = np.array([common_length(tables[a], tables[b]) for a, b in pairwise(rest)])
            saved, first, last = max(_savings(common))
            if saved < max(1, least):
                break
            found.append((rest[first : last + 1], int(common[first:last].min())))
            rest = rest[:first] + rest[last + 1 :]
    return found


def _savings(common: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """For each first table, return the most pages saved, that table, and the last to take part."""
    best = []
    for first in range(len(common)):
        pages = np.minimum.accumulate(common[first:])
        saved = pages * np.arange(1, len(pages) + 1)
        most = int(saved.argmax())
        best.append((int(saved[most]), first, first + most + 1))
    return best


def _cascade(members: Sequence[PlacedPiece], pages: int, context: PlanContext) -> Cascade:
    lengths = [one.tokens for one in members]
    rows = np.concatenate([np.arange(one.begin, one.begin + one.tokens) for one in members])
    begins = np.cumsum([0, *lengths[:-1]]).tolist()
    own = [
        replace(one, begin=begin, first=pages * context.page_size)
        for one, begin in zip(members, begins, strict=True)
    ]
    shared = context.tensors.prepare_gather(members[0].pages[:pages], context.scratch)
    return Cascade(
        rows=rows_of(rows, context.tensors.device), gather=shared, own=groups(own, context)
    )
