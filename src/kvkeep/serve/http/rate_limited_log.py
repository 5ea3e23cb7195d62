"""`RateLimitedLog`: limits the rate of warnings that clients can cause."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["RateLimitedLog"]


class RateLimitedLog:
    """Logs at most one warning per ``seconds``, with the number of warnings left out since.

    Thread safety: none; for an event loop.
    """

    def __init__(
        self,
        log: logging.Logger,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._next = float("-inf")
        self._left_out = 0

    def warning(self, message: str, *args: object) -> None:
        """Log ``message % args``, or only count it if one was logged recently."""
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        more, self._left_out = self._left_out, 0
        self._next = now + self._seconds
        since = f" ({more:,} more like it since the last line)" if more else ""
        self._log.warning(message + "%s", *args, since)
