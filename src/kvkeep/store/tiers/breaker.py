"""Circuit breakers: stop calls to a backend for a while after repeated failures.

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
    from collections.abc import Callable, Iterable

__all__ = ["CALLS", "SERVING", "Breaker", "Breakers", "Call", "State"]

_LOG = logging.getLogger("kvkeep.tiers")

Call = Literal["lookup", "read", "write", "delete", "list", "touch", "flush"]
"""A kind of call; see the table above."""
State = Literal["closed", "open", "trying"]
CALLS: tuple[Call, ...] = get_args(Call)
SERVING: frozenset[Call] = frozenset(("lookup", "read", "write"))
_WORST: tuple[State, ...] = ("closed", "trying", "open")
_MOST_PARTS = 256  # parts of a backend with breakers; cluster nodes come and go
_GONE_S = 120.0  # seconds without a call after which a failed part counts as gone
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


class Breakers:
    """The breakers of one tier: one for each kind of call and each part of the backend.

    They are made at first use. A failed part that is no longer called, such as a node that left its
    cluster, is forgotten. The number of parts is bounded.

    Thread safety: all methods. Cost: a lookup in a dict.

    Attributes:
        limit, pause: see `Breaker`; a change applies to breakers made afterwards.
        ever_opened: whether any breaker ever opened; until then no breaker need be checked.
    """

    def __init__(self, name: str, *, limit: int = 3, pause: float = 1.0) -> None:
        self.name = name
        self.limit = limit
        self.pause = pause
        self.ever_opened = False
        self._lock = threading.Lock()
        self._all: dict[tuple[Call, str], Breaker] = {}
        self._forgotten = 0  # `opened` of all forgotten breakers

    def of(self, call: Call, part: str = "") -> Breaker:
        """Return the breaker of one kind of call to one part."""
        found = self._all.get((call, part))
        return found if found is not None else self._make(call, part)

    def blocks(self, call: Call, part: str = "") -> bool:
        """Whether such a call is not allowed now; starts no trial."""
        found = self._all.get((call, part)) if self.ever_opened else None
        return found is not None and found.blocks

    def any_blocks(self, *calls: Call) -> bool:
        """Whether any of these kinds of call is not allowed to some part now."""
        return self.ever_opened and any(
            one.blocks for (call, _), one in list(self._all.items()) if call in calls
        )

    @property
    def state(self) -> State:
        """The worst state of the calls in `SERVING`, without which a tier is of no use."""
        return _worst(one.state for (call, _), one in self._current() if call in SERVING)

    @property
    def opened(self) -> int:
        """How often breakers of this tier have opened."""
        with self._lock:
            return self._forgotten + sum(one.opened for one in self._all.values())

    def calls(self) -> dict[str, str]:
        """Return the worst state of each kind of call, over all parts."""
        found = self._current()
        return {call: _worst(one.state for (of, _), one in found if of == call) for call in CALLS}

    def parts(self) -> dict[str, str]:
        """Return the worst state of each part that has a breaker that is not closed."""
        states: dict[str, State] = {}
        for (_, part), one in self._current():
            state = one.state
            if part and state != "closed":
                states[part] = _worst((state, states.get(part, "closed")))
        return dict(states)

    def _current(self) -> list[tuple[tuple[Call, str], Breaker]]:
        """Forget the breakers of parts that are gone; return the others."""
        with self._lock:
            for mark, one in list(self._all.items()):
                if mark[1] and one.unused > _GONE_S:
                    self._forget(mark)
            return list(self._all.items())

    def _make(self, call: Call, part: str) -> Breaker:
        name = f"{self.name}: {call}" + (f" of {part}" if part else "")
        made = Breaker(name, limit=self.limit, pause=self.pause, opening=self._note_opened)
        with self._lock:
            if len(self._all) >= _MOST_PARTS * len(CALLS):
                # Forget half of them at once: closed ones first, then the oldest.
                marks = sorted(self._all, key=lambda mark: self._all[mark].state != "closed")
                for mark in marks[: len(marks) // 2]:
                    self._forget(mark)
            return self._all.setdefault((call, part), made)

    def _note_opened(self) -> None:
        self.ever_opened = True

    def _forget(self, mark: tuple[Call, str]) -> None:
        """Forget a breaker, under the lock, but keep its count in `opened`."""
        self._forgotten += self._all.pop(mark).opened


def _worst(states: Iterable[State]) -> State:
    return max(states, key=_WORST.index, default="closed")
