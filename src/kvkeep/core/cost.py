"""What computing and moving KV take, in seconds: measured, learned online, and compared.

PrefillCost, TransferCost        the formulas, as values
LearnedPrefill, LearnedTransfer  learn them from what happens
CostModel                        all of an engine and its store, in one place and one file
best_prefix                      decides how much to load
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from operator import mul
from statistics import median_high
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, reason, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TypeVar

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Row = tuple[float, ...]
    C = TypeVar("C", "PrefillCost", "TransferCost")

__all__ = [
    "CostModel",
    "LearnedPrefill",
    "LearnedTransfer",
    "OnlineFit",
    "OtherCostVersion",
    "PrefillCost",
    "PrefixChoice",
    "TransferCost",
    "best_prefix",
]

log = logging.getLogger(__name__)

_VERSION: Final = 1  # of the format: the field ``kvkeep_cost`` of every file
_MAX_FILE: Final = 1 << 20
_MAX_NAME: Final = 512
_MAX_TIERS: Final = 64
_MAX: Final = 1e12  # seconds a unit: no cost is larger, and rounding makes none that is
_LEAST: Final = 1e-9  # seconds


class OtherCostVersion(InvalidValue):
    """A file of costs in a version of the format that this kvkeep does not read."""


# --- the formulas --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """Moving n bytes takes ``seconds_fixed`` + ``seconds_per_byte`` · n.

    Raises `InvalidValue` for values that are no numbers in 0 … 10¹².
    """

    seconds_fixed: float = 0.0
    seconds_per_byte: float

    def __post_init__(self) -> None:
        _check_numbers(self, self.__slots__)

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth; infinite where bytes cost nothing."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to move ``nbytes``; 0 for none."""
        return self.seconds_fixed + self.seconds_per_byte * nbytes if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds that an engine takes for one prompt while it computes nothing else.

    Tokens a … b - 1 of a prompt, after cached tokens, take ``seconds_fixed`` +
    ``seconds_per_token`` · (b - a) + ``seconds_per_token_pair`` · (b² - a²) / 2; the last term is
    attention, of each token to all before it. Each token of an answer after the first takes
    ``decode_seconds_per_token``. ``kv_bytes_per_token`` is the size of a token's KV, 0 if unknown.
    ``name`` describes the measured engine or server.

    Raises `InvalidValue` for values that are no numbers in 0 … 10¹².
    """

    seconds_fixed: float = 0.0
    seconds_per_token: float
    seconds_per_token_pair: float = 0.0
    decode_seconds_per_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        _check_numbers(self, self.__slots__[:-1])
        name: object = self.name
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InvalidValue(f"name is text of at most {_MAX_NAME} characters, got {told(name)}")

    def prefill_s(self, start: int, stop: int) -> float:
        """Return seconds for tokens ``start`` … ``stop - 1``; 0 if there are none."""
        if stop <= start:
            return 0.0
        linear = self.seconds_per_token * (stop - start)
        pairs = (stop * stop - start * start) / 2
        return self.seconds_fixed + linear + self.seconds_per_token_pair * pairs

    def decode_s(self, tokens: int) -> float:
        """Return the seconds to decode an answer of ``tokens`` tokens after its first."""
        return self.decode_seconds_per_token * max(0, tokens - 1)


class PrefixChoice(NamedTuple):
    """The prefix to load: ``tokens`` of it; the seconds it takes, and those without loading."""

    tokens: int
    seconds: float
    compute_s: float


def best_prefix(
    computed: int,
    tokens: int,
    runs: Iterable[tuple[int, float]],
    compute_s: Callable[[int, int], float],
    *,
    compute_free_s: float = 0.0,
    load_free_s: float = 0.0,
) -> PrefixChoice:
    """Return how much of a stored prefix to load, if the rest is computed behind it.

    ``runs`` are pieces of the prefix behind the ``computed`` first tokens, in order: the end of
    each, in tokens, and the seconds to load it. Loads begin after ``load_free_s``, computing after
    ``compute_free_s``, when older prompts leave them room. A piece is loaded whole or not at all:
    the longer the prefix, the more attention each token of it saves, so nothing in between is
    better than both ends. ``tokens`` are those of the prompt, of which the last is computed in any
    case.
    """
    alone = compute_free_s + compute_s(computed, tokens)
    best = PrefixChoice(computed, alone, alone)
    loading = load_free_s
    for end, seconds in runs:
        loading += seconds
        took = max(loading, compute_free_s) + compute_s(min(end, tokens - 1), tokens)
        if took < best.seconds:
            best = PrefixChoice(end, took, alone)
    return best


# --- learned -------------------------------------------------------------------------------------

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
_EXPLAINED: Final = 1e-3  # of its seconds that the coefficients give at least for an observation
# Observations of about one size do not tell a fixed cost from one of each unit: of the error, at
# most this may be left with other terms than the first, or with more of them.
_WORTH: Final = 0.8


class OnlineFit:
    """Learns ``seconds = c₀·t₀ + c₁·t₁ + …`` with no negative coefficient.

    Observations of each size are kept apart, a few of each, so that many small ones do not make it
    forget the large ones. Two things are learned from them: the coefficients, slowly; and the
    pace, by which the last observations are slower than the coefficients say. A machine that
    others begin to use becomes slower as a whole. A single observation is explained by t₀.

    Robust: one observation that took a hundred times as long moves neither by more than an
    ordinary one. Memory: 352 observations. Cost: 10 µs an observation, and now and then 1 ms.
    Thread safety: all methods.

    Arguments:
        seed: coefficients that hold until something was observed; None: nothing is known.
        sizes: rows of terms whose seconds by the seed stay among the observations, so that sizes
            never observed keep their relation to others.
        forgets: whether older observations are dropped once the last ones agree on another pace.
            If not, sizes that are not observed again keep their relation to others.

    Attributes:
        observations: their number so far.
        error: the relative error to expect: 0.1 is 10 %; 1 as long as nothing was observed.
    """

    def __init__(
        self,
        terms: int,
        *,
        seed: Row | None = None,
        sizes: Iterable[Row] = (),
        forgets: bool = False,
    ) -> None:
        self._forgets = forgets
        self._seed = self._shape = seed or (0.0,) * terms
        self._seeds = [(row, max(_dot(self._seed, row), _LEAST)) for row in sizes if seed]
        self._fitting = threading.Lock()
        self._cells: OrderedDict[tuple[int, ...], deque[tuple[Row, float]]] = OrderedDict()
        self._recent: deque[tuple[Row, float]] = deque(maxlen=_RECENT)
        self._pace = self.error = 1.0
        self._fit_at = 1  # observations at which the coefficients are fitted again
        self.observations = 0

    @property
    def known(self) -> bool:
        """Whether there is anything to go by: seeds, or an observation."""
        return bool(self._seeds) or self.observations > 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients at the present pace, in seconds a unit of each term."""
        with self._fitting:
            return tuple(min(value * self._pace, _MAX) for value in self._shape)

    def expect(self, terms: Sequence[float]) -> float:
        """Return the seconds to expect; 0 if nothing is known."""
        with self._fitting:
            return self._pace * _dot(self._shape, terms)

    def learn(self, terms: Sequence[float], seconds: float) -> None:
        """Learn from one observation. Seconds that are not above 0 are taken for a nanosecond.

        Raises `InvalidValue` for seconds or terms that are no finite numbers.
        """
        row = tuple(map(float, terms))
        if not all(map(math.isfinite, (*row, seconds))):
            raise InvalidValue(f"{seconds} s for terms {row}; finite numbers are needed")
        seconds = max(seconds, _LEAST)
        with self._fitting:
            self.observations += 1
            is_new = self._add(row, seconds)
            if is_new or self.observations >= self._fit_at or not self._explains(row, seconds):
                self._fit_at = self.observations + min(self.observations, _REFIT)
                self._fit()
            self._measure()

    def _add(self, row: Row, seconds: float) -> bool:
        """Add an observation; return whether it is the first of its size."""
        size = tuple([math.frexp(value)[1] for value in row])  # the power of two of each term
        is_new = size not in self._cells
        self._cells.setdefault(size, deque(maxlen=_A_CELL)).append((row, seconds))
        self._cells.move_to_end(size)
        if len(self._cells) > _CELLS:
            self._cells.popitem(last=False)
        self._recent.append((row, seconds))
        return is_new

    def _explains(self, row: Row, seconds: float) -> bool:
        """Whether a term of ``row`` has a coefficient: other rows may all have lacked it."""
        return _dot(self._shape, row) > _EXPLAINED * seconds

    def _expected(self) -> list[tuple[float, float, float]]:
        """Return of recent observations the expected seconds, the least that explain, and those."""
        return [
            (_dot(self._shape, row), _EXPLAINED * seconds, seconds) for row, seconds in self._recent
        ]

    def _measure(self) -> None:
        """Set pace and error by the last observations."""
        pairs = self._expected()
        newest = pairs[-_TURNED:]
        if len(newest) == _TURNED and all(expected <= least for expected, least, _ in newest):
            # Another place, network or disk: too slow to be taken for a pace.
            self._begin_anew(list(self._recent)[-_TURNED:])
            pairs = self._expected()
        ratios = [math.log(took / expected) for expected, least, took in pairs if expected > least]
        if not ratios:
            self._pace = self.error = 1.0
            return
        last, turned = ratios[-_PACE:], ratios[-_TURNED:]
        pace, turn = median_high(last), median_high(turned)
        if len(turned) == _TURNED and max(turned) - min(turned) < _AGREE < abs(turn - pace):
            if self._forgets and abs(turn - pace) > _ANOTHER:
                self._begin_anew(list(self._recent)[-_TURNED:])
                last, pace = [0.0] * _TURNED, 0.0
            else:
                last, pace = turned, turn
            ratios = last
        self._pace = math.exp(pace)
        spread = median_high([abs(ratio - pace) for ratio in last])
        # Few observations tell little: what they agree in may be chance.
        self.error = min(1.0, max(math.expm1(spread), 1 / (1 + len(ratios))))

    def _begin_anew(self, observations: list[tuple[Row, float]]) -> None:
        """Keep these observations alone, and no seeds."""
        self._cells.clear()
        self._recent.clear()
        self._seeds = []
        for row, seconds in observations:
            self._add(row, seconds)
        self._fit()

    def _fit(self) -> None:
        """Fit the coefficients to all observations, with outliers weighted down."""
        rows = [each for cell in self._cells.values() for each in cell]
        slower = 1.0  # than the seeds
        if self._seeds and rows:
            slower = median_high([each / max(_dot(self._seed, row), _LEAST) for row, each in rows])
        rows += [(row, seconds * slower) for row, seconds in self._seeds]
        seconds = np.array([each for _, each in rows], float)
        relative = np.array([row for row, _ in rows], float) / seconds[:, None]
        weights = np.ones(len(rows))
        for _ in range(_ROUNDS):
            shape = _non_negative(relative * weights[:, None], weights)
            off = np.abs(relative @ shape - 1)
            weights = np.sqrt(1 / np.maximum(1, off / max(_FAR * float(np.median(off)), 1e-6)))
        self._shape = tuple(shape.tolist())


