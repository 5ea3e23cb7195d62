"""`LookupPatience`: how long the answer of shared tiers is worth waiting for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LookupPatience"]

_RECENT: Final = 9  # lookups that say what the next one takes …
_SHARES: Final = 32  # … and those that say what it brings
_FIRST: Final = 0.25  # of what could be saved, that the first lookup may take
_LATER: Final = 4.0  # multiples of the usual seconds that a later one may take
_PAUSE_S: Final = 5.0  # between two lookups that are not waited for


class LookupPatience:
    """Weighs what lookups take, lately, against what they bring.

    A lookup is waited for if the seconds that it takes are fewer than those that it saves, on
    average. If they are not, a lookup is made every five seconds, for which no request waits, to
    see whether they are again.

    Thread safety: none. Cost: some µs.

    Arguments:
        timeout: seconds that no lookup is waited for longer.
        clock: monotonic seconds.
    """

    def __init__(self, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._shares: deque[float] = deque(maxlen=_SHARES)
        self._next = 0.0

    def seconds(self, saves_s: float | None) -> float:
        """Return how long to wait for a lookup that can save ``saves_s``; None: that is unknown.

        0: not at all; see `due`.
        """
        if saves_s is None:
            return self._timeout
        if not self._took:
            return min(self._timeout, _FIRST * saves_s)
        usual, brings = statistics.median(self._took), statistics.mean(self._shares) * saves_s
        if usual > brings:
            return 0.0
        return min(self._timeout, max(_LATER * usual, _FIRST * brings), saves_s)

    def due(self) -> bool:
        """Return whether to begin a lookup that is not waited for; if so, the next one is later."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _PAUSE_S
        return True

    def answered(self, seconds: float, share: float) -> None:
        """Note that a lookup took ``seconds`` and found this share of what it was asked for."""
        self._took.append(seconds)
        self._shares.append(share)
