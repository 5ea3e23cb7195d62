"""Tiles: which numbers of a part share a scale, and the order of processing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Tile", "per_channel", "per_token", "pieces", "regions"]

_GROUP = 64  # numbers that share a scale: 64 + 2 bytes instead of 128 of bfloat16, 1.94 times less
_PIECE = 1 << 15  # numbers processed at once; for more, torch would use its thread pool


@dataclass(frozen=True, slots=True)
class Tile:
    """``run`` consecutive tokens times ``width`` adjacent channels of one head."""

    run: int
    width: int

    def runs(self, tokens: int) -> int:
        """Return the number of runs in ``tokens``; the last one is longer by the remainder."""
        return max(1, tokens // self.run)


def per_channel(_: int) -> Tile:
    """Return tiles of one channel: for keys, in which some channels are always large."""
    return Tile(_GROUP, 1)


def per_token(dim: int) -> Tile:
    """Return tiles of one token (of a few, in small heads): for values, and for few tokens."""
    width = next((n for n in range(min(dim, _GROUP), _GROUP // 2 - 1, -1) if dim % n == 0), dim)
    return Tile(-(-_GROUP // width), width)


def regions(part: Tensor, share: Tensor, tile: Tile) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of ``part`` [rows, tokens, channels] and ``share`` [rows, runs, groups].

    The first view is [rows, runs, tokens of a run, groups, channels of a group]; the second has
    size 1 in the axes whose numbers share a scale, so the two broadcast. One pair has all runs; if
    the last run is longer, it is a second pair.
    """
    runs = tile.runs(part.shape[1])
    whole = runs if part.shape[1] == runs * tile.run else runs - 1
    cut = whole * tile.run
    rows, _, groups = share.shape
    share = share[:, :, None, :, None]
    if whole:
        yield part[:, :cut].view(rows, whole, tile.run, groups, tile.width), share[:, :whole]
    if whole < runs:
        yield part[:, cut:].view(rows, 1, -1, groups, tile.width), share[:, whole:]


def pieces(region: Tensor) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield slices that cut a region into pieces of at most `_PIECE` numbers, in whole groups."""
    rows, runs, run, groups, width = region.shape
    left = _PIECE // (run * width)
    steps = []
    for length in (groups, runs, rows):
        steps.append(max(1, min(length, left)))
        left //= length
    for row, first, group in product(
        range(0, rows, steps[2]), range(0, runs, steps[1]), range(0, groups, steps[0])
    ):
        yield (
            slice(row, row + steps[2]),
            slice(first, first + steps[1]),
            slice(None),
            slice(group, group + steps[0]),
        )
