"""Threads that wait for slow places, so that nobody else has to."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

_LOG = logging.getLogger("kvkeep.tiers")


class Workers:
    """A few threads and a bounded queue of jobs for them, first come, first served.

    The threads start with the first job and are daemons: a place that never answers keeps its
    thread, but neither the caller nor the end of the process. What a job costs (bytes, say) is
    counted while it waits or runs; a job that would pass ``limit`` is refused, unless it is alone.

    Thread safety: all methods.
    """

    def __init__(self, name: str, threads: int, limit: int) -> None:
        self.name = name
        self._threads = threads
        self._limit = limit
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._changed = threading.Condition()
        self._started = 0
        self._free = 0  # threads that wait for a job
        self._unfinished = 0
        self._cost = 0
        self._closed = False

    @property
    def cost(self) -> int:
        """What the jobs that wait or run cost together."""
        return self._cost

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        return self._unfinished

    def submit(self, job: Callable[[], object], cost: int = 1, wait: float = 0.0) -> bool:
        """Have ``job`` done; False, and not taken, when the queue is full or closed.

        A full queue is waited for, ``wait`` seconds at most. A job must not raise: what it raises
        is logged, and lost.
        """
        with self._changed:
            if wait and not self._has_room(cost):
                self._changed.wait_for(lambda: self._has_room(cost), wait)
            if self._closed or not self._has_room(cost):
                return False
            self._jobs.append((job, cost))
            self._unfinished += 1
            self._cost += cost
            if len(self._jobs) > self._free and self._started < self._threads:
                self._started += 1
                threading.Thread(
                    target=self._work, name=f"kvkeep {self.name} {self._started}", daemon=True
                ).start()
            self._changed.notify_all()  # some of those that wait may wait for room
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; False when that took longer than ``timeout``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout)

    def close(self, timeout: float) -> bool:
        """Do what waits, for ``timeout`` seconds, then stop; whether all was done."""
        end = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        done = self.wait(max(0.0, end - time.monotonic()))
        with self._changed:
            for _, cost in self._jobs:  # given up
                self._unfinished -= 1
                self._cost -= cost
            self._jobs.clear()
        return done

    def _has_room(self, cost: int) -> bool:
        return self._closed or not self._unfinished or self._cost + cost <= self._limit

    def _work(self) -> None:
        while True:
            with self._changed:
                self._free += 1
                while not self._jobs:
                    if self._closed:
                        self._free -= 1
                        return
                    self._changed.wait()
                self._free -= 1
                job, cost = self._jobs.popleft()
            try:
                job()
            except Exception:  # noqa: BLE001 - the thread has to live on; nothing should come here
                _LOG.exception("a job of tier %s failed", self.name)
            del job  # what it holds must not live until the next one comes
            with self._changed:
                self._unfinished -= 1
                self._cost -= cost
                self._changed.notify_all()
