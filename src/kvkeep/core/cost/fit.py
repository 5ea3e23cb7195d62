"""`OnlineFit`: seconds as a sum of terms with coefficients that are learned while it is used."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["OnlineFit"]

_RECENT: Final = 32  # observations that give the error …
_PACE: Final = 9  # … and of these, the last ones, that give the pace
_TURNED: Final = 3  # last observations that give it if they agree, and not with those before …
_AGREE: Final = math.log(1.5)  # … by more than this factor
_ANOTHER: Final = math.log(2.0)  # factor from which it is another place, or network, or disk
_A_CELL: Final = 5  # observations kept of each size
_CELLS: Final = 64  # sizes kept: those not observed for longest are forgotten
_REFIT: Final = 16  # observations between two fits, once there are many
_ROUNDS: Final = 4  # of weighting outliers down
_FAR: Final = 1.5  # multiples of the median residual from which an observation is an outlier
_LEAST: Final = 1e-9  # seconds
_MOST: Final = 1e12  # seconds a unit: no cost is larger, and rounding makes none that is
_EXPLAINED: Final = 1e-3  # of its seconds that the coefficients give at least for an observation
# Observations of about one size do not tell a fixed cost from one of each unit: of the error, at
# most this may be left with other terms than the first, or with more of them.
_WORTH: Final = 0.8


class OnlineFit:
    """Learns ``seconds = c₀·t₀ + c₁·t₁ + …`` with no negative coefficient.

    Observations of each size are kept apart, a few of each, so that many small ones do not make it
    forget the large ones. Two things are learned from them: the coefficients, slowly; and the
    pace, by which the last observations are slower than the coefficients say. A machine that
    others begin to use becomes slower as a whole.

    Robust: one observation that took a hundred times as long moves neither by more than an
    ordinary one. Memory: 352 observations. Cost: 10 µs an observation, and now and then 1 ms.
    Thread safety: all methods.

    Arguments:
        seeds: rows of terms, and their seconds, that hold until something was observed. They stay
            among the observations, so that sizes never observed keep their relation to others.
        first: the term that explains a single observation.
        forgets: whether older observations are dropped once the last ones agree on another pace.
            If not, sizes that are not observed again keep their relation to others.
    """

    def __init__(
        self,
        terms: int,
        *,
        seeds: Sequence[tuple[Sequence[float], float]] = (),
        first: int = 0,
        forgets: bool = False,
    ) -> None:
        self._terms = terms
        self._forgets = forgets
        self._first = first
        self._seeds = [(tuple(row), seconds) for row, seconds in seeds]
        self._lock = threading.Lock()
        self._cells: OrderedDict[tuple[int, ...], deque[tuple[tuple[float, ...], float]]]
        self._cells = OrderedDict()
        self._recent: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_RECENT)
        self._shape: tuple[float, ...] = (0.0,) * terms
        self._pace, self._error = 1.0, 1.0
        self._fit_at = 1  # observations at which the coefficients are fitted again
        self.observations = 0
        """Number of observations so far."""
        if self._seeds:
            self._shape = self._fitted()
        self._seeded = self._shape

    @property
    def known(self) -> bool:
        """Whether there is anything to go by: seeds, or an observation."""
        return bool(self._seeds) or self.observations > 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients at the present pace, in seconds a unit of each term."""
        with self._lock:
            return tuple(min(value * self._pace, _MOST) for value in self._shape)

    @property
    def error(self) -> float:
        """The relative error to expect: 0.1 is 10 %. 1 as long as nothing was observed."""
        with self._lock:
            return self._error

    def seconds(self, terms: Sequence[float]) -> float:
        """Return the seconds to expect; 0 if nothing is known."""
        with self._lock:
            return self._pace * _dot(self._shape, terms)

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """Learn from one observation. Seconds that are not above 0 are taken for a nanosecond.

        Raises `InvalidValue` for seconds or terms that are no finite numbers.
        """
        row = tuple(map(float, terms))
        if not all(map(math.isfinite, (*row, seconds))):
            raise InvalidValue(f"{seconds} s for terms {row}; finite numbers are needed")
        seconds = max(seconds, _LEAST)
        cell = _cell(row)
        with self._lock:
            self.observations += 1
            new = cell not in self._cells
            self._cells.setdefault(cell, deque(maxlen=_A_CELL)).append((row, seconds))
            self._cells.move_to_end(cell)
            if len(self._cells) > _CELLS:
                self._cells.popitem(last=False)
            self._recent.append((row, seconds))
            if new or self.observations >= self._fit_at or not self._explains(row, seconds):
                self._fit_at = self.observations + min(self.observations, _REFIT)
                self._shape = self._fitted()
            self._measure()

    def _measure(self) -> None:
        """Set pace and error by the last observations."""
        newest = list(self._recent)[-_TURNED:]
        if len(newest) == _TURNED and not any(self._explains(*one) for one in newest):
            # Another place, network or disk: too slow to be taken for a pace.
            self._forget_all_but(_TURNED)
        ratios = [
            math.log(seconds / _dot(self._shape, row))
            for row, seconds in self._recent
            if self._explains(row, seconds)
        ]
        if not ratios:
            self._pace, self._error = 1.0, 1.0
            return
        last = ratios[-_PACE:]
        pace = _median(last)
        turned = ratios[-_TURNED:]
        agree = max(turned) - min(turned) < _AGREE < abs(_median(turned) - pace)
        if len(turned) == _TURNED and agree:
            if self._forgets and abs(_median(turned) - pace) > _ANOTHER:
                self._forget_all_but(_TURNED)
                last, pace = [0.0] * _TURNED, 0.0
            else:
                last, pace = turned, _median(turned)
            ratios = last
        self._pace = math.exp(pace)
        spread = _median([abs(ratio - pace) for ratio in last])
        # Few observations tell little: what they agree in may be chance.
        self._error = min(1.0, max(math.expm1(spread), 1 / (1 + len(ratios))))

    def _forget_all_but(self, count: int) -> None:
        """Keep the last ``count`` observations alone, and no seeds."""
        kept = list(self._recent)[-count:]
        self._cells.clear()
        self._recent.clear()
        self._seeds = []
        for row, seconds in kept:
            self._cells.setdefault(_cell(row), deque(maxlen=_A_CELL)).append((row, seconds))
            self._recent.append((row, seconds))
        self._shape = self._fitted()

    def _explains(self, row: Sequence[float], seconds: float) -> bool:
        """Whether a term of ``row`` has a coefficient: other rows may all have lacked it."""
        return _dot(self._shape, row) > _EXPLAINED * seconds

    def _fitted(self) -> tuple[float, ...]:
        """Fit the coefficients to all that is kept, with outliers weighted down."""
        rows = [one for cell in self._cells.values() for one in cell]
        slower = 1.0  # than the seeds
        if self._seeds and rows:
            ratios = [seconds / max(_dot(self._seeded, row), _LEAST) for row, seconds in rows]
            slower = _median(ratios)
        rows += [(row, seconds * slower) for row, seconds in self._seeds]
        terms = np.array([row for row, _ in rows], float)
        seconds = np.array([one for _, one in rows], float)
        relative = terms / seconds[:, None]
        weights = np.ones(len(rows))
        found = np.zeros(self._terms)
        for _ in range(_ROUNDS):
            found = _non_negative(
                relative * weights[:, None], weights, first=self._first, worth=_WORTH
            )
            off = np.abs(relative @ found - 1)
            weights = np.sqrt(1 / np.maximum(1, off / max(_FAR * float(np.median(off)), 1e-6)))
        return tuple(found.tolist())


