"""`BackendCalls`: the one place where a backend's failures become counted misses.

Only what the backend itself raises is translated. An exception raised by kvkeep's own code, even in
a callback that the backend calls, passes unchanged: it is our bug, not the backend's failure, and
no circuit breaker is charged for it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.store.tiers.loss_log import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends import Backend
    from kvkeep.store.tiers.breaker import Breaker, Breakers
    from kvkeep.store.tiers.breaker import Call as Kind
    from kvkeep.store.tiers.counters import TierCounters
    from kvkeep.store.tiers.loss_log import LossKind

__all__ = ["BackendCall", "BackendCalls"]

_LOG = logging.getLogger("kvkeep.tiers")
_READING: frozenset[Kind | None] = frozenset(("lookup", "read", "list"))
_UNBOUNDED: frozenset[Kind | None] = frozenset(("list", "flush"))
"""Calls whose work grows with what the backend holds: taking long is no failure."""

P = ParamSpec("P")
R = TypeVar("R")


class BackendCalls:
    """Times, counts and guards the calls of one tier to its backend.

    Write each call as ``with calls.to("get", "read", part) as call: record = backend.get(…)`` with
    nothing else in the block. Exceptions of the backend are swallowed and counted: set a default
    result before, and check ``call.failed`` after. `OutOfRoom` is a result and passes.

    Thread safety: all methods.

    Attributes:
        last_failure: time and reason of the last read that failed because of this tier.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        breakers: Breakers,
        counters: TierCounters,
    ) -> None:
        self.name = name
        self.backend = backend
        self.breakers = breakers
        self.counters = counters
        self.last_failure: Loss | None = None
        self.running: dict[BackendCall, None] = {}
        """Calls that have not returned yet."""

    def allowed(self, kind: Kind, part: str = "") -> bool:
        """Whether the breaker lets such a call through now; counts it as skipped if not."""
        if self.breaker(kind, part).allows():
            return True
        self.counters.count(skipped_calls=1)
        return False

    def to(self, method: str, kind: Kind | None = None, part: str = "") -> BackendCall:
        """Return the guard for one call of the backend's ``method``.

        ``kind`` selects the circuit breaker, None for calls that have none. Call `allowed` first.
        """
        return BackendCall(self, method, kind, part)

    def breaker(self, kind: Kind, part: str = "") -> Breaker:
        """Return the breaker of one kind of call to one part of the backend."""
        return self.breakers.of(kind, part)

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

    @property
    def quiet(self) -> bool:
        """Whether no call is running and no breaker ever opened: the fast path of checks."""
        return not (self.running or self.breakers.ever_opened)

    def note_failure(self, what: LossKind, detail: str) -> None:
        """Record time and reason of a read that failed because of this tier."""
        self.last_failure = Loss(self.name, what, time.time(), detail)

    def by_part(self, blocks: Sequence[bytes]) -> dict[str, list[bytes]]:
        """Group ``blocks`` by the part of the backend that holds them."""
        parts: dict[str, list[bytes]] = {}
        for block in blocks:
            parts.setdefault(self.backend.part(block), []).append(block)
        return parts


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
        if error is None or full or self._ours is not None:
            self._returned(breaker, worked=error is None and self.decisive)
            if self._ours is not None and error is not self._ours:
                raise self._ours  # the backend replaced it by an exception of its own type
            return False
        self.failed = True
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            if breaker is not None:
                breaker.undecided()
            return False
        self._raised(breaker, error)
        return isinstance(error, Exception)  # do not swallow a native library's panic

    def _returned(self, breaker: Breaker | None, *, worked: bool) -> None:
        if breaker is None:
            return
        timeout = self._calls.backend.timeout
        took = time.monotonic() - self._started
        if took > timeout and self.kind not in _UNBOUNDED:
            breaker.failed(f"{self.method} took {took:.1f} s")
        elif worked:
            breaker.succeeded()
        else:
            breaker.undecided()

    def _raised(self, breaker: Breaker | None, error: BaseException) -> None:
        calls = self._calls
        self.failed = True
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
