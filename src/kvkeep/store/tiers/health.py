"""`TierHealth`: whether a tier can be read and written now, and the reason if not."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvkeep.store.tiers.loss_log import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.workers import Workers

__all__ = ["TierHealth", "query_sizes"]

_SLOW_READ = 0.05  # seconds; a read that takes longer is slow for any backend
_MOSTLY = 0.5  # share of a request's time; a read that takes more of it delayed the request


class TierHealth:
    """Judges a tier by its circuit breakers, its running calls, and its threads.

    Thread safety: all methods. No I/O: the backend is not called.
    """

    def __init__(self, calls: BackendCalls, reading: Workers, writing: Workers) -> None:
        self._calls = calls
        self._backend = calls.backend
        self._breakers = calls.breakers
        self._counters = calls.counters
        self._reading = reading
        self._writing = writing

    def unread(self, block: bytes) -> bool:
        """Whether reading ``block`` is pointless now, because such calls fail or hang."""
        if self._calls.quiet:
            return False
        self._calls.report_hung("lookup", "read")
        part = self._backend.part(block)
        return self._breakers.blocks("read", part) or self._breakers.blocks("lookup", part)

    def note_failure(self, late: str | None = None) -> None:
        """Count a failed read: not answered in time, for the reason ``late``, or not allowed."""
        if late is None:
            self._counters.count(skipped_calls=1)
            self._calls.note_failure("unavailable", "breaker")
        else:
            self._counters.count(late=1)
            self._calls.note_failure("late", late)

    def trouble(self, since: float | None = None) -> Loss | None:
        """Return why reads fail now, or failed at some time ``since`` (Unix seconds); else None."""
        if self._breakers.any_blocks("read", "lookup"):
            return Loss(self._calls.name, "unavailable", time.time(), "breaker")
        if since is None:
            return None
        last, now = self._calls.last_failure, time.time()
        if last is not None and last.at is not None and last.at >= since:
            return last
        if self._reading.longest > max(_SLOW_READ, _MOSTLY * (now - since)):
            return Loss(self._calls.name, "late", now, "no answer")
        return None

    def unwritable(self, block: bytes) -> bool:
        """Whether writing ``block`` is pointless now, because such calls fail or hang."""
        if self._calls.quiet:
            return False
        return self.writers_hang() or self._breakers.blocks("write", self._backend.part(block))

    def writers_hang(self) -> bool:
        """Whether all writer threads hang in calls of the backend."""
        self._calls.report_hung("write", "touch", "delete", "flush")
        return (
            self._writing.stuck(self._backend.timeout) and self.stuck_for() > self._backend.timeout
        )

    def settled(self, timeout: float | None) -> bool:
        """Wait until the write queue is empty, ``timeout`` seconds at most; return whether it is.

        Returns early if a write makes no progress for longer than the backend's timeout.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            hangs = self._backend.timeout - self.stuck_for()
            left = min(hangs, until - time.monotonic())
            if self._writing.wait(max(0.0, left)):
                return True
            if hangs <= 0 or time.monotonic() >= until:
                return False

    def stuck_for(self) -> float:
        """Return the seconds for which the longest write has made no progress."""
        return min(self._writing.longest, time.monotonic() - self._backend.last_progress)


def query_sizes(
    calls: BackendCalls,
    reading: Workers,
    blocks: Sequence[bytes],
    *,
    until: float | None,
    unread: Callable[[bytes], bool],
    answered: Callable[[], object],
) -> dict[bytes, int | None]:
    """Return the size of each of ``blocks``, None if missing; unanswered blocks are left out.

    Parts of the backend are queried in parallel. Waits for the backend's timeout at most, and until
    ``until`` (monotonic seconds) at most. ``unread`` returns whether querying a block is pointless,
    and reports hanging calls to their breakers; ``answered`` is called in a reader thread after
    each answer.
    """
    timeout = calls.backend.timeout
    patience = timeout if until is None else min(timeout, max(0.0, until - time.monotonic()))
    end = time.monotonic() + patience
    parts = calls.by_part(blocks)
    queries = [_Query(calls, part, found, unread, answered) for part, found in parts.items()]
    for query in queries:
        query.submit(reading)
    sizes: dict[bytes, int | None] = {}
    for query in queries:
        sizes |= query.result(end, whole=patience == timeout)
    return sizes


class _Query:
    """The sizes of blocks in one part of a backend."""

    def __init__(
        self,
        calls: BackendCalls,
        part: str,
        blocks: list[bytes],
        unread: Callable[[bytes], bool],
        answered: Callable[[], object],
    ) -> None:
        self._calls = calls
        self._part = part
        self._blocks = blocks
        self._unread = unread
        self._answered = answered
        self._sizes: list[int | None] = []
        self._began = False
        self._done = threading.Event()

    def submit(self, reading: Workers) -> None:
        """Queue the query, unless such calls fail or hang now."""
        calls = self._calls
        if self._unread(self._blocks[0]) or not calls.breaker("lookup", self._part).allows():
            calls.counters.count(skipped_calls=1)
            calls.note_failure("unavailable", "breaker")
            self._done.set()
        elif not reading.submit(self._run, given_up=self._done.set):
            calls.counters.count(late=1)
            calls.note_failure("late", "queue full")
            self._done.set()

    def _run(self) -> None:
        self._began = True
        try:
            with self._calls.to("sizes", "lookup", self._part):
                self._sizes = self._calls.backend.sizes(self._blocks)
        finally:
            self._done.set()
        if self._sizes:
            self._answered()

    def result(self, end: float, *, whole: bool) -> dict[bytes, int | None]:
        """Wait for the answer until ``end`` (monotonic seconds); return {} if there is none.

        ``whole``: the wait lasts the backend's full timeout, so a running call counts as failed. If
        the query still waits for a thread, the calls that occupy the threads count as failed.
        """
        if not self._done.wait(max(0.0, end - time.monotonic())):
            calls = self._calls
            calls.counters.count(late=1)
            calls.note_failure("late", "no answer")
            if whole and self._began:
                why = f"no answer in {calls.backend.timeout:g} s"
                calls.breaker("lookup", self._part).failed(why)
            else:
                self._unread(self._blocks[0])
            return {}
        return dict(zip(self._blocks, self._sizes, strict=False))