def _non_negative(terms: Floats, goals: Floats) -> Floats:
    """Return non-negative coefficients for which ``terms @ coefficients`` comes closest to goals.

    The optimum lies where some coefficients are 0 and the others are free. There are few terms, so
    every choice of free coefficients is tried: those with few first, and the first term before
    others. A later one has to leave less than ``_WORTH`` of the error that is left.
    """
    count = terms.shape[1]
    scale = np.abs(terms).max(0)
    scale[scale == 0] = 1.0
    scaled = terms / scale  # n² beside 1: scaled to be comparable
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for free in map(list, combinations(range(count), size)):
            values = np.linalg.lstsq(scaled[:, free], goals, rcond=None)[0]
            if (values < 0).any():
                continue
            rest = float(((scaled[:, free] @ values - goals) ** 2).sum())
            if rest < least * _WORTH - 1e-18:
                best, least = np.zeros(count), rest
                best[free] = values
    result: Floats = best / scale
    return result


def _dot(coefficients: Row, terms: Sequence[float]) -> float:
    total: float = sum(map(mul, coefficients, terms))
    return total


_SEED_SPANS: Final = ((0, 64), (0, 1024), (0, 8192), (8128, 8192), (4096, 8192))


class LearnedPrefill(OnlineFit):
    """Learns the cost of prefill from the forward passes of an engine.

    A pass computes pieces: tokens ``start`` … ``stop - 1`` of one prompt or several. ``seed`` is a
    cost that was measured before; it holds until passes were observed, and afterwards where none
    of such a size was. Thread safety: all methods. See `OnlineFit` for costs and robustness.

    Attributes:
        kv_bytes_per_token: the size of a token's KV, 0 if unknown; it is part of `cost`.
        largest: tokens of the largest pass observed, or of those that show the seed.
    """

    def __init__(self, seed: PrefillCost | None = None) -> None:
        self._rest = cost = seed or PrefillCost(seconds_per_token=0.0)
        figures = (cost.seconds_per_token, cost.seconds_fixed, cost.seconds_per_token_pair)
        sizes = (_terms([span]) for span in _SEED_SPANS)
        super().__init__(3, seed=figures if seed else None, sizes=sizes)
        self.kv_bytes_per_token = cost.kv_bytes_per_token
        self.largest = _SEED_SPANS[-1][1] if seed else 0

    @property
    def cost(self) -> PrefillCost:
        """The cost at present; the seed's decoding and name are kept."""
        linear, fixed, pair = self.coefficients
        return replace(
            self._rest,
            seconds_fixed=fixed,
            seconds_per_token=linear,
            seconds_per_token_pair=pair,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    def prefill_s(self, start: int, stop: int) -> float:
        """Return the expected seconds for tokens ``start`` … ``stop - 1``; 0 if there are none."""
        return 0.0 if stop <= start else self.expect(_terms([(start, stop)]))

    def observe(self, pieces: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a forward pass over ``pieces``, (start, stop) of each, in ``seconds``."""
        terms = _terms(pieces)
        if terms[0] > 0:
            self.largest = max(self.largest, int(terms[0]))
            self.learn(terms, seconds)


def _terms(pieces: Iterable[tuple[int, int]]) -> Row:
    """Return the terms of a pass: its tokens, itself, and its pairs of tokens."""
    tokens, pairs = 0.0, 0.0
    for start, stop in pieces:
        tokens += stop - start
        pairs += (stop * stop - start * start) / 2
    return tokens, 1.0, pairs


_CUT_S: Final = 0.25  # a longer time of uninterrupted transfers is observed in parts
_HANGS_S: Final = 5.0  # after which a transfer is taken to hang: others do not wait for it
_ENOUGH: Final = 64  # observations from which on …
_PAUSE_S: Final = 0.02  # … short transfers are observed as often as that
_SEED_BYTES: Final = (1 << 12, 1 << 20, 1 << 26)


class LearnedTransfer(OnlineFit):
    """Learns what moving bytes takes, from transfers that may run at the same time.

    What counts is the time in which at least one runs: transfers that share a link share its
    bandwidth, and those that wait for a latency wait together. Failed transfers teach nothing.

    Thread safety: all methods. Cost: 2 µs a transfer; see `OnlineFit` for that of an observation,
    of which there are at most 50 a second, and for robustness.

    Arguments:
        seed: a cost that was measured before.
        clock: monotonic seconds.
    """

    def __init__(
        self, seed: TransferCost | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        figures = None if seed is None else (seed.seconds_per_byte, seed.seconds_fixed)
        sizes = ((float(nbytes), 1.0) for nbytes in _SEED_BYTES)
        super().__init__(2, seed=figures, sizes=sizes, forgets=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: list[float] = []  # when each transfer under way began, the newest last
        self._queued = 0
        self._observed = -math.inf  # when
        # The time that is observed next; the bytes moved since it began; the time and bytes where
        # the next begins, once it was cut; and whether nothing was under way before it.
        self._since, self._moved = 0.0, 0
        self._cut: tuple[float, int] | None = None
        self._first = True
        self._spoilt = False  # by a transfer that failed, until nothing is under way

    @property
    def age_s(self) -> float:
        """Seconds since the last observation; infinite before the first."""
        return self._clock() - self._observed

    @property
    def running(self) -> int:
        """Transfers under way, without those that hang."""
        with self._lock:
            return self._active(self._clock())

    @property
    def queued(self) -> int:
        """Bytes of transfers that wait or are under way: the sum of those given to `queue`."""
        return self._queued

    @property
    def busy_s(self) -> float:
        """The expected seconds until a transfer that is queued now begins."""
        return self.coefficients[0] * max(0, self._queued)

    @property
    def cost(self) -> TransferCost:
        """The cost at present."""
        each, fixed = self.coefficients
        return TransferCost(seconds_fixed=fixed, seconds_per_byte=each)

    def seconds(self, nbytes: float) -> float:
        """Return the expected seconds to move ``nbytes``; 0 for none, or if nothing is known."""
        return self.expect((nbytes, 1.0)) if nbytes > 0 else 0.0

    def queue(self, nbytes: int) -> None:
        """Note that ``nbytes`` more wait to be moved; negative once they were, or are not to be."""
        with self._lock:
            self._queued += nbytes

    def begin(self) -> None:
        """Note that a transfer begins; `end` must follow, whatever happens."""
        with self._lock:
            now = self._clock()
            if not self._active(now):
                self._since, self._moved, self._cut = now, 0, None
                self._first, self._spoilt = True, False
            self._begun.append(now)

    def end(self, nbytes: int | None) -> None:
        """Note that a transfer has moved ``nbytes``, 0: there was nothing; None: it failed."""
        with self._lock:
            # Not always the one that ends; so the oldest that remain are those that hang.
            self._begun.pop()
            if nbytes is None:
                self._spoilt = True
            else:
                self._moved += nbytes
            now = self._clock()
            since, first = self._since, self._first
            stop, moved, cut = now, self._moved, None
            if self._active(now):
                if now - (self._cut[0] if self._cut else since) < _CUT_S:
                    return
                if self._cut is None:
                    self._cut = now, moved
                    return
                # Only up to the cut before: the rest at the end is short, and needs a part.
                stop, moved = self._cut
                cut = now, self._moved - moved
            self._since, self._moved = stop, self._moved - moved
            self._first, self._cut = False, cut
            # Where transfers are short, fitting them all would cost more than they do.
            often = now - self._observed < _PAUSE_S and self.observations >= _ENOUGH
            if often or not moved or self._spoilt:
                return
            self._observed = now
        self.learn((float(moved), float(first)), stop - since)

    def _active(self, now: float) -> int:
        """Return the transfers under way that do not hang, under the lock."""
        begun = self._begun
        if not begun or begun[0] > now - _HANGS_S:
            return len(begun)
        return len(begun) - bisect_left(begun, now - _HANGS_S)


# --- all costs, in one place and one file --------------------------------------------------------


class CostModel:
    """The costs of one model on one machine: of prefill, and of each tier's reads and writes.

    All are learned while they are used. ``prefill``, ``reads`` and ``writes`` are seeds, measured
    before. ``model`` names what computes, so that its costs are not taken for another's; "" if
    unknown. The bytes of transfers are those of raw KV, so the codec is part of a tier's cost.

    Thread safety: all methods.

    Raises `InvalidValue` for more than 64 tiers, or a name that is too long.
    """

    def __init__(
        self,
        prefill: PrefillCost | None = None,
        *,
        reads: Mapping[str, TransferCost] | None = None,
        writes: Mapping[str, TransferCost] | None = None,
        model: str = "",
    ) -> None:
        seeds = {"read": reads or {}, "write": writes or {}}
        tiers = {*seeds["read"], *seeds["write"]}
        if len(tiers) > _MAX_TIERS or any(len(name) > _MAX_NAME for name in (*tiers, model)):
            raise InvalidValue(
                f"costs are of {_MAX_TIERS} tiers at most, with names of {_MAX_NAME} characters"
            )
        self.model = model
        self.prefill = LearnedPrefill(prefill)
        self._lock = threading.Lock()
        self._transfers = {
            (tier, kind): LearnedTransfer(seed)
            for kind, costs in seeds.items()
            for tier, seed in costs.items()
        }

    def reading(self, tier: str) -> LearnedTransfer:
        """Return the cost of reads from ``tier``, a name that is unique in its store."""
        return self._transfer(tier, "read")

    def writing(self, tier: str) -> LearnedTransfer:
        """Return the cost of writes to ``tier``."""
        return self._transfer(tier, "write")

    def _transfer(self, tier: str, kind: str) -> LearnedTransfer:
        with self._lock:
            learned = self._transfers.get((tier, kind))
            if learned is None:
                learned = self._transfers[tier, kind] = LearnedTransfer()
            return learned

    def reads(self) -> dict[str, TransferCost]:
        """Return what is known of reads, by tier."""
        return {tier: read.cost for (tier, kind), read in self._known() if kind == "read"}

    def load_s(self, tier_bytes: Mapping[str, float]) -> float:
        """Return the expected seconds to read so many bytes from each tier, one after another.

        Tiers of which nothing is known count as free: reading them is how they become known.
        """
        return sum(self.reading(tier).seconds(nbytes) for tier, nbytes in tier_bytes.items())

    def _known(self) -> list[tuple[tuple[str, str], LearnedTransfer]]:
        with self._lock:
            return [item for item in self._transfers.items() if item[1].known]

    def as_dict(self) -> dict[str, Any]:
        """Return all costs for JSON, with their errors and numbers of observations."""
        tiers: dict[str, Any] = {}
        for (tier, kind), learned in self._known():
            tiers.setdefault(tier, {})[kind] = _shown(learned)
        prefill = _shown(self.prefill) if self.prefill.known else {}
        return {"kvkeep_cost": _VERSION, **prefill, "model": self.model, "tiers": tiers}

    @classmethod
    def of(cls, fields: object) -> CostModel:
        """Return the model of an `as_dict`, or of what people write.

        That is all of prefill, tiers, or both; ``kvkeep_cost`` may be missing beside tiers alone.

        Raises:
            OtherCostVersion: ``kvkeep_cost`` is another version.
            InvalidValue: it is neither of them.
        """
        if not isinstance(fields, dict):
            raise InvalidValue(f"costs are an object, got {told(fields)}")
        has_prefill = "tiers" not in fields or not fields.keys().isdisjoint(PrefillCost.__slots__)
        if has_prefill and "kvkeep_cost" not in fields:
            raise InvalidValue(f"kvkeep_cost is missing; a file of costs has {_VERSION} there")
        version = fields.get("kvkeep_cost", _VERSION)
        if type(version) is not int or version != _VERSION:
            kind = OtherCostVersion if type(version) is int else InvalidValue
            raise kind(
                f"kvkeep_cost is {told(version)}; {_VERSION} is needed, as `kvkeep serve` writes it"
            )
        tiers, model = fields.get("tiers", {}), fields.get("model", "")
        if not isinstance(tiers, dict) or not all(
            isinstance(kinds, dict) for kinds in tiers.values()
        ):
            raise InvalidValue(f"tiers are objects with read and write, got {told(tiers)}")
        if not isinstance(model, str):
            raise InvalidValue(f"model is text, got {told(model)}")
        costs: dict[str, dict[str, TransferCost]] = {"read": {}, "write": {}}
        for tier, kinds in tiers.items():
            for call in costs.keys() & kinds.keys():
                try:
                    costs[call][tier] = _cost(TransferCost, "seconds_per_byte", kinds[call])
                except InvalidValue as error:
                    raise InvalidValue(f"tier {told(tier)}, {call}: {error}") from error
        prefill = _cost(PrefillCost, "seconds_per_token", fields) if has_prefill else None
        return cls(prefill, reads=costs["read"], writes=costs["write"], model=model)

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """Read a file that `write` or a person wrote. Raises as `of`, with its name."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise InvalidValue(f"cannot read {path}: {reason(error)}") from error
        if len(text) > _MAX_FILE:
            raise InvalidValue(f"{path} has more than {_MAX_FILE:,} bytes: it is no cost file")
        try:
            return cls.of(json.loads(text))
        except InvalidValue as error:
            raise type(error)(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"{path} is not JSON") from error

    def write(self, path: Path) -> None:
        """Write a file whole, or leave an old one as it is.

        A path that is no regular file, such as ``/dev/stdout``, is written to. Raises
        `InvalidValue` if it cannot be written.
        """
        text = json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n"
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            if path.exists() and not path.is_file():
                path.write_text(text, encoding="utf-8")
            else:
                draft.write_text(text, encoding="utf-8")
                draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise InvalidValue(f"cannot write {path}: {reason(error)}") from error

    @classmethod
    @contextmanager
    def saved(
        cls, path: Path, model: str, *, every_s: float = 300.0, strict: bool = True
    ) -> Iterator[CostModel]:
        """Learn the costs of ``model`` on, which are in a file unless it does not exist yet.

        The file is written every ``every_s`` seconds by a thread of its own, and at the end. If it
        cannot be written, a warning is logged once. Costs without a model, as people write them,
        are taken as a seed.

        Raises `InvalidValue` for a file that is none of costs, that names another model, or that
        has no folder. Not ``strict``: these are warnings in the log. The folder is made, and costs
        are learned anew; they are not saved if there can be no such folder, or if the file is of
        another version of the format: that stays as it is.
        """
        keeps = True
        try:
            if not strict:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.absolute().parent.is_dir():
                raise InvalidValue(f"cannot write {path}: there is no folder {path.parent}")
            cost = cls.read(path) if path.exists() else cls()
            if cost.model not in {"", model}:
                raise InvalidValue(
                    f"{path} has the costs of {told(cost.model)}, and this is {told(model)}: name "
                    "another file, or delete it"
                )
        except (OSError, InvalidValue) as error:
            if strict:
                raise
            cost = cls()
            made = isinstance(error, InvalidValue)
            keeps = made and not isinstance(error, OtherCostVersion)
            why = error if made else f"cannot make {path.parent}: {reason(error)}"
            log.warning("costs are %s: %s", "learned anew" if keeps else "not kept", why)
        cost.model = model
        if not keeps:
            yield cost
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=cost._save, args=(path, every_s, ended), name="kvkeep costs", daemon=True
        )
        thread.start()
        try:
            yield cost
        finally:
            ended.set()
            thread.join()

    def _save(self, path: Path, every_s: float, ended: threading.Event) -> None:
        """Write the costs now and then, and at the end."""
        warned = last = False
        while not last:
            last = ended.wait(every_s)
            try:
                self.write(path)
            except InvalidValue as error:
                if not warned:
                    log.warning("costs are not kept: %s", error)
                warned = True


def _shown(learned: LearnedTransfer | LearnedPrefill) -> dict[str, Any]:
    return {
        **asdict(learned.cost), "error": learned.error, "observations": learned.observations,
    }  # fmt: skip


def _cost(kind: type[C], needed: str, fields: object) -> C:
    """Return the cost in an object, which may have other fields too."""
    if not isinstance(fields, dict):
        raise InvalidValue(f"an object with {needed} is needed, got {told(fields)}")
    if needed not in fields:
        raise InvalidValue(f"{needed} is missing")
    return kind(**{name: fields[name] for name in kind.__slots__ if name in fields})


def _check_numbers(cost: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(cost, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(f"{name} is {told(value)}; a number is needed")
        if not 0 <= value <= _MAX:  # NaN is in no range
            raise InvalidValue(f"{name} is {told(value)}; 0 … {_MAX:g} is needed")
        object.__setattr__(cost, name, float(value))
