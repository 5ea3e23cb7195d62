"""`RateLimitedLog`: limits the rate of warnings that clients can cause."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RateLimitedLog"]


class RateLimitedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs each warning at most once in ``seconds``, with the number left out since.

    Warnings are told apart by their message before its arguments are filled in. Other levels are
    not limited. Thread safety: none; for an event loop.
    """

    def __init__(
        self,
        log: logging.Logger,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(log)
        self._seconds = seconds
        self._clock = clock
        self._next: dict[object, float] = {}  # by message
        self._left_out: dict[object, int] = {}

    @property
    def level(self) -> int:
        """The level of the logger, which uvicorn reads."""
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Log ``msg % args``; only count a warning if the same was logged recently."""
        if level == logging.WARNING:
            now = self._clock()
            if now < self._next.get(msg, now):
                self._left_out[msg] = self._left_out.get(msg, 0) + 1
                return
            self._next[msg] = now + self._seconds
            more = self._left_out.pop(msg, 0)
            if more:
                msg = f"{msg} ({more:,} more like it since the last line)"
        super().log(level, msg, *args, **options)
