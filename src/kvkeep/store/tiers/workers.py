"""`Workers`: threads that make slow backend calls, so that callers need not wait for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

_LOG = logging.getLogger("kvkeep.tiers")


_Job: TypeAlias = "tuple[Callable[[], object], int, Callable[[], object] | None]"
"""What to do, its cost, and what is called instead if it is discarded."""


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
        # thread that runs a job → when that made progress last, in monotonic seconds
        self._running: dict[int, float] = {}
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
        """Seconds for which a running job has made no progress, at most; 0 if none runs."""
        with self._changed:
            since = min(self._running.values(), default=None)
        return 0.0 if since is None else time.monotonic() - since

    def stuck(self, seconds: float) -> bool:
        """Whether the job of every thread has made no progress for longer than ``seconds``."""
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
        """Queue ``job``; return False if the queue is full or closed, or there is no thread.

        Waits for room in the queue for at most ``wait`` seconds, None: without limit. ``given_up``
        is called instead of a queued ``job`` that `close` discards. A job must not raise: an
        exception is logged and has no other effect.
        """
        with self._changed:
            has_room = self._has_room(cost)
            if not has_room and wait != 0.0:
                has_room = self._changed.wait_for(lambda: self._has_room(cost), wait)
            if self._closed or not has_room:
                return False
            if len(self._jobs) >= self._free and len(self._started) < self._threads:
                name = f"kvkeep {self.name} {len(self._started) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the process may have no more threads
                    _LOG.warning("tier %s has %d threads: %s", self.name, len(self._started), error)
                    if not self._started:
                        return False
                else:
                    self._started.append(thread)
            # Last: if Ctrl-C ended the start of a thread, the caller still has the job.
            self._jobs.append((job, cost, given_up))
            self._unfinished += 1
            self._cost += cost
            self._changed.notify_all()  # all: a single wake-up could reach a caller of `submit`
        return True

    def progress(self) -> bool:
        """Note that the job that calls this has made progress; False if it is to end: `close`."""
        self._running[threading.get_ident()] = time.monotonic()
        return not self._closed

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all jobs have ended; return False after ``timeout`` seconds."""
        with self._changed:
            return not self._unfinished or self._changed.wait_for(
                lambda: not self._unfinished, timeout
            )

    def close(self) -> None:
        """Take no more jobs, and discard those still queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            discarded = list(self._jobs)
            self._jobs.clear()
        for _, cost, given_up in discarded:
            self._finish(given_up, cost)

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
        me = threading.get_ident()
        while True:
            with self._changed:
                self._free += 1
                while not self._jobs:
                    if self._closed:
                        self._free -= 1
                        return
                    self._changed.wait()
                self._free -= 1
                work, cost, given_up = self._jobs.popleft()
                self._running[me] = time.monotonic()
            self._finish(work, cost)
            del work, given_up  # else their objects would live until the next job arrives

    def _finish(self, work: Callable[[], object] | None, cost: int) -> None:
        try:
            if work is not None:
                work()
        except BaseException:  # noqa: BLE001 - a library's panic is one; the thread has to live on
            _LOG.exception("a job of tier %s failed", self.name)
        with self._changed:
            self._running.pop(threading.get_ident(), None)
            self._unfinished -= 1
            self._cost -= cost
            self._changed.notify_all()
