"""Tiles: which numbers of a part share one scale, and in which order they are worked on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Tile", "per_channel", "per_token", "pieces", "regions"]

_GROUP = 64  # numbers that share a scale: 64 + 2 bytes for 128 of bfloat16, 1.94 times less
_PIECE = 1 << 15  # numbers worked on at once: beyond it, torch would wake its pool of threads


@dataclass(frozen=True, slots=True)
class Tile:
    """``run`` consecutive tokens times ``width`` neighbouring channels of one head."""

    run: int
    width: int

    def runs(self, tokens: int) -> int:
        """How many runs so many tokens make: the last takes what is left over, and is longer."""
        return max(1, tokens // self.run)


def per_channel(_: int) -> Tile:
    """A run of tokens of one channel: fits keys, some of whose channels are always large."""
    return Tile(_GROUP, 1)


def per_token(dim: int) -> Tile:
    """Channels of one token (of a few, in small heads): fits values, and few tokens."""
    width = next((n for n in range(min(dim, _GROUP), _GROUP // 2 - 1, -1) if dim % n == 0), dim)
    return Tile(-(-_GROUP // width), width)


def regions(part: Tensor, share: Tensor, tile: Tile) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of ``part`` [rows, tokens, channels] and of its ``share`` [rows, runs, groups].

    The first as [rows, runs, tokens of a run, groups, channels of a group], the second with ones
    where the first has what shares a scale. All runs at once, or all but the longer last one, and
    then that.
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
    """Cut a region into pieces of at most `_PIECE` numbers, never through a group."""
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
