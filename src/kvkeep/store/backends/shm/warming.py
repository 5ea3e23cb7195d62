"""`Warming`: takes the page faults of a mapping off the path of requests."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from kvkeep.store.backends.base import ALIGNMENT

__all__ = ["Warming"]

_STEP: Final = 16 << 20  # bytes between two looks whether to stop


class Warming:
    """Reads one byte of each page of ``memory``, in a thread, so that the process maps it.

    A page that no process has touched since the arena was made is zeroed by the kernel at this
    moment, too. Until all is done, a request that is first to touch a page waits for it. Reading
    changes nothing, so it may run beside any use of the memory.

    Thread safety: all methods.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep shm warming", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is mapped, ``timeout`` seconds at most; return whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End early; waits for the step under way."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for start in range(0, len(self._memory), _STEP):
            if self._stopped.is_set():
                break
            pages = np.frombuffer(self._memory[start : start + _STEP], np.uint8)[::ALIGNMENT]
            pages.max()  # releases the GIL
        self._memory = memoryview(b"")