def _cell(row: Sequence[float]) -> tuple[int, ...]:
    """Return the size of an observation: the power of two of each term."""
    return tuple(math.frexp(value)[1] for value in row)


def _non_negative(
    terms: Floats, goals: Floats | None = None, *, first: int = 0, worth: float = 1 - 1e-9
) -> Floats:
    """Return non-negative coefficients for which ``terms @ coefficients`` comes closest to goals.

    ``goals`` are 1 if not given. The optimum lies where some coefficients are 0 and the others are
    free. There are few terms, so every choice of free coefficients is tried: those with few first,
    and term ``first`` before others. A later one has to leave less than ``worth`` of what is left.
    """
    count = terms.shape[1]
    wanted = np.ones(len(terms)) if goals is None else goals
    scale = np.abs(terms).max(0)
    scale[scale == 0] = 1.0
    scaled = terms / scale  # n² beside 1: scaled to be comparable
    order = [first, *(one for one in range(count) if one != first)]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for some in map(list, combinations(order, size)):
            found = np.linalg.lstsq(scaled[:, some], wanted, rcond=None)[0]
            if (found < 0).any():
                continue
            rest = float(((scaled[:, some] @ found - wanted) ** 2).sum())
            if rest < least * worth - 1e-18:
                best, least = np.zeros(count), rest
                best[some] = found
    result: Floats = best / scale
    return result


def _dot(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(coefficients, terms, strict=True))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
