"""`WriteBudget`: how many bytes a process may write to a tier in a time, as a token bucket."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WriteBucket", "WriteBudget"]

_SPANS: Final = {"day": 86_400, "hour": 3_600}
_BURST: Final = 12  # a bucket holds this part of the budget
_MOST: Final = 1 << 70  # bytes


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """At most ``amount`` bytes of writes in any ``seconds`` (a whole number).

    Raises `InvalidValue` for an amount below 12 bytes or above 1024 EiB, or seconds below 1.
    """

    amount: int
    seconds: int = _SPANS["day"]

    def __post_init__(self) -> None:
        whole("bytes of a write budget", self.amount, _BURST, _MOST)
        whole("seconds of a write budget", self.seconds, 1)

    @classmethod
    def parse(cls, text: str) -> WriteBudget:
        """Read ``2TB/day`` or ``50GiB/hour``: an amount as `parse_bytes` takes it, and a span.

        Raises:
            InvalidValue: the text is no such budget.
        """
        match = re.fullmatch(r"(.+?) ?/ ?(day|hour)", text.strip())
        if match is None:
            raise InvalidValue(
                f"{text!r} is no write budget; write bytes per day or hour, as 2TB/day or "
                "50GiB/hour"
            )
        return cls(parse_bytes(match[1]), _SPANS[match[2]])

    @property
    def burst(self) -> int:
        """Bytes that may be written at once after a long time without writes."""
        return self.amount // _BURST

    def __str__(self) -> str:
        span = next((name for name, long in _SPANS.items() if long == self.seconds), None)
        return f"{format_bytes(self.amount)}/{span or f'{self.seconds} s'}"


class WriteBucket:
    """What a `WriteBudget` leaves: a twelfth of it at first, and the rest evenly over its time.

    The two together are the budget, so no span of that length has more writes than that.

    Thread safety: all methods.

    Arguments:
        budget: what it allows.
        clock: returns seconds; it never goes back.
    """

    def __init__(self, budget: WriteBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self._clock = clock
        self._lock = threading.Lock()
        self._left = float(budget.burst)
        self._at = clock()

    def spend(self, size: int) -> bool:
        """Count ``size`` bytes as written; False, and nothing is counted, if fewer are left."""
        with self._lock:
            self._refill()
            if size > self._left:
                return False
            self._left -= size
            return True

    def left(self) -> int:
        """Return the bytes that may be written now."""
        with self._lock:
            self._refill()
            return int(self._left)

    def _refill(self) -> None:
        """Add what has come back since the last call, under the lock."""
        budget, now = self.budget, self._clock()
        rate = (budget.amount - budget.burst) / budget.seconds
        self._left = min(float(budget.burst), self._left + rate * (now - self._at))
        self._at = now

    def state(self) -> dict[str, int]:
        """Return the budget (``bytes`` in ``seconds``), and the bytes ``left`` now."""
        return {
            "bytes": self.budget.amount,
            "seconds": self.budget.seconds,
            "left": self.left(),
        }
