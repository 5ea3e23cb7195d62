"""`Histogram`: counts of values by range, with NumPy."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Buckets", "Histogram"]

_FEW = 8  # below, a loop is quicker than NumPy


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment, in the form of Prometheus.

    ``cumulative`` has (upper bound, number of values up to it) for each bound; the last bound is
    infinity. ``total`` is the sum of all values.
    """

    cumulative: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return self.cumulative[-1][1]


class Histogram:
    """Counts values between rising ``bounds``; a value on a bound counts below it.

    Thread safety: none. Cost: one binary search a value.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in bounds]
        if not self._bounds or any(
            not low < high for low, high in zip(self._bounds, self._bounds[1:], strict=False)
        ):
            raise InvalidValue(f"the bounds of a histogram rise, got {list(bounds)}")
        self._edges = np.array(self._bounds)
        self._counts = np.zeros(len(self._bounds) + 1, np.int64)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count a row of values."""
        if len(values) < _FEW:
            for value in values.tolist():
                self.add(value)
            return
        places = self._edges.searchsorted(values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._total += float(values.sum())

    def buckets(self) -> Buckets:
        """Return the counts so far."""
        bounds = (*self._bounds, float("inf"))
        return Buckets(
            tuple(zip(bounds, np.cumsum(self._counts).tolist(), strict=True)), self._total
        )
