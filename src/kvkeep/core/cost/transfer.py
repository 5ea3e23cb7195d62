"""`TransferCost`: seconds to move bytes to or from a place; `LearnedTransfer` learns them."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
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
_HANGS_S: Final = 5.0  # after which a transfer is taken to hang: others do not wait for it
_ENOUGH: Final = 64  # observations from which on …
_PAUSE_S: Final = 0.02  # … short transfers are observed as often as that
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


@dataclass(slots=True)
class ObservedTransfer:
    """One transfer; set ``moved`` to the bytes that it moved: 0 for none, None if it failed."""

    moved: int | None


class LearnedTransfer:
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
        seeds = []
        if seed is not None:
            seeds = [((1.0, float(n)), max(seed.seconds(n), 1e-9)) for n in _SEEDED]
        self._fit = OnlineFit(2, seeds=seeds, first=1, forgets=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: list[float] = []  # when each transfer under way began, the newest last
        self._queued = 0
        self._observed = -math.inf  # when
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
        return self._fit.coefficients[1] * max(0, self._queued)

    @property
    def cost(self) -> TransferCost:
        """The cost at present."""
        fixed, each = self._fit.coefficients
        return TransferCost(seconds_fixed=fixed, seconds_per_byte=each)

    def seconds(self, nbytes: float) -> float:
        """Return the expected seconds to move ``nbytes``; 0 for none, or if nothing is known."""
        return self._fit.seconds((1.0, nbytes)) if nbytes > 0 else 0.0

    def queue(self, nbytes: int) -> None:
        """Note that ``nbytes`` more wait to be moved; negative once they were, or are not to be."""
        with self._lock:
            self._queued += nbytes

    @contextmanager
    def transfer(self, nbytes: int) -> Iterator[ObservedTransfer]:
        """Observe a transfer of ``nbytes`` within the ``with`` block; an exception spoils it."""
        transfer, moved = ObservedTransfer(nbytes), None
        self.begin()
        try:
            yield transfer
            moved = transfer.moved
        finally:
            self.end(moved)

    def begin(self) -> None:
        """Note that a transfer begins; `end` must follow, whatever happens."""
        with self._lock:
            now = self._clock()
            if not self._active(now):
                self._since, self._bytes, self._first = now, 0, True
                self._part, self._spoilt = None, False
            self._begun.append(now)

    def end(self, nbytes: int | None) -> None:
        """Note that a transfer has moved ``nbytes``, 0: there was nothing; None: it failed."""
        with self._lock:
            # Not always the one that ends; so the oldest ones left are those that hang.
            self._begun.pop()
            if nbytes is None:
                self._spoilt = True
            else:
                self._bytes += nbytes
            now = self._clock()
            running = self._active(now)
            seconds = now - self._since
            if running and seconds < _CUT_S:
                return
            last = _Part(self._first, self._bytes, seconds)
            self._since, self._bytes, self._first = now, 0, False
            before, self._part = self._part, None
            part: _Part | None = last
            if running:
                part, self._part = before, last
            elif before is not None:
                # What is left at the end is short, and was moved in the part before as well.
                part = before.and_then(last)
            if part is None or not part.nbytes or self._spoilt:
                return
            # Where transfers are short, fitting them all would cost more than they do.
            if now - self._observed < _PAUSE_S and self._fit.observations >= _ENOUGH:
                return
            self._observed = now
        self._fit.observe((float(part.first), float(part.nbytes)), part.seconds)

    def _active(self, now: float) -> int:
        """Return the transfers under way that do not hang, under the lock."""
        begun = self._begun
        if not begun or begun[0] > now - _HANGS_S:
            return len(begun)
        return len(begun) - bisect_left(begun, now - _HANGS_S)


class _Part(NamedTuple):
    """Bytes moved without a pause; ``first``: nothing was under way before."""

    first: bool
    nbytes: int
    seconds: float

    def and_then(self, other: _Part) -> _Part:
        return _Part(self.first, self.nbytes + other.nbytes, self.seconds + other.seconds)
