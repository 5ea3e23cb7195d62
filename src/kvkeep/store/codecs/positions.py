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

__all__ = ["Positions", "rotate"]

_SAMPLE = 64  # tokens
_STEP = 256  # positions of the inner one of the two tables
_KEPT = 64


class Positions:
    """Finds positions below ``longest``, of heads with pairs that turn by ``speeds`` a token.

    Thread safety: immutable, apart from a cache of 64 tables.
    """

    def __init__(self, speeds: NDArray[np.float64], longest: int) -> None:
        self._speeds = speeds
        self._outer = _turns(-np.arange(0, max(1, longest), _STEP), speeds)
        self._inner = _turns(-np.arange(_STEP), speeds)
        self._back = torch.from_numpy(_turns(-np.arange(_SAMPLE), speeds))
        self.turns = lru_cache(maxsize=_KEPT)(self._table)

    def _table(self, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [tokens, 1, pairs], float32, from position ``start`` on."""
        angles = np.arange(start, start + tokens)[:, None, None] * self._speeds
        return (
            torch.from_numpy(np.cos(angles).astype(np.float32)),
            torch.from_numpy(np.sin(angles).astype(np.float32)),
        )

    def correlate(self, keys: Tensor, means: Tensor) -> Tensor:
        """Return how ``keys`` [tokens, heads, dim] are turned from ``means`` [heads, dim].

        The result [pairs], complex, is a sum over the first tokens and all heads; sum it over
        layers. `find` finds the position in it.
        """
        pairs = len(self._speeds)
        keys = keys[:_SAMPLE].float()
        first, second = keys[..., :pairs], keys[..., pairs : 2 * pairs]
        middle = torch.complex(means[:, :pairs], -means[:, pairs : 2 * pairs])
        turned = torch.complex(first, second) * middle
        return (turned.sum(1) * self._back[: len(keys)]).sum(0)

    def find(self, turned: Tensor) -> int:
        """Return the position of the first token."""
        scores = (self._outer * turned.numpy()) @ self._inner.T
        scores = np.nan_to_num(scores.real, nan=0.0)
        outer, inner = np.unravel_index(int(scores.argmax()), scores.shape)
        return int(outer) * _STEP + int(inner)


def _turns(positions: NDArray[np.int64], speeds: NDArray[np.float64]) -> NDArray[np.complex64]:
    """Return the turn of each pair by each position."""
    turned: NDArray[np.complex64] = np.exp(1j * positions[:, None] * speeds).astype(np.complex64)
    return turned


def rotate(numbers: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Turn the pairs of ``numbers`` [tokens, heads, dim], float32, in place.

    ``cosines`` and ``sines`` are [tokens, 1, pairs]; with negated sines it turns back.
    """
    pairs = cosines.shape[-1]
    first, second = numbers[..., :pairs], numbers[..., pairs : 2 * pairs]
    moved = first * sines
    first.mul_(cosines).sub_(second * sines)
    second.mul_(cosines).add_(moved)
