"""Cascade attention: sequences that share leading pages attend to those once, together.

After reuse and forks many sequences of a batch share most of their keys. Instead of gathering the
same pages for each of them, a cascade gathers them once and multiplies them with the queries of all
sequences; each sequence attends to the rest of its keys by itself. The two partial results are
weighted by the sums of their exponentials, which equals one softmax over all keys (FlashInfer's
cascade inference; Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvkeep.core.tokens import common_length
from kvkeep.serve.engine.attention.dense import attend_partial, with_sinks
from kvkeep.serve.engine.attention.short import groups, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.prepared import Gather
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.plan import PlacedPiece, PlanContext
    from kvkeep.serve.engine.attention.short import Rows, ShortGroup

    IntArray = npt.NDArray[np.int32]

__all__ = ["Cascade", "cascades"]


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
