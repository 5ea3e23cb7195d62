"""Attention of short pieces, a decoded token or a few drafts, many in one call.

A call for each would cost more than its keys on a GPU, and leave most of a core's cache unused on a
CPU. So pieces of similar length are gathered into one padded tensor; `Grain` bounds the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvkeep.serve.engine.attention.dense import attend, attend_partial, with_sinks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.prepared import Gather
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.plan import PlacedPiece, PlanContext

__all__ = ["SHORT", "ShortGroup", "groups", "rows_of"]

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
