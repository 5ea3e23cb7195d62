"""`BackendCalls`: the one place where a backend's failures become counted misses.

Only what the backend itself raises is translated. An exception raised by kvkeep's own code, even in
a callback that the backend calls, passes unchanged: it is our bug, not the backend's failure, and
no circuit breaker is charged for it.

A circuit breaker opens after a few failures in a row, and stops calls for a while: a second at
first, and twice as long after each failed trial, a minute at most. Then a single trial call is
allowed; if it succeeds, the breaker closes. If it never returns, another is allowed after the same
pause. Each kind of call has a separate breaker, because backends fail by kind. A server can answer
lookups while every read hangs; a directory can be readable and not writable; a bucket can refuse
deletion. A call that succeeds says nothing about calls of another kind, so it must not close their
breaker.

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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, get_args

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.backends import Backend
from kvkeep.store.tiers.loss_log import Loss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.store.backends import Room
    from kvkeep.store.tiers.counters import TierCounters
    from kvkeep.store.tiers.loss_log import LossKind

__all__ = ["BackendCall", "BackendCalls"]

_LOG = logging.getLogger("kvkeep.tiers")

Kind = Literal["lookup", "read", "write", "delete", "list", "touch", "flush"]
"""A kind of call; see the table above."""
State = Literal["closed", "open", "trying"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_READING: frozenset[Kind | None] = frozenset(("lookup", "read", "list"))
_SERVING: frozenset[Kind] = frozenset(("lookup", "read", "write"))
_UNBOUNDED: frozenset[Kind | None] = frozenset(("list", "flush"))
"""Calls whose work grows with what the backend holds: taking long is no failure."""
_WORST: tuple[State, ...] = ("closed", "trying", "open")
_LONGEST_PAUSE_S = 60.0
_MOST_FAILING = 2048  # breakers; nodes of a cluster come and go
_GONE_S = 120.0  # seconds without a call after which a failed part counts as gone


@dataclass(slots=True)
class _Breaker:
    """Failures of one kind of call to one part, since such a call succeeded last."""

    pause: float
    failures: int = 0
    until: float | None = None
    """Open until then, in monotonic seconds; None: too few failures to be open."""
    trying: bool = False

    @property
    def state(self) -> State:
        return "closed" if self.until is None else "trying" if self.trying else "open"


class BackendCalls:
    """Times, counts and guards the calls of one tier to its backend.

    Write each call as ``with calls.to("get", "read", part) as call: record = backend.get(…)`` with
    nothing else in the block. Exceptions of the backend are swallowed and counted: set a default
    result before, and check ``call.failed`` after. `OutOfRoom` is a result and passes.

    Thread safety: all methods. Cost: below a microsecond, and no lock while no call fails.

    Attributes:
        limit: failures in a row that open a breaker.
        pause: seconds that it stays open at first.
        opened: how often breakers have opened.
        last_failure: time and reason of the last read that failed because of this tier.
    """

    def __init__(
        self, name: str, backend: Backend, counters: TierCounters, *, limit: int, pause: float
    ) -> None:
        self.name = name
        self.backend = backend
        self.limit = limit
        self.pause = pause
        self.opened = 0
        self.last_failure: Loss | None = None
        self.counters = counters
        self.running: dict[BackendCall, None] = {}
        """Calls that have not returned yet."""
        self.to = partial(BackendCall, self)
        """The guard for one call: its method, and the kind of its breaker, None for no breaker."""
        self._lock = threading.Lock()  # of `failing`
        self.failing: dict[tuple[Kind, str], _Breaker] = {}
        """The breakers of calls that failed; the others are closed."""

    # --- calls -----------------------------------------------------------------------------------

    def allowed(self, kind: Kind, part: str = "") -> bool:
        """Whether such a call may be made now, perhaps as a trial; counts it as skipped if not.

        Report the outcome if so; `BackendCall` does.
        """
        if not self.failing:
            return True
        with self._lock:
            breaker = self.failing.get((kind, part))
            if breaker is None or breaker.until is None:
                return True
            now = time.monotonic()
            if now >= breaker.until:
                breaker.trying = True
                breaker.until = now + breaker.pause  # this trial may hang: then allow another
                return True
        self.counters.count(skipped_calls=1)
        if kind in _READING:
            self.note_failure("unavailable", "breaker")
        return False

    def by_part(self, blocks: Sequence[bytes]) -> dict[str, list[bytes]]:
        """Group ``blocks`` by the part of the backend that holds them."""
        if type(self.backend).part is Backend.part:
            return {"": list(blocks)} if blocks else {}
        parts: dict[str, list[bytes]] = {}
        for block in blocks:
            parts.setdefault(self.backend.part(block), []).append(block)
        return parts

    def report_hung(self, *kinds: Kind) -> None:
        """Report a failure to the breaker of each call of these kinds that exceeds the timeout.

        Each call is reported once per elapsed timeout. This is needed because a call that never
        returns reports nothing itself.
        """
        if not self.running:
            return
        timeout, now = self.backend.timeout, time.monotonic()
        for call in list(self.running):
            if call.kind is None or call.kind not in kinds or call.due >= now:
                continue
            call.due = now + timeout
            if call.kind == "flush" and now - self.backend.last_progress <= timeout:
                continue  # slow, but it makes progress
            self.failed(call.kind, call.part, f"{call.method} takes longer than {timeout:g} s")

    def note_failure(self, what: LossKind, detail: str) -> None:
        """Record time and reason of a read that failed because of this tier."""
        self.last_failure = Loss(self.name, what, time.time(), detail)

    # --- outcomes --------------------------------------------------------------------------------

    def succeeded(self, kind: Kind, part: str = "") -> None:
        """Record that such a call succeeded."""
        if not self.failing:
            return
        with self._lock:
            breaker = self.failing.pop((kind, part), None)
        if breaker is not None and breaker.until is not None:
            _LOG.info("tier %s: circuit breaker closed", self._named(kind, part))

    def undecided(self, kind: Kind, part: str = "") -> None:
        """Record a call that showed neither success nor failure: the next call is the trial."""
        if not self.failing:
            return
        with self._lock:
            breaker = self.failing.get((kind, part))
            if breaker is not None and breaker.trying:
                breaker.trying = False
                breaker.until = time.monotonic()

    def failed(self, kind: Kind, part: str, why: object) -> None:
        """Record that such a call failed, or took too long."""
        with self._lock:
            now = time.monotonic()
            breaker = self.failing.get((kind, part))
            if breaker is None:
                if len(self.failing) >= _MOST_FAILING:
                    self.failing.pop(next(iter(self.failing)))
                breaker = self.failing[kind, part] = _Breaker(self.pause)
            breaker.failures += 1
            if breaker.until is not None:
                if not breaker.trying and now < breaker.until:
                    return  # a call that began before the breaker opened
                breaker.pause = min(2 * breaker.pause, _LONGEST_PAUSE_S)
            elif breaker.failures < self.limit:
                return
            breaker.trying = False
            breaker.until = now + breaker.pause
            self.opened += 1
            pause = breaker.pause
        name = self._named(kind, part)
        _LOG.warning("tier %s: circuit breaker open for %.0f s: %s", name, pause, why)

    def _named(self, kind: Kind, part: str) -> str:
        return f"{self.name}: {kind}" + (f" of {part}" if part else "")

    # --- breakers: they start no trial -----------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether no call is running and none failed: the fast path of checks."""
        return not (self.running or self.failing)

    def blocks(self, kind: Kind, part: str = "") -> bool:
        """Whether such a call is not allowed now."""
        breaker = self.failing.get((kind, part)) if self.failing else None
        until = None if breaker is None else breaker.until
        return until is not None and time.monotonic() < until

    def any_blocks(self, *kinds: Kind) -> bool:
        """Whether any of these kinds of call is not allowed to some part now."""
        return bool(self.failing) and any(
            kind in kinds and self.blocks(kind, part) for kind, part in list(self.failing)
        )

    @property
    def state(self) -> State:
        """The worst state of lookups, reads and writes, without which a tier is of no use."""
        return _worst(state for (kind, _), state in self._states() if kind in _SERVING)

    def kinds(self) -> dict[str, str]:
        """Return the worst state of each kind of call, over all parts."""
        states = self._states()
        return {kind: _worst(state for (of, _), state in states if of == kind) for kind in _KINDS}

    def parts(self) -> dict[str, str]:
        """Return the worst state of each part that has a breaker that is not closed."""
        states = [(part, state) for (_, part), state in self._states() if part]
        failing = {part for part, state in states if state != "closed"}
        return {part: _worst(state for of, state in states if of == part) for part in failing}

    def _states(self) -> list[tuple[tuple[Kind, str], State]]:
        """Return the states of failing calls; forget those of parts that are called no more."""
        with self._lock:
            now = time.monotonic()
            for mark, breaker in list(self.failing.items()):
                if mark[1] and breaker.until is not None and now - breaker.until > _GONE_S:
                    del self.failing[mark]  # a node that left its cluster, say
            return [(mark, breaker.state) for mark, breaker in self.failing.items()]


