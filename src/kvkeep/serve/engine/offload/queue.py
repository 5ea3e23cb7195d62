"""`OffloadQueue`: writes to a store that wait for their turn."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.serve.engine.offload.threads import DaemonThreads

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["OffloadQueue"]

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
