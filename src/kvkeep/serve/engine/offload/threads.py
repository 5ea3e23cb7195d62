"""`DaemonThreads`: a few threads for calls into a store, which may hang."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["DaemonThreads"]


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
