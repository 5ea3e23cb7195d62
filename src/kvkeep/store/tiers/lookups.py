"""`query_sizes`: queries a tier's backend, in its reader threads, which blocks it holds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.workers import Workers

__all__ = ["query_sizes"]


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
