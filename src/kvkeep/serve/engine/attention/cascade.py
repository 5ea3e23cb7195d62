"""Sequences that begin with the same pages attend to those once, together.

After reuse and forks many sequences of a batch share most of their keys. Read for each of them,
the same pages would go through the cache again and again; here they are gathered once, with the
queries of all sequences as rows against them, and each attends to the rest of its keys by itself.
Both parts are weighed by the sums of their exponentials, which is what one softmax over all keys
would do (cascade inference: FlashInfer; Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvkeep.core.tokens import common_length
from kvkeep.serve.engine.attention.paged import attend_in_part
from kvkeep.serve.engine.attention.short import groups, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.prepared import Gather
    from kvkeep.serve.engine.attention.paged import Scoring
    from kvkeep.serve.engine.attention.setting import Placed, Setting
    from kvkeep.serve.engine.attention.short import Rows, ShortGroup

    IntArray = npt.NDArray[np.int32]

__all__ = ["Cascade", "cascades"]


# What a cascade costs beyond its reading, in calls: one more of them, and putting parts together.
# On one CPU core, 16 sequences that save 2 MiB a layer were as fast with one as without.
_CALLS: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class Cascade:
    """Short pieces whose page tables begin alike; no window."""

    rows: Rows  # of the batch: all tokens of all pieces
    gather: Gather  # the pages they share, each in front of every query
    own: Sequence[ShortGroup]  # the other keys; rows count from the first of ``rows``

    def attend(self, layer: int, query: torch.Tensor, scoring: Scoring, out: torch.Tensor) -> None:
        """``query`` and ``out`` are [T, heads, dim] of the whole batch; writes its rows of it."""
        mine = query[self.rows]
        shared, shared_weight = self._attend_to_shared(layer, mine, scoring)
        own, own_weight = torch.empty_like(shared), torch.empty_like(shared_weight)
        for group in self.own:
            own[group.rows], own_weight[group.rows] = group.attend_in_part(layer, mine, scoring)
        # e^own / (e^own + e^shared)
        fraction = torch.sigmoid(own_weight - shared_weight)[..., None]
        wide = fraction.dtype
        out[self.rows] = torch.lerp(shared.to(wide), own.to(wide), fraction).to(out.dtype)

    def _attend_to_shared(
        self, layer: int, query: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, heads, dim], and the logarithms of the weights [t, heads]."""
        self.gather.fill(layer)
        keys, values = (
            part.transpose(0, 1)[None] for part in (self.gather.keys, self.gather.values)
        )
        tokens, heads, dim = query.shape
        kv_heads = keys.shape[1]
        rows = query.reshape(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        out, weight = attend_in_part(rows[None], keys, values, scoring)
        split = (kv_heads, tokens, heads // kv_heads)
        return (
            out.reshape(*split, -1).transpose(0, 1).reshape(tokens, heads, -1),
            weight.reshape(split).transpose(0, 1).reshape(tokens, heads),
        )


def cascades(pieces: Sequence[Placed], setting: Setting) -> tuple[list[Cascade], list[Placed]]:
    """The cascades among ``pieces`` that save enough reading, and the pieces in none of them."""
    if setting.window is not None:
        return [], list(pieces)  # of a shared prefix, each sees another part
    least = -(-_CALLS * setting.grain.call_bytes // setting.page_bytes)
    tables = [one.piece.pages[: one.piece.start // setting.page_size] for one in pieces]
    found = shared_prefixes(tables, least)
    made = [
        _cascade([pieces[index] for index in chosen], pages, setting) for chosen, pages in found
    ]
    inside = {index for chosen, _ in found for index in chosen}
    return made, [one for index, one in enumerate(pieces) if index not in inside]


def shared_prefixes(tables: Sequence[IntArray], least: int) -> list[tuple[list[int], int]]:
    """Which ``tables`` begin alike, with how many pages: (indices, pages), no table in two.

    Only what saves reading ``least`` pages: all but one of those that share need not read them.
    Among tables with the same first page the set that saves most is taken, then the next.
    Cost: a comparison of each two neighbours in sorted order for each set that is found.
    """
    families: defaultdict[int, list[int]] = defaultdict(list)
    for index, table in enumerate(tables):
        if len(table):
            families[int(table[0])].append(index)
    found = []
    for family in families.values():
        # In the order of their bytes, tables that begin alike are neighbours.
        rest = sorted(family, key=lambda index: tables[index].tobytes())
        while len(rest) > 1:
            alike = np.array([common_length(tables[a], tables[b]) for a, b in pairwise(rest)])
            saved, first, last = max(_savings(alike))
            if saved < max(1, least):
                break
            found.append((rest[first : last + 1], int(alike[first:last].min())))
            rest = rest[:first] + rest[last + 1 :]
    return found


def _savings(alike: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """For each first table the most pages saved, with it and the last that takes part."""
    best = []
    for first in range(len(alike)):
        pages = np.minimum.accumulate(alike[first:])
        saved = pages * np.arange(1, len(pages) + 1)
        most = int(saved.argmax())
        best.append((int(saved[most]), first, first + most + 1))
    return best


def _cascade(members: Sequence[Placed], pages: int, setting: Setting) -> Cascade:
    lengths = [len(one.piece.tokens) for one in members]
    rows = np.concatenate(
        [np.arange(one.begin, one.begin + len(one.piece.tokens)) for one in members]
    )
    begins = np.cumsum([0, *lengths[:-1]]).tolist()
    own = [
        replace(one, begin=begin, first_page=pages)
        for one, begin in zip(members, begins, strict=True)
    ]
    shared = setting.tensors.prepare_gather(members[0].piece.pages[:pages], setting.scratch)
    return Cascade(
        rows=rows_of(rows, setting.tensors.device), gather=shared, own=groups(own, setting)
    )
