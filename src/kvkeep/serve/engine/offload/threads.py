"""Daemon threads for calls into a store, and the queue of writes to it."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["DaemonThreads", "OffloadQueue"]


class DaemonThreads:
    """Up to ``count`` daemon threads that run tasks in the order of `submit`.

    Not a `ThreadPoolExecutor`: its threads are joined at exit, so one that hangs in a tier would
    keep the process alive. What a task raises goes to ``log``. Thread safety: `submit` and
    `close` belong to one thread.
    """

    def __init__(self, name: str, count: int, log: logging.Logger) -> None:
        self._name = name
        self._count = count
        self._log = log
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` soon, in a thread that is started if fewer than ``count`` are."""
        self._queue.put(task)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, timeout: float) -> None:
        """End the threads after all submitted tasks; wait ``timeout`` seconds for each."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - a store that fails costs a miss, never the thread
                self._log.exception("a call into the store failed")


_MOST: Final = 1024
_MOST_BYTES: Final = 320 << 20  # a few more than those of writes


class OffloadQueue:
    """Runs writes one after another in a thread, which a store may hang.

    Thread safety: `submit` and `close` belong to one thread, the others to any.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._thread = DaemonThreads("kvkeep writes", 1, log)
        self._unwritten = 0  # writes queued or under way
        self._bytes = 0  # of these
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the writes that are queued or under way."""
        return self._bytes

    def submit(self, write: Callable[[], None], nbytes: int = 0) -> None:
        """Queue a write of ``nbytes``."""
        with self._changed:
            self._unwritten += 1
            self._bytes += nbytes
        self._thread.submit(lambda: self._run(write, nbytes))

    def submit_some(self, call: Callable[[], None], nbytes: int) -> None:
        """Queue a call of ``nbytes`` that may be left out: not while 1,024 of anything wait."""
        if self._unwritten < _MOST and self._bytes + nbytes <= _MOST_BYTES:
            self.submit(call, nbytes)

    def _run(self, write: Callable[[], None], nbytes: int) -> None:
        try:
            write()
        finally:
            with self._changed:
                self._unwritten -= 1
                self._bytes -= nbytes
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds until no write is queued; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout)

    def close(self, timeout: float) -> bool:
        """`flush`, and end the thread; a thread that hangs in the store is left running."""
        end = time.monotonic() + timeout
        flushed = self.flush(timeout)
        self._thread.close(max(0.0, end - time.monotonic()))
        return flushed
