"""`ReturnTimes`: how long conversations wait until their next request, counted by class."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["AGES", "BUCKETS", "ENDS", "ReturnTimes", "bucket_of"]

Table = npt.NDArray[np.float64]

AGES: Final[tuple[float, ...]] = (0.0, 2.0, 4.0, *(2 ** (step / 2) for step in range(6, 27)))
"""Seconds at which the buckets of ages begin: powers of two, from 8 s on half ones."""
BUCKETS: Final = len(AGES)
_BEGINS: Final = list(AGES[1:])
ENDS: Final[tuple[float, ...]] = (*AGES[1:], AGES[-1] * 2**0.5)
"""Seconds at which they end; the last one does not, and counts as a half octave."""
_WIDTHS: Final = np.array(ENDS) - np.array(AGES)
# A class counts as much as its parent once it has seen as many conversations as this.
_WEIGHT: Final = 10.0
# The share that returns in the first bucket of ages, before anything was seen.
_UNSEEN: Final = 0.05


def bucket_of(age: float) -> int:
    """Return the bucket of an age in seconds; negative ages are in the first."""
    return bisect_right(_BEGINS, age)


class ReturnTimes:
    """Counts ends of waits by class and age, and ranks waits by what keeping their KV is worth.

    Classes form a tree: what a class has not seen enough of is taken from its parent. Class 0 is
    the root.

    The worth of a wait is its Gittins index: the best ratio, over all times to give up, of the
    chance that the conversation returns until then and the expected time for which its KV is kept
    until then. Keeping KV in the order of this ratio is the best that a rule without knowledge of
    other conversations can do (J. C. Gittins, Bandit processes and dynamic allocation indices,
    1979).

    Memory: 500 bytes a class. Thread safety: none.
    """

    def __init__(self) -> None:
        self.parents: list[int] = [0]
        # Of each class alone: its parents are added up when the hazards are.
        self._came: list[list[float]] = [[0.0] * BUCKETS]
        self._gone: list[list[float]] = [[0.0] * BUCKETS]

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.parents)

    def add(self, parent: int) -> int:
        """Add a class; return its number."""
        assert 0 <= parent < len(self.parents)
        self.parents.append(parent)
        self._came.append([0.0] * BUCKETS)
        self._gone.append([0.0] * BUCKETS)
        return len(self.parents) - 1

    def ended(self, kind: int, bucket: int, *, returned: bool) -> None:
        """Count the end of a wait in ``bucket``: the next request came, or it is not followed."""
        (self._came if returned else self._gone)[kind][bucket] += 1

    def fade(self, factor: float) -> None:
        """Multiply all counts by ``factor``."""
        for table in (self._came, self._gone):
            for row in table:
                row[:] = [factor * count for count in row]

    def hazards(self, waiting: Table) -> Table:
        """Return the chance of a return in each bucket, by class, of waits that reach it.

        ``waiting[class, bucket]`` counts waits that have not ended and are in that bucket now.
        """
        came = self._summed(np.array(self._came))
        unseen = self._summed(self._gone + waiting)  # left in the bucket: half seen there
        reached = np.cumsum((came + unseen)[:, ::-1], axis=1)[:, ::-1] - unseen / 2
        hazards = np.empty_like(came)
        hazard = _UNSEEN
        for bucket in range(BUCKETS):  # of later ages than were seen, the last one is expected
            hazard = (came[0, bucket] + _WEIGHT * hazard) / (reached[0, bucket] + _WEIGHT)
            hazards[0, bucket] = hazard
        for kind, parent in enumerate(self.parents[1:], 1):
            hazards[kind] = (came[kind] + _WEIGHT * hazards[parent]) / (reached[kind] + _WEIGHT)
        return hazards

    def _summed(self, counts: Table) -> Table:
        """Add the counts of each class to those of its parents, in place."""
        for kind in range(len(self.parents) - 1, 0, -1):  # children were added later
            counts[self.parents[kind]] += counts[kind]
        return counts

    def worths(self, waiting: Table) -> Table:
        """Return the worth of a wait in each bucket, by class: returns a second of keeping."""
        return self.worths_of(self.hazards(waiting))

    @staticmethod
    def worths_of(hazards: Table) -> Table:
        """Return the `worths` that follow from `hazards`."""
        hazards = np.minimum(hazards, 0.999)
        stays = np.cumprod(1 - hazards, axis=1)
        before = np.concatenate((np.ones((len(stays), 1)), stays[:, :-1]), axis=1)
        spent = np.cumsum(before * _WIDTHS * (1 - hazards / 2), axis=1)
        spent_before = np.concatenate((np.zeros((len(stays), 1)), spent[:, :-1]), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (before[:, :, None] - stays[:, None, :]) / (
                spent[:, None, :] - spent_before[:, :, None]
            )
        late = np.tri(BUCKETS, k=-1, dtype=bool)  # giving up before now
        ratio[:, late] = 0
        worths: Table = np.nan_to_num(ratio).max(axis=2)
        return worths
