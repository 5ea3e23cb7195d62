"""Random numbers that are the same on every machine.

Python guarantees the sequence of `random.Random(seed).random()`, but not of its distributions, and
mathematical libraries differ in the last bit. So a distribution is a table of quantiles with linear
interpolation: four operations that are exact everywhere.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WAITS", "Chance", "Table", "mean_of", "value_at", "zipf"]

Item = TypeVar("Item")


Table = tuple[tuple[float, float], ...]
"""A distribution by its quantiles: pairs of a share and the value that this share lies below, with
straight lines between. Half of the values of ``((0, 10), (0.5, 100), (1, 1000))`` are below 100."""


@lru_cache(maxsize=512)
def _columns(table: Table) -> tuple[tuple[float, ...], tuple[float, ...]]:
    shares = tuple(share for share, _ in table)
    values = tuple(value for _, value in table)
    whole = len(table) > 1 and shares[0] == 0 and shares[-1] == 1
    if not whole or any(left >= right for left, right in pairwise(shares)):
        raise InvalidValue(
            f"a table is (share, value) pairs with shares that grow from 0 to 1, got {table}"
        )
    return shares, values


def value_at(table: Table, share: float) -> float:
    """Return the value below which ``share`` (0 … 1) of all values lie."""
    shares, values = _columns(table)
    right = min(bisect_right(shares, share), len(shares) - 1)
    low, high = shares[right - 1], shares[right]
    begin, end = values[right - 1], values[right]
    return begin + (end - begin) * ((share - low) / (high - low))


def mean_of(table: Table) -> float:
    """Return the mean of a distribution."""
    shares, values = _columns(table)
    widths = (right - left for left, right in pairwise(shares))
    heights = ((left + right) / 2 for left, right in pairwise(values))
    return sum(width * height for width, height in zip(widths, heights, strict=True))


WAITS: Table = (
    (0, 0), (0.1, 0.1054), (0.25, 0.2877), (0.5, 0.6931), (0.75, 1.3863), (0.9, 2.3026),
    (0.97, 3.5066), (0.99, 4.6052), (0.999, 6.9078), (1, 8),
)  # fmt: skip
"""Times between independent arrivals (exponential), with a mean of 1 within 3 %."""


class Chance:
    """A random stream, seeded by its purpose, so that draws from other streams do not shift it."""

    def __init__(self, *names: object) -> None:
        self._random = random.Random("/".join(map(str, names)))  # noqa: S311 - no secret

    def share(self) -> float:
        """Return a number in 0 … 1, excluding 1."""
        return self._random.random()

    def of(self, table: Table) -> float:
        """Return a value of a distribution."""
        return value_at(table, self.share())

    def whole(self, table: Table) -> int:
        """Return a value of a distribution, rounded, and at least 1."""
        return max(1, int(self.of(table) + 0.5))

    def below(self, count: int) -> int:
        """Return a whole number in 0 … ``count`` - 1."""
        return int(self.share() * count)

    def happens(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.share() < probability

    def pick(self, items: Sequence[Item], sums: Sequence[float]) -> Item:
        """Return one of ``items``, with weights whose cumulative sums are ``sums``."""
        at = bisect_right(sums, self.share() * sums[-1])
        return items[min(at, len(items) - 1)]


@lru_cache(maxsize=64)
def zipf(count: int, exponent: float) -> tuple[float, ...]:
    """Return cumulative sums of 1 / (rank ** exponent), for popularities of a Zipf law."""
    sums: list[float] = []
    total = 0.0
    for rank in range(1, count + 1):
        total += 1.0 / rank**exponent
        sums.append(total)
    return tuple(sums)
