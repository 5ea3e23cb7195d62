"""`Workers`: threads that make slow backend calls, so that callers need not wait for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

_LOG = logging.getLogger("kvkeep.tiers")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Callable[[], object]
    cost: int
    given_up: Callable[[], object] | None


class Workers:
    """A few threads and a bounded queue of jobs for them, first come, first served.

    The threads start with the first job and are daemons: a backend that never answers blocks its
    thread, but neither the caller nor the exit of the process. Each job has a cost (bytes, say),
    counted while the job waits or runs. A job with which the sum would exceed ``limit`` is refused,
    unless there is no other job.

    Thread safety: all methods.
    """

    def __init__(self, name: str, threads: int, limit: int) -> None:
        self.name = name
        self._threads = threads
        self.limit = limit
        self._jobs: deque[_Job] = deque()
        self._running: dict[_Job, float] = {}  # job → start, in seconds of the monotonic clock
        self._changed = threading.Condition()
        self._started: list[threading.Thread] = []
        self._free = 0  # threads that wait for a job
        self._unfinished = 0
        self._cost = 0
        self._closed = False

    @property
    def cost(self) -> int:
        """Total cost of the jobs that wait or run."""
        return self._cost

    @property
    def longest(self) -> float:
        """Seconds for which the longest-running job has run; 0 if none runs."""
        with self._changed:
            since = min(self._running.values(), default=None)
        return 0.0 if since is None else time.monotonic() - since

    def stuck(self, seconds: float) -> bool:
        """Whether every thread has been busy with one job for longer than ``seconds``."""
        if len(self._running) < self._threads:
            return False
        with self._changed:
            last = max(self._running.values(), default=float("inf"))
        return time.monotonic() - last > seconds

    def submit(
        self,
        job: Callable[[], object],
        cost: int = 1,
        wait: float | None = 0.0,
        given_up: Callable[[], object] | None = None,
    ) -> bool:
        """Queue ``job``; return False if the queue is full or closed.

        Waits for room in the queue for at most ``wait`` seconds, None: without limit. ``given_up``
        is called instead of a queued ``job`` that `close` discards. A job must not raise: an
        exception is logged and has no other effect.
        """
        with self._changed:
            if wait != 0.0 and not self._has_room(cost):
                self._changed.wait_for(lambda: self._has_room(cost), wait)
            if self._closed or not self._has_room(cost):
                return False
            self._jobs.append(_Job(job, cost, given_up))
            self._unfinished += 1
            self._cost += cost
            if len(self._jobs) > self._free and len(self._started) < self._threads:
                name = f"kvkeep {self.name} {len(self._started) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._started.append(thread)
            self._changed.notify_all()  # all: a single wake-up could reach a caller of `submit`
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all jobs have ended; return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout)

    def close(self) -> None:
        """Take no more jobs, and discard those still queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            discarded = list(self._jobs)
            self._jobs.clear()
        for job in discarded:
            self._finish(job, job.given_up)

    def join(self, timeout: float) -> bool:
        """After `close`: wait for the threads to end; False if jobs run on after ``timeout``."""
        if not self.wait(timeout):
            return False
        for thread in self._started:
            thread.join()  # does not block: no job is left
        return True

    def _has_room(self, cost: int) -> bool:
        return self._closed or not self._unfinished or self._cost + cost <= self.limit

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
                job = self._jobs.popleft()
                self._running[job] = time.monotonic()
            self._finish(job, job.work)
            del job  # else its objects would live until the next job arrives

    def _finish(self, job: _Job, work: Callable[[], object] | None) -> None:
        try:
            if work is not None:
                work()
        except BaseException:  # noqa: BLE001 - a library's panic is one; the thread has to live on
            _LOG.exception("a job of tier %s failed", self.name)
        with self._changed:
            self._running.pop(job, None)
            self._unfinished -= 1
            self._cost -= job.cost
            self._changed.notify_all()
