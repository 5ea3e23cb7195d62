"""`TransferCost`: seconds to move bytes to or from a place; `LearnedTransfer` learns them."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.cost.fit import OnlineFit
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LearnedTransfer", "TransferCost"]

_MAX: Final = 1e12
_CUT_S: Final = 0.25  # a longer time of uninterrupted transfers is observed in parts
_SEEDED: Final = (1 << 12, 1 << 20, 1 << 26)  # bytes of transfers that show a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """Moving n bytes takes ``seconds_fixed`` + ``seconds_per_byte`` · n.

    Raises `InvalidValue` for values that are no numbers in 0 … 10¹².
    """

    seconds_fixed: float = 0.0
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("seconds_fixed", "seconds_per_byte"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidValue(f"{name} is {told(value)}; a number is needed")
            if not 0 <= value <= _MAX:  # NaN is in no range
                raise InvalidValue(f"{name} is {told(value)}; 0 … {_MAX:g} is needed")
            object.__setattr__(self, name, float(value))

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth; infinite where bytes cost nothing."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to move ``nbytes``; 0 for none."""
        return self.seconds_fixed + self.seconds_per_byte * nbytes if nbytes > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the cost for JSON; `of` reads it."""
        return {"seconds_fixed": self.seconds_fixed, "seconds_per_byte": self.seconds_per_byte}

    @classmethod
    def of(cls, found: object) -> TransferCost:
        """Return the cost of an `as_dict`. Raises `InvalidValue`."""
        if not isinstance(found, dict) or "seconds_per_byte" not in found:
            raise InvalidValue(f"a transfer's cost has seconds_per_byte, got {told(found)}")
        fields: dict[str, Any] = {key: found[key] for key in cls.__slots__ if key in found}
        return cls(**fields)


class LearnedTransfer:
    """Learns what moving bytes takes, from transfers that may run at the same time.

    What counts is the time in which at least one runs: transfers that share a link share its
    bandwidth, and those that wait for a latency wait together. Failed transfers teach nothing.
    Thread safety: all methods. See `OnlineFit` for costs and robustness.

    Arguments:
        seed: a cost that was measured before.
        clock: monotonic seconds.
    """

    def __init__(
        self, seed: TransferCost | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        seeds = []
        if seed is not None:
            seeds = [((1.0, float(n)), max(seed.seconds(n), 1e-9)) for n in _SEEDED]
        self._fit = OnlineFit(2, seeds=seeds, first=1)
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0  # begin of the time that is observed next
        self._bytes = 0  # moved since then
        self._first = True  # whether that time began with nothing under way
        self._part: _Part | None = None  # what was observed last, while more goes on
        self._spoilt = False  # by a transfer that failed, until nothing is under way

    @property
    def known(self) -> bool:
        """Whether there is a seed, or a transfer was observed."""
        return self._fit.known

    @property
    def error(self) -> float:
        """The relative error to expect: 0.1 is 10 %; 1 as long as nothing was observed."""
        return self._fit.error

    @property
    def observations(self) -> int:
        """Times observed, of one transfer or several."""
        return self._fit.observations

    @property
    def running(self) -> int:
        """Transfers under way."""
        return self._running

    @property
    def cost(self) -> TransferCost:
        """The cost at present."""
        fixed, each = self._fit.coefficients
        return TransferCost(seconds_fixed=fixed, seconds_per_byte=each)

    def seconds(self, nbytes: float) -> float:
        """Return the expected seconds to move ``nbytes``; 0 for none, or if nothing is known."""
        return self._fit.seconds((1.0, nbytes)) if nbytes > 0 else 0.0

    @contextmanager
    def transfer(self, nbytes: int) -> Iterator[None]:
        """Observe a transfer of ``nbytes`` within the ``with`` block; an exception spoils it."""
        self.begin()
        moved: int | None = None
        try:
            yield
            moved = nbytes
        finally:
            self.end(moved)

    def begin(self) -> None:
        """Note that a transfer begins; `end` must follow, whatever happens."""
        with self._lock:
            if not self._running:
                self._since, self._bytes, self._first = self._clock(), 0, True
                self._part, self._spoilt = None, False
            self._running += 1

    def end(self, nbytes: int | None) -> None:
        """Note that a transfer has moved ``nbytes``; None: it failed, or moved nothing."""
        with self._lock:
            self._running -= 1
            if nbytes is None:
                self._spoilt = True
            else:
                self._bytes += nbytes
            now = self._clock()
            seconds = now - self._since
            if self._running and seconds < _CUT_S:
                return
            last = _Part(self._first, self._bytes, seconds)
            self._since, self._bytes, self._first = now, 0, False
            before, self._part = self._part, None
            part: _Part | None = last
            if self._running:
                part, self._part = before, last
            elif before is not None:
                # What is left at the end is short, and was moved in the part before as well.
                part = before.and_then(last)
            spoilt = self._spoilt
        if part is not None and part.nbytes and not spoilt:
            self._fit.observe((float(part.first), float(part.nbytes)), part.seconds)


class _Part(NamedTuple):
    """Bytes moved without a pause; ``first``: nothing was under way before."""

    first: bool
    nbytes: int
    seconds: float

    def and_then(self, other: _Part) -> _Part:
        return _Part(self.first, self.nbytes + other.nbytes, self.seconds + other.seconds)
