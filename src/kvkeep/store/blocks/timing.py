"""Timing of puts and gets: one `Operation` for each call, for the log and for hooks."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Operation", "Timing"]

_LOG = logging.getLogger("kvkeep.store")


@dataclass(frozen=True, slots=True)
class Operation:
    """A put or get that has returned.

    Attributes:
        what: "put" or "get".
        asked: tokens given or requested by the caller; blocks in a `BlockStore`.
        moved: how many of these tokens this put stored, or this get returned.
        bytes: raw bytes of the tokens moved.
        seconds: duration of the call.
        tiers: ``(tier, moved)`` in order, the tiers that a get read from. A put names the first
            tier only; slower tiers are written later.
        at: when the call returned, in Unix seconds.
    """

    what: Literal["put", "get"]
    asked: int
    moved: int
    bytes: int
    seconds: float
    tiers: tuple[tuple[str, int], ...]
    at: float

    @property
    def bandwidth(self) -> float:
        """GB/s; 0 if nothing was moved."""
        return self.bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


class Timing:
    """Times the operations of one store; ``unit`` is "tokens" or "blocks".

    Thread safety: all methods. Cost: below a microsecond without hooks, with the logger
    ``kvkeep.store`` above DEBUG.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        self._hooks: tuple[Callable[[Operation], object], ...] = ()

    def watch(self, hook: Callable[[Operation], object]) -> Callable[[], None]:
        """Call ``hook`` after each operation; return a call that removes it. See `Store.watch`."""
        if not callable(hook):
            raise InvalidValue(f"hook is {told(hook)}; a function of one Operation is needed")

        def call(operation: Operation) -> None:  # a new object: one hook may be watched twice
            hook(operation)

        with self._lock:
            self._hooks = (*self._hooks, call)

        def stop() -> None:
            with self._lock:
                self._hooks = tuple(one for one in self._hooks if one is not call)

        return stop

    def begin(self) -> float:
        """Return the start time of an operation, or 0.0 if nothing is to be reported."""
        if self._hooks or _LOG.isEnabledFor(logging.DEBUG):
            return time.perf_counter()
        return 0.0

    def end(
        self,
        began: float,
        what: Literal["put", "get"],
        *,
        asked: int,
        moved: int,
        size: int,
        tiers: Sequence[tuple[str, int]],
    ) -> None:
        """Report an operation for which `begin` returned ``began``, not 0."""
        seconds = time.perf_counter() - began
        done = Operation(what, asked, moved, size, seconds, tuple(tiers), time.time())
        for hook in self._hooks:
            try:
                hook(done)
            except Exception:  # noqa: BLE001 - a hook that fails must not make a put fail
                _LOG.exception("a hook of KVStore.watch or BlockStore.watch failed")
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug(
                "%s %d of %d %s, %d bytes in %.6f s, %.2f GB/s, %s",
                what, moved, asked, self._unit, size, seconds, done.bandwidth,
                ", ".join(f"{name} {count}" for name, count in done.tiers) or "nowhere",
            )  # fmt: skip