class BackendCall:
    """One call of a backend, as a context manager.

    Attributes:
        failed: whether the backend raised.
        decisive: whether success of the call shows that its kind of call works. A call that proves
            nothing, such as a read of a missing record, does not close an open breaker.
        due: when the call counts as hung, in seconds of the monotonic clock.
    """

    __slots__ = (
        "_calls", "_ours", "_started",
        "decisive", "due", "failed", "kind", "method", "part",
    )  # fmt: skip

    def __init__(
        self, calls: BackendCalls, method: str, kind: Kind | None = None, part: str = ""
    ) -> None:
        self._calls = calls
        self.method = method
        self.kind = kind
        self.part = part
        self.failed = False
        self.decisive = True
        self.due = self._started = 0.0
        self._ours: BaseException | None = None

    def callback(self, room: Room) -> Room:
        """Wrap a callback for the backend, so that its exceptions pass unchanged."""

        def guarded(size: int) -> memoryview:
            try:
                return room(size)
            except BaseException as error:
                self._ours = error
                raise

        return guarded

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self.due = self._started + self._calls.backend.timeout
        self._calls.running[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        calls = self._calls
        del calls.running[self]
        full = isinstance(error, OutOfRoom) and self.method == "put"
        ours = self._ours
        if error is None or full or ours is not None:
            took, timeout = time.monotonic() - self._started, calls.backend.timeout
            if self.kind is None:
                pass
            elif took > timeout and self.kind not in _UNBOUNDED:
                calls.failed(self.kind, self.part, f"{self.method} took {took:.1f} s")
            elif error is None and self.decisive:
                calls.succeeded(self.kind, self.part)
            else:
                calls.undecided(self.kind, self.part)
            if ours is not None and error is not ours:
                raise ours  # the backend replaced it by an exception of its own type
            return False
        self.failed = True
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            if self.kind is not None:
                calls.undecided(self.kind, self.part)
            return False
        calls.counters.count(errors=1)
        if self.kind in _READING:
            calls.note_failure("unavailable", f"{self.method} failed: {error}")
        if self.kind is not None:
            calls.failed(self.kind, self.part, f"{self.method}: {error}")
        if isinstance(error, BackendFailed | OSError):
            _LOG.info("tier %s: %s failed: %s", calls.name, self.method, error)
        else:
            what = type(calls.backend).__name__
            _LOG.error("tier %s: a bug in %s.%s", calls.name, what, self.method, exc_info=error)
        return isinstance(error, Exception)  # do not swallow a native library's panic


def _worst(states: Iterable[State]) -> State:
    return max(states, key=_WORST.index, default="closed")
