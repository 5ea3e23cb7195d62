"""Where a block's keys are in their prompt, found in the keys.

A rotary embedding turns a pair of a key's channels by the position times the pair's speed. The mean
of keys turned back is known; the position that turns a block's keys nearest to it is theirs. It
need not be right: whatever it is, a record names it, and its reader turns as far forth as its
writer turned back. A wrong position costs size alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["RUN_TOKENS", "SAMPLE_TOKENS", "Positions", "rotate"]

RUN_TOKENS = 1024
"""The most tokens that are turned at once."""

SAMPLE_TOKENS = 64
"""Tokens in which the position is looked for."""

_STEP = 256  # positions of the inner one of the two tables
_KEPT = 4


class Positions:
    """Finds positions below ``longest``, of heads with pairs that turn by ``speeds`` a token.

    `turns` gives cosines and sines for ``heads`` heads.

    Thread safety: immutable, apart from a cache of four tables.
    """

    def __init__(self, speeds: NDArray[np.float64], longest: int, heads: int = 1) -> None:
        self._speeds = speeds
        self._heads = heads
        outer = _turns(-np.arange(0, max(1, longest), _STEP), speeds).astype(np.complex64)
        inner = _turns(-np.arange(_STEP), speeds).astype(np.complex64)
        self._outer = torch.from_numpy(outer)
        self._inner = torch.from_numpy(np.concatenate([inner.real, -inner.imag], 1).T.copy())
        self._back = torch.from_numpy(_turns(-np.arange(SAMPLE_TOKENS), speeds).astype("c8"))
        self._forth = _turns(np.arange(RUN_TOKENS), speeds)
        self.turns = lru_cache(maxsize=_KEPT)(self._table)

    def _table(self, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32, of up to 1024 tokens from ``start`` on.

        They are [tokens, heads · pairs], the pairs of one head behind those of another.
        """
        turned = self._forth[:tokens] * _turns(np.array([start]), self._speeds)
        both = turned.real.astype(np.float32), turned.imag.astype(np.float32)
        cosines, sines = (torch.from_numpy(np.tile(one, self._heads)) for one in both)
        return cosines, sines

    def correlate(self, keys: Tensor, means: Tensor) -> Tensor:
        """Return how ``keys`` [tokens, 2 · heads · pairs] are turned from ``means`` [2 · …].

        First channels of pairs come before second ones. The result [pairs], complex, is a sum over
        the first tokens and all heads; sum it over groups. `find` finds the position in it.
        """
        half = keys.shape[1] // 2
        middle = torch.complex(means[:half], -means[half:])
        turned = torch.complex(keys[:, :half], keys[:, half:]) * middle
        turned = turned.view(len(keys), -1, len(self._speeds)).sum(1)
        return (turned * self._back[: len(keys)]).sum(0)

    def find(self, turned: Tensor) -> int:
        """Return the position of the first token."""
        moved = self._outer * turned
        scores = torch.cat([moved.real, moved.imag], 1) @ self._inner
        return int(scores.nan_to_num().argmax())


def _turns(positions: NDArray[np.int64], speeds: NDArray[np.float64]) -> NDArray[np.complex128]:
    """Return the turn of each pair by each position."""
    turned: NDArray[np.complex128] = np.exp(1j * positions[:, None] * speeds)
    return turned


def rotate(
    first: Tensor,
    second: Tensor,
    turns: tuple[Tensor, Tensor],
    spare: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Turn pairs of channels in place, float32; with negated sines they turn back.

    ``turns`` are cosines and sines; ``spare`` is memory of the size of ``first``, twice.
    """
    cosines, sines = turns
    ahead, behind = spare or (torch.empty_like(first), torch.empty_like(first))
    torch.mul(first, sines, out=ahead)
    torch.mul(second, sines, out=behind)
    first.mul_(cosines).sub_(behind)
    second.mul_(cosines).add_(ahead)
