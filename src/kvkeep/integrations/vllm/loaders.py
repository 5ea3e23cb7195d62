"""Threads that load: four go on at a time, however many wait for a slow tier."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["Loaders"]

_AT_ONCE: Final = 4  # more would share one interpreter, and all end later
_MOST: Final = 32  # threads; each that waits holds a few blocks
_STALLED_S: Final = 0.05  # a load without a block for so long waits for its tier
_LONGEST_WAIT_S: Final = 60.0


class Loaders:
    """Runs loads in order, four at a time.

    A load that waits for its tier makes room for the next one: so up to 32 loads from a slow tier
    delay no load from another. Later loads then wait for one of them, or end at their deadline.

    Thread safety: all methods. Cost: a thread for each load that has begun and not ended.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST, "kvkeep load")
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._going_on: dict[object, float] = {}  # load → time of its last block

    def submit(
        self,
        load: Callable[[Callable[[], None]], None],
        *,
        until: float,
        cancelled: Callable[[], bool],
    ) -> Future[None]:
        """Begin ``load`` in its turn, at ``until`` (monotonic seconds), or if it is ``cancelled``.

        It is called with a function that it calls after each block.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
        return self._threads.submit(self._run, turn, load, until, cancelled)

    def wake(self) -> None:
        """Begin the loads that are cancelled by now."""
        with self._changed:
            self._changed.notify_all()

    def _run(
        self,
        turn: object,
        load: Callable[[Callable[[], None]], None],
        until: float,
        cancelled: Callable[[], bool],
    ) -> None:
        with self._changed:
            while not cancelled() and (left := until - time.monotonic()) > 0:
                first = self._waiting[0] is turn
                if first and self._has_room():
                    break
                self._changed.wait(min(left, _STALLED_S if first else _LONGEST_WAIT_S))
            self._waiting.remove(turn)
            self._going_on[turn] = time.monotonic()
            self._changed.notify_all()

        def went_on() -> None:
            self._going_on[turn] = time.monotonic()

        try:
            load(went_on)
        finally:
            with self._changed:
                del self._going_on[turn]
                self._changed.notify_all()

    def _has_room(self) -> bool:
        since = time.monotonic() - _STALLED_S
        return sum(last > since for last in self._going_on.values()) < _AT_ONCE

    def close(self, *, wait: bool) -> None:
        """Take no more loads; ``wait`` until all have ended, or drop those that have no thread."""
        self.wake()
        self._threads.shutdown(wait=wait, cancel_futures=not wait)
