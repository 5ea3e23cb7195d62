"""Short pieces, a decoded token or a few drafts, attend many in one call.

Their keys are few beside what a call costs on a GPU, and on a CPU beside what fits into its cache.
So pieces of about the same length are gathered into one padded tensor; who pads how much is
decided by `Grain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvkeep.serve.engine.attention.paged import attend, attend_in_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.prepared import Gather
    from kvkeep.serve.engine.attention.paged import Scoring
    from kvkeep.serve.engine.attention.setting import Placed, Setting

__all__ = ["SHORT", "ShortGroup", "groups", "rows_of"]

# Up to so many tokens a piece is short: drafts are 2 … 9. With 5 tokens, 3 query heads a KV head,
# attending takes as long as gathering the keys, and with 16 three times as long: from there on a
# call is bound by computing, and padding queries costs more than another call.
SHORT: Final = 16

Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ShortGroup:
    """Short pieces that attend in one call: n pieces, each padded to ``queries`` tokens.

    A padded query is the piece's last one again, so what comes out may be written twice.
    """

    rows: Rows  # of the batch, n * queries
    queries: int
    gather: Gather
    keys: torch.Tensor  # [n, kv_heads, keys, dim], a view of what was gathered
    values: torch.Tensor
    mask: torch.Tensor | None  # [n, 1, queries * group, keys]

    def attend(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """[T, heads, dim] of the whole batch comes in, [n * queries, heads, dim] goes out."""
        self.gather.fill(layer)
        grouped = self._grouped(query)
        out = attend(grouped, self.keys, self.values, scoring, mask=self.mask)
        return self._ungrouped(out)

    def attend_in_part(
        self, layer: int, query: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attend`, and the logarithms of the weights [n * queries, heads] beside it."""
        self.gather.fill(layer)
        grouped = self._grouped(query)
        out, weight = attend_in_part(grouped, self.keys, self.values, scoring, mask=self.mask)
        return self._ungrouped(out), self._ungrouped(weight[..., None])[..., 0]

    def _grouped(self, query: torch.Tensor) -> torch.Tensor:
        """The query heads of one KV head stand where its queries do: nothing is repeated."""
        n, heads = self.keys.shape[:2]
        rows = query[self.rows]
        dim = rows.shape[-1]
        split = rows.reshape(n, self.queries, heads, -1, dim)
        return split.transpose(1, 2).reshape(n, heads, -1, dim)

    def _ungrouped(self, out: torch.Tensor) -> torch.Tensor:
        """[n, kv_heads, queries * group, width] to [n * queries, heads, width]."""
        n, heads, _, width = out.shape
        split = out.reshape(n, heads, self.queries, -1, width)
        return split.transpose(1, 2).reshape(n * self.queries, -1, width)


def groups(pieces: Iterable[Placed], setting: Setting) -> list[ShortGroup]:
    """Put short pieces together that are best attended to together."""
    size, grain = setting.page_size, setting.grain
    # Drafts among single tokens would make queries of all of them.
    ordered = sorted(pieces, key=lambda one: (len(one.piece.tokens) > 1, one.num_pages(size)))
    made: list[list[Placed]] = []
    for one in ordered:
        if made and _joins(one, made[-1], setting, grain.call_bytes, grain.group_bytes):
            made[-1].append(one)
        else:
            made.append([one])
    return [_group(members, setting) for members in made]


def _joins(one: Placed, group: list[Placed], setting: Setting, padding: int, most: int) -> bool:
    """Whether a piece at least as long as those of ``group`` is attended to with them."""
    longest = group[-1]
    pages = one.num_pages(setting.page_size)
    added = len(group) * (pages - longest.num_pages(setting.page_size)) * setting.page_bytes
    return (
        (len(one.piece.tokens) > 1) == (len(longest.piece.tokens) > 1)
        and added <= padding
        and (len(group) + 1) * pages * setting.page_bytes <= most
    )


def _group(members: Sequence[Placed], setting: Setting) -> ShortGroup:
    size = setting.page_size
    n, width = len(members), max(one.num_pages(size) for one in members)
    table = np.empty((n, width), np.int64)
    for row, one in enumerate(members):
        pages = one.piece.pages[one.first_page : one.first_page + one.num_pages(size)]
        table[row, : len(pages)] = pages
        # The padding is a piece's own last page: not even NaN of another could get in.
        table[row, len(pages) :] = pages[-1]
    gather = setting.tensors.prepare_gather(torch.from_numpy(table.ravel()), setting.scratch)
    queries = max(len(one.piece.tokens) for one in members)
    stop = max(one.piece.stop - one.first_page * size for one in members)
    start = _unseen(members[0], setting) if n == 1 else 0
    keys, values = (
        part.view(n, width * size, *part.shape[1:])[:, start:stop].transpose(1, 2)
        for part in (gather.keys, gather.values)
    )
    begins = np.array([one.begin for one in members])
    rows = begins[:, None] + _offsets(members, queries)
    return ShortGroup(
        rows=rows_of(rows.ravel(), setting.tensors.device),
        queries=queries,
        gather=gather,
        keys=keys,
        values=values,
        mask=_mask(members, queries, start, stop, setting),
    )


def _unseen(one: Placed, setting: Setting) -> int:
    """Gathered keys of a piece that are before the window of its first query."""
    if setting.window is None:
        return 0
    return max(0, one.piece.start + 1 - setting.window - one.first_page * setting.page_size)


def _offsets(members: Sequence[Placed], queries: int) -> npt.NDArray[np.int64]:
    """[n, queries]: which of its tokens each query of a piece is."""
    lasts = np.array([len(one.piece.tokens) - 1 for one in members])
    return np.arange(queries)[None].clip(max=lasts[:, None])


def _mask(
    members: Sequence[Placed], queries: int, start: int, stop: int, setting: Setting
) -> torch.Tensor | None:
    """Which of the keys [start, stop) behind its first page each query sees; None: all."""
    begins = np.array([one.first_page * setting.page_size for one in members])
    starts = np.array([one.piece.start for one in members])
    keys = begins[:, None, None] + np.arange(start, stop)
    query = (starts[:, None] + _offsets(members, queries))[..., None]
    seen = keys <= query
    if setting.window is not None:
        seen &= keys > query - setting.window
    if seen.all():
        return None
    return setting.mask(torch.from_numpy(seen.repeat(setting.group, axis=1))[:, None])


def rows_of(rows: npt.NDArray[np.int64], device: torch.device) -> Rows:
    """``rows`` as a slice where they follow each other, which takes no copy."""
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
