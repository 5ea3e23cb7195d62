"""`BackendCalls`: the one place where a backend's failures become counted misses.

Only what the backend itself raises is translated. An exception raised by kvkeep's own code, even in
a callback that the backend calls, passes unchanged: it is our bug, not the backend's failure, and
no circuit breaker is charged for it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.tiers.breaker import KINDS, Breaker
from kvkeep.store.tiers.loss_log import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.store.backends import Backend
    from kvkeep.store.tiers.breaker import Kind, State
    from kvkeep.store.tiers.counters import TierCounters
    from kvkeep.store.tiers.loss_log import LossKind

__all__ = ["BackendCall", "BackendCalls"]

_LOG = logging.getLogger("kvkeep.tiers")
_READING: frozenset[Kind | None] = frozenset(("lookup", "read", "list"))
_SERVING: frozenset[Kind] = frozenset(("lookup", "read", "write"))
_UNBOUNDED: frozenset[Kind | None] = frozenset(("list", "flush"))
"""Calls whose work grows with what the backend holds: taking long is no failure."""
_WORST: tuple[State, ...] = ("closed", "trying", "open")
_MOST_PARTS = 256  # parts of a backend with breakers; cluster nodes come and go
_GONE_S = 120.0  # seconds without a call after which a failed part counts as gone

P = ParamSpec("P")
R = TypeVar("R")


class BackendCalls:
    """Times, counts and guards the calls of one tier to its backend.

    Write each call as ``with calls.to("get", "read", part) as call: record = backend.get(…)`` with
    nothing else in the block. Exceptions of the backend are swallowed and counted: set a default
    result before, and check ``call.failed`` after. `OutOfRoom` is a result and passes.

    Each kind of call to each part of the backend has a `Breaker`, made at first use. One of a
    failed part that is no longer called, such as a node that left its cluster, is forgotten.

    Thread safety: all methods. Cost: a lookup in a dict.

    Attributes:
        limit, pause: see `Breaker`; a change applies to breakers made afterwards.
        last_failure: time and reason of the last read that failed because of this tier.
    """

    def __init__(
        self, name: str, backend: Backend, counters: TierCounters, *, limit: int, pause: float
    ) -> None:
        self.name = name
        self.backend = backend
        self.limit = limit
        self.pause = pause
        self.last_failure: Loss | None = None
        self.counters = counters
        self.running: dict[BackendCall, None] = {}
        """Calls that have not returned yet."""
        self._lock = threading.Lock()  # of adding and forgetting breakers
        self._breakers: dict[tuple[Kind, str], Breaker] = {}
        self._ever_opened = False  # until then no breaker need be checked
        self._opened_before = 0  # `opened` of all forgotten breakers

    # --- calls -----------------------------------------------------------------------------------

    def to(self, method: str, kind: Kind | None = None, part: str = "") -> BackendCall:
        """Return the guard for one call of the backend's ``method``.

        ``kind`` selects the circuit breaker, None for calls that have none. Call `allowed` first.
        """
        return BackendCall(self, method, kind, part)

    def allowed(self, kind: Kind, part: str = "") -> bool:
        """Whether the breaker lets such a call through now; counts it as skipped if not."""
        allowed = self.breaker(kind, part).allows()
        if not allowed:
            self.counters.count(skipped_calls=1)
        return allowed

    def by_part(self, blocks: Sequence[bytes]) -> dict[str, list[bytes]]:
        """Group ``blocks`` by the part of the backend that holds them."""
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
            why = f"{call.method} takes longer than {timeout:g} s"
            self.breaker(call.kind, call.part).failed(why)

    def note_failure(self, what: LossKind, detail: str) -> None:
        """Record time and reason of a read that failed because of this tier."""
        self.last_failure = Loss(self.name, what, time.time(), detail)

    # --- breakers --------------------------------------------------------------------------------

    def breaker(self, kind: Kind, part: str = "") -> Breaker:
        """Return the breaker of one kind of call to one part of the backend."""
        breaker = self._breakers.get((kind, part))
        return breaker if breaker is not None else self._new_breaker(kind, part)

    @property
    def quiet(self) -> bool:
        """Whether no call is running and no breaker ever opened: the fast path of checks."""
        return not (self.running or self._ever_opened)

    def blocks(self, kind: Kind, part: str = "") -> bool:
        """Whether such a call is not allowed now; starts no trial."""
        breaker = self._breakers.get((kind, part)) if self._ever_opened else None
        return breaker is not None and breaker.blocks

    def any_blocks(self, *kinds: Kind) -> bool:
        """Whether any of these kinds of call is not allowed to some part now."""
        return self._ever_opened and any(
            breaker.blocks for (kind, _), breaker in list(self._breakers.items()) if kind in kinds
        )

    @property
    def state(self) -> State:
        """The worst state of lookups, reads and writes, without which a tier is of no use."""
        return _worst(breaker.state for (kind, _), breaker in self._current() if kind in _SERVING)

    @property
    def opened(self) -> int:
        """How often breakers have opened."""
        with self._lock:
            return self._opened_before + sum(each.opened for each in self._breakers.values())

    def kinds(self) -> dict[str, str]:
        """Return the worst state of each kind of call, over all parts."""
        current = self._current()
        return {
            kind: _worst(each.state for (of, _), each in current if of == kind) for kind in KINDS
        }

    def parts(self) -> dict[str, str]:
        """Return the worst state of each part that has a breaker that is not closed."""
        states: dict[str, State] = {}
        for (_, part), breaker in self._current():
            state = breaker.state
            if part and state != "closed":
                states[part] = _worst((state, states.get(part, "closed")))
        return dict(states)

    def _current(self) -> list[tuple[tuple[Kind, str], Breaker]]:
        """Forget the breakers of parts that are gone; return the others."""
        with self._lock:
            for mark, breaker in list(self._breakers.items()):
                if mark[1] and breaker.unused > _GONE_S:
                    self._forget(mark)
            return list(self._breakers.items())

    def _new_breaker(self, kind: Kind, part: str) -> Breaker:
        name = f"{self.name}: {kind}" + (f" of {part}" if part else "")
        made = Breaker(name, limit=self.limit, pause=self.pause, opening=self._note_opened)
        with self._lock:
            if len(self._breakers) >= _MOST_PARTS * len(KINDS):
                # Forget half of them at once: closed ones first, then the oldest.
                marks = sorted(
                    self._breakers, key=lambda mark: self._breakers[mark].state != "closed"
                )
                for mark in marks[: len(marks) // 2]:
                    self._forget(mark)
            return self._breakers.setdefault((kind, part), made)

    def _note_opened(self) -> None:
        self._ever_opened = True

    def _forget(self, mark: tuple[Kind, str]) -> None:
        """Forget a breaker, under the lock, but keep its count in `opened`."""
        self._opened_before += self._breakers.pop(mark).opened


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

    def __init__(self, calls: BackendCalls, method: str, kind: Kind | None, part: str) -> None:
        self._calls = calls
        self.method = method
        self.kind = kind
        self.part = part
        self.failed = False
        self.decisive = True
        self.due = self._started = 0.0
        self._ours: BaseException | None = None

    def callback(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a callback for the backend, so that its exceptions pass unchanged."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
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
        breaker = None if self.kind is None else calls.breaker(self.kind, self.part)
        full = isinstance(error, OutOfRoom) and self.method == "put"
        ours = self._ours
        if error is None or full or ours is not None:
            took, timeout = time.monotonic() - self._started, calls.backend.timeout
            if breaker is None:
                pass
            elif took > timeout and self.kind not in _UNBOUNDED:
                breaker.failed(f"{self.method} took {took:.1f} s")
            elif error is None and self.decisive:
                breaker.succeeded()
            else:
                breaker.undecided()
            if ours is not None and error is not ours:
                raise ours  # the backend replaced it by an exception of its own type
            return False
        self.failed = True
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            if breaker is not None:
                breaker.undecided()
            return False
        calls.counters.count(errors=1)
        if self.kind in _READING:
            calls.note_failure("unavailable", f"{self.method} failed: {error}")
        if breaker is not None:
            breaker.failed(f"{self.method}: {error}")
        if isinstance(error, BackendFailed | OSError):
            _LOG.info("tier %s: %s failed: %s", calls.name, self.method, error)
        else:
            what = type(calls.backend).__name__
            _LOG.error("tier %s: a bug in %s.%s", calls.name, what, self.method, exc_info=error)
        return isinstance(error, Exception)  # do not swallow a native library's panic


def _worst(states: Iterable[State]) -> State:
    return max(states, key=_WORST.index, default="closed")
