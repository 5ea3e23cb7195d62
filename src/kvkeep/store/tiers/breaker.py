"""`Breaker`: stops calls to a backend for a while after repeated failures.

Each kind of call has a separate breaker, because backends fail by kind. A server can answer lookups
while every read hangs; a directory can be readable and not writable; a bucket can refuse deletion.
A call that succeeds says nothing about calls of another kind, so it must not close their breaker.

    =========  ==================================  =============================================
    kind       calls of the backend                while the breaker is open
    =========  ==================================  =============================================
    lookup     ``sizes``                           no block is found or read there
    read       ``get``                             no block is found or read there
    write      ``put``, and ``sizes`` before it    no block is written there
    delete     ``delete``, ``quarantine``          `Tier.remove` reports a failure
    list       ``list``                            blocks of other writers are found by lookups
    touch      ``touch``                           times of use are not recorded there
    flush      ``flush``                           `Tier.flush` returns False
    =========  ==================================  =============================================

For each kind, each part of a backend (`kvkeep.store.backends.Backend.part`: a node of a cluster)
has a separate breaker: a node that is down does not stop the others.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "Breaker", "Kind", "State"]

_LOG = logging.getLogger("kvkeep.tiers")

Kind = Literal["lookup", "read", "write", "delete", "list", "touch", "flush"]
"""A kind of call; see the table above."""
State = Literal["closed", "open", "trying"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LONGEST_PAUSE_S = 60.0


class Breaker:
    """Opens after ``limit`` failures in a row; then allows a single trial call after each pause.

    Closed: every call is allowed. Open: no call is, for ``pause`` seconds at first and twice as
    long after each failed trial, a minute at most. Then one trial call is allowed; if it
    succeeds, the breaker closes. If it never returns, another is allowed after the same pause.

    Thread safety: all methods. Cost: below a microsecond.
    """

    def __init__(
        self,
        name: str,
        *,
        limit: int = 3,
        pause: float = 1.0,
        opening: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self._opening = opening
        self.opened = 0
        self._limit = limit
        self._first_pause = pause
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = pause
        self._until: float | None = None  # open until then; None: closed
        self._trying = False

    @property
    def state(self) -> State:
        """The state: "closed", "open", or "trying" while a trial call is running."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "trying" if self._trying else "open"

    def allows(self) -> bool:
        """Whether a call may be made now; the caller must report the outcome if so."""
        with self._lock:
            if self._until is None:
                return True
            now = time.monotonic()
            if now < self._until:
                return False
            self._trying = True
            self._until = now + self._pause  # this trial may hang: then allow another
            return True

    @property
    def blocks(self) -> bool:
        """Whether a call is not allowed now; unlike `allows`, this starts no trial."""
        until = self._until
        return until is not None and time.monotonic() < until

    @property
    def unused(self) -> float:
        """Seconds for which a trial call has been allowed and none was made; 0 while closed."""
        until = self._until
        return 0.0 if until is None else max(0.0, time.monotonic() - until)

    def succeeded(self) -> None:
        """Record that a call succeeded."""
        if self._until is None and not self._failures:
            return  # the usual case, without the lock: nothing would change
        with self._lock:
            again = self._until is not None
            self._until = None
            self._trying = False
            self._failures = 0
            self._pause = self._first_pause
        if again:
            _LOG.info("tier %s: circuit breaker closed", self.name)

    def undecided(self) -> None:
        """Record a call that showed neither success nor failure: the next call is the trial."""
        if self._until is None:
            return
        with self._lock:
            if self._trying:
                self._trying = False
                self._until = time.monotonic()

    def failed(self, why: object) -> None:
        """Record that a call failed, or took too long."""
        with self._lock:
            self._failures += 1
            if self._until is not None:
                if not self._trying and time.monotonic() < self._until:
                    return  # a call that began before the breaker opened
                self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
            elif self._failures < self._limit:
                return
            self._trying = False
            self._until = time.monotonic() + self._pause
            self.opened += 1
            pause = self._pause
        if self._opening is not None:
            self._opening()
        _LOG.warning("tier %s: circuit breaker open for %.0f s: %s", self.name, pause, why)
