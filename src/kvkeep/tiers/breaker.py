"""The circuit breaker: who fails again and again is left alone for a while."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Breaker"]

_LOG = logging.getLogger("kvkeep.tiers")


class Breaker:
    """Opens after ``limit`` failures in a row and lets a single call through now and then.

    Closed: everything passes. Open: nothing does, for ``pause`` seconds at first and twice as long
    after each failed try, ``longest`` at most. Then one call is let through; if it succeeds the
    breaker closes. One that never comes back is followed by another after the same pause.

    Thread safety: all methods. Cost: below a microsecond.
    """

    def __init__(
        self,
        name: str,
        *,
        limit: int = 3,
        pause: float = 1.0,
        longest: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.opened = 0
        self._limit = limit
        self._first_pause = pause
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = pause
        self._until: float | None = None  # open until then; None: closed
        self._trying = False

    @property
    def state(self) -> Literal["closed", "open", "trying"]:
        """Whether calls pass, do not, or one is on its way to find out."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "trying" if self._trying else "open"

    def allows(self) -> bool:
        """Whether a call may be made now; who is let through must report how it went."""
        with self._lock:
            if self._until is None:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._trying = True
            self._until = now + self._pause  # it may hang: then somebody else has to try
            return True

    @property
    def blocks(self) -> bool:
        """Whether a call could not be made now; asks without making one."""
        until = self._until
        return until is not None and self._clock() < until

    def succeeded(self) -> None:
        """A call did its work."""
        if self._until is None and not self._failures:
            return  # the usual case, without the lock: nothing would change
        with self._lock:
            again = self._until is not None
            self._until = None
            self._trying = False
            self._failures = 0
            self._pause = self._first_pause
        if again:
            _LOG.info("tier %s answers again", self.name)

    def failed(self, why: object) -> None:
        """A call failed, or took too long."""
        with self._lock:
            self._failures += 1
            if self._until is not None:
                if not self._trying and self._clock() < self._until:
                    return  # began before it opened
                self._pause = min(2 * self._pause, self._longest)
            elif self._failures < self._limit:
                return
            self._trying = False
            self._until = self._clock() + self._pause
            self.opened += 1
            pause = self._pause
        _LOG.warning("tier %s is left alone for %.0f s: %s", self.name, pause, why)
